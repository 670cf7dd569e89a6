"""Sentences for a step that teaches nothing or went wrong: what it means and what to change."""

from __future__ import annotations

from grpo_trainer.monitor.metrics import Metrics

MOSTLY_TRUNCATED = 0.9


def advice(metrics: Metrics, max_new_tokens: int) -> list[str]:
    found = []
    if metrics["updates_nonfinite"]:
        found.append(
            "The loss or its gradient was not finite, so that update was left out. If it happens again: lower "
            "optimizer.learning_rate, use dtype=float32, or look for a damaged model."
        )
    if metrics["groups/no_signal"] == 1.0:
        found.append(f"In every group all completions got the same reward, so there was nothing to learn from this step: {_why(metrics)}")
    truncated = metrics["completion/truncated"] or 0.0
    if truncated >= MOSTLY_TRUNCATED:
        found.append(
            f"{truncated:.0%} of the completions were cut at sampling.max_new_tokens = {max_new_tokens} before they ended, "
            "and most answers with them: raise it, or ask for shorter answers."
        )
    return found


def _why(metrics: Metrics) -> str:
    if metrics["groups/all_right"] == 1.0:
        return "all were right. The task is too easy for this model; use harder prompts, or stop here."
    if metrics["groups/all_wrong"] == 1.0:
        return (
            "all were wrong. Use easier prompts, a stronger model, a larger group_size, a higher sampling.temperature, "
            "or a reward with partial credit; look into samples.jsonl to see what the model writes."
        )
    return "each prompt is either always or never solved. Use prompts of middling difficulty, or a larger group_size."
