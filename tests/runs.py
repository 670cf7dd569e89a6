"""A trainer run on a tiny model, with a task that it learns in seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from grpo_trainer.loop import train
from grpo_trainer.monitor.display import Display
from grpo_trainer.run import Run
from grpo_trainer.tasks import Example, Score
from tiny import write_model


class Digits:
    """Reward: the share of a completion's characters that are digits. Learnable by a random model in seconds."""

    def __init__(self) -> None:
        examples = [Example(f"say {word}: ", None) for word in (*"abcdefgh", "the end", "nothing")]
        self.train, self.held_out = examples[:8], examples[8:]

    def score(self, example: Example, prompt: str, completion: str) -> Score:
        share = sum(character.isdigit() for character in completion) / max(len(completion), 1)
        return Score(share, {"digits": share}, share > 0.9)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    model = folder / "model"
    if not model.exists():
        write_model(model, scale=1.0)
    return {
        "model": str(model),
        "task": {"name": "arithmetic"},
        "steps": 4,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_new_tokens": 8},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"samples": 2},
        "run_dir": str(folder / "run"),
        "threads": 1,
    } | changes


def quiet(run: Run) -> Display:
    return Display(Console(file=open(os.devnull, "w")), run.first_step, run.config.steps)


def run_to_end(run: Run) -> list[dict[str, Any]]:
    try:
        assert train(run, quiet(run))
    finally:
        run.close()
    return run.metrics.read()


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = ("time/", "tokens_per_second/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(measured)} for row in rows]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.policy.model.named_parameters()}
