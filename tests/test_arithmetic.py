"""The demo's reward: the last number of the completion, and nothing that merely contains it."""

from __future__ import annotations

import re

import pytest

from grpo_trainer.config import ArithmeticConfig
from grpo_trainer.tasks.arithmetic import Arithmetic
from grpo_trainer.tasks.task import Example

TASK = Arithmetic(ArithmeticConfig(), seed=0)


@pytest.mark.parametrize(
    ("completion", "answer", "correct"),
    [
        ("5", 5, True),
        ("2 + 3 = 5.", 5, True),
        ("The answer is 14", 14, True),
        ("14.0", 14, True),
        ("3-5", 5, True),
        ("1,004", 1004, True),
        ("5 or 6", 5, False),
        ("1000000005", 5, False),
        ("123000000005", 5, False),
        ("0.5", 5, False),
        ("1,004", 4, False),
        ("-5", 5, False),
        ("= -5", -5, True),
        ("\u0665", 5, False),
        ("\uff15", 5, False),
        ("9" * 10_000, 9, False),
        ("five", 5, False),
        ("", 0, False),
    ],
)
def test_score(completion: str, answer: int, correct: bool) -> None:
    score = TASK.score(Example("", answer), "", completion)
    assert (score.correct, score.reward, score.parts) == (correct, float(correct), {"correct": float(correct)})


def test_split() -> None:
    assert (len(TASK.train), len(TASK.held_out)) == (70, 30)
    assert len({str(e.prompt) for e in TASK.train + TASK.held_out}) == 100

    def pairs(examples: list[Example]) -> set[tuple[str, ...]]:
        return {tuple(sorted(re.findall(r"\d+", str(e.prompt)))) for e in examples}

    assert not pairs(TASK.train) & pairs(TASK.held_out), "a + b is held out, but b + a is trained on"
    assert [e.answer for e in Arithmetic(ArithmeticConfig(), seed=1).held_out] != [e.answer for e in TASK.held_out]
