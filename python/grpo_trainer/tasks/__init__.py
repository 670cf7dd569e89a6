"""Tasks by name."""

from __future__ import annotations

from grpo_trainer.config import ArithmeticConfig, CountdownConfig
from grpo_trainer.tasks.arithmetic import Arithmetic
from grpo_trainer.tasks.countdown import Countdown
from grpo_trainer.tasks.task import Example, Score, Task

__all__ = ["Example", "Score", "Task", "build_task"]


def build_task(config: ArithmeticConfig | CountdownConfig, seed: int) -> Task:
    return Arithmetic(config, seed) if isinstance(config, ArithmeticConfig) else Countdown(config, seed)
