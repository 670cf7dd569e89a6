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
    """All sums a + b with a and b from 0 to `largest`; the last number of a completion is its answer."""

    def __init__(self, config: ArithmeticConfig, seed: int) -> None:
        sums = [(a, b) for a in range(config.largest + 1) for b in range(config.largest + 1)]
        random.Random(seed).shuffle(sums)
        examples = [Example(_question(a, b), a + b) for a, b in sums]
        self.held_out, self.train = examples[: config.held_out], examples[config.held_out :]

    def score(self, example: Example, prompt: str, completion: str) -> Score:
        numbers = _NUMBER.findall(completion)
        correct = bool(numbers) and Decimal(numbers[-1].replace(",", "")) == example.answer
        return Score(float(correct), {"correct": float(correct)}, correct)


def _question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with only the number."}]
