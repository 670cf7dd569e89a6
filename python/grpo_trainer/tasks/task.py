"""What a task is: prompts with what is needed to score their completions, some of them held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """`prompt`: chat messages, or a string that is used as it is. `answer`: whatever the task's `score` needs."""

    prompt: str | list[dict[str, str]]
    answer: Any


@dataclass(frozen=True)
class Score:
    """`reward` is what is trained on; `parts` are its terms by name, logged apart; `correct` is what accuracy counts."""

    reward: float
    parts: dict[str, float]
    correct: bool


class Task(Protocol):
    train: list[Example]
    held_out: list[Example]

    def score(self, example: Example, prompt: str, completion: str) -> Score:
        """`prompt` and `completion` as text; a task trains on token ids, and text is for scoring only."""
