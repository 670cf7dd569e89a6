"""The numbers of a step under stable names, and the files they are kept in."""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.groups import Group
from grpo_trainer.learner import UpdateStats

Metrics = dict[str, float | int | None]


def step_metrics(
    step: int, groups: Sequence[Group], updates: Sequence[UpdateStats], rollout_seconds: float, train_seconds: float
) -> Metrics:
    """Names and meanings: docs/metrics.md. Lengths in tokens, times in seconds, logarithms natural; None: unknown or not finite."""
    scores = [score for group in groups for score in group.scores]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    right = [sum(score.correct for score in group.scores) / len(group.scores) for group in groups]
    first, last = updates[0], updates[-1]
    trained = sum(update.tokens for update in updates)
    metrics: Metrics = {
        "step": step,
        "reward/mean": statistics.fmean(score.reward for score in scores),
        "reward/std": statistics.pstdev(score.reward for score in scores),
    }
    for part in sorted({name for score in scores for name in score.parts}):
        metrics[f"reward/{part}"] = statistics.fmean(score.parts.get(part, 0.0) for score in scores)
    metrics |= {
        "accuracy": statistics.fmean(score.correct for score in scores),
        "advantage/abs_mean": float(torch.cat([group.advantages for group in groups]).abs().mean()),
        "groups/all_right": sum(share == 1 for share in right) / len(groups),
        "groups/all_wrong": sum(share == 0 for share in right) / len(groups),
        "groups/mixed": sum(0 < share < 1 for share in right) / len(groups),
        "groups/no_signal": sum(not group.has_signal for group in groups) / len(groups),
        "completion/length_mean": statistics.fmean(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated": sum(completion.finish_reason == "length" for completion in completions) / len(completions),
        "loss": first.loss,
        "kl": first.per_token(first.kl_sum),
        "entropy": first.per_token(first.entropy_sum),
        # Of the last update: on the first the ratio is 1 by definition and nothing is clipped.
        "ratio/mean": last.per_token(last.ratio_sum),
        "clip/low": last.per_token(last.clipped_low),
        "clip/high": last.per_token(last.clipped_high),
        "grad_norm": first.grad_norm,
        "learning_rate": first.learning_rate,
        "updates": sum(update.stepped for update in updates),
        "updates_nonfinite": sum(not update.finite for update in updates),
        "time/rollout": rollout_seconds,
        "time/train": train_seconds,
        "tokens_per_second/rollout": sum(lengths) / rollout_seconds,
        "tokens_per_second/train": trained / train_seconds,
        "memory/peak_mb": peak_memory_mb(),
    }
    return {name: None if value is None or not math.isfinite(value) else value for name, value in metrics.items()}


def peak_memory_mb() -> float:
    """Of the GPU where one is used, else of the process."""
    if torch.cuda.is_initialized():  # this process computes there; a GPU that is merely present is not asked
        return torch.cuda.max_memory_allocated() / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


class JsonLines:
    """One JSON object a line; every line is handed to the system when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Up to the first line that is no row with a step: a killed process may leave half of one."""
        rows = []
        for line in self.path.read_bytes().split(b"\n") if self.path.exists() else []:
            try:
                row = json.loads(line)
                row["step"] + 0
            except (ValueError, TypeError, KeyError):
                break
            rows.append(row)
        return rows

    def keep(self, last_step: int) -> None:
        """Drops what came after `last_step` (and half a line), so that a resumed run continues as if it had never stopped."""
        rows = [row for row in self.read() if row["step"] <= last_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        partial.replace(self.path)
