"""Additions of small numbers: the demo's task."""

from __future__ import annotations

import random
import re
from decimal import Decimal

from grpo_trainer.config import ArithmeticConfig
from grpo_trainer.tasks.task import Example, Score

# A minus behind a digit is an operation, not a sign.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)


class Arithmetic:
    """All sums a + b with a and b from 0 to `largest`; the last number of a completion is its answer.

    a + b and b + a are held out together: one of them in training would give the other away.
    """

    def __init__(self, config: ArithmeticConfig, seed: int) -> None:
        pairs = [(a, b) for a in range(config.largest + 1) for b in range(a, config.largest + 1)]
        random.Random(seed).shuffle(pairs)
        self.held_out: list[Example] = []
        self.train: list[Example] = []
        for a, b in pairs:
            twins = [Example(_question(x, y), a + b) for x, y in dict.fromkeys([(a, b), (b, a)])]
            fits = len(self.held_out) + len(twins) <= config.held_out
            (self.held_out if fits else self.train).extend(twins)

    def score(self, example: Example, prompt: str, completion: str) -> Score:
        numbers = _NUMBER.findall(completion)
        correct = bool(numbers) and Decimal(numbers[-1].replace(",", "")) == example.answer
        return Score(float(correct), {"correct": float(correct)}, correct)


def _question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with only the number."}]
