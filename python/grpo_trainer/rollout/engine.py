"""What a rollout engine gives: completions as token ids, with the log-probabilities they were sampled at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True)
class Completion:
    """`logprobs` are of the sampled tokens at the sampling temperature, in nats; an end-of-sequence token is kept in both lists."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    def generate(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, temperature: float, max_new_tokens: int, generator: torch.Generator
    ) -> list[list[Completion]]:
        """`group_size` completions for each prompt, in order. Temperature 0 takes the most likely token."""

    def generator(self, seed: int) -> torch.Generator:
        """A random generator on the device that samples."""
