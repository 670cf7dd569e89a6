"""The correction for a rollout engine whose policy is not quite the trainer's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_kernels.checks import check_choice, check_number
from grpo_kernels.token_batch import TokenBatch, bounded

CorrectionLevel = Literal["token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class RolloutCorrection:
    """A constant factor on the policy loss for the mismatch of the rollout engine's policy with the trainer's: w = pi_old / pi_rollout.

    level: "token", each token's ratio; "sequence", the product over a sequence, which grows with its length; "geometric", the product to
        the power 1 / length, whose bounds mean the same at every length.
    mode: "truncate", w is held in [low, high] (TIS, https://fengyao.notion.site/off-policy-rl); "mask", w outside of it becomes 0 (MIS,
        Liu, Li et al. 2025, "When Speed Kills Stability").
    low, high: bounds of the ratio; None: no bound on that side.

    A token whose rollout log-probability is NaN (an engine that could not score it) has ratio 1.

    Raises:
        ValueError: at construction, naming the field.
    """

    level: CorrectionLevel = "token"
    mode: CorrectionMode = "truncate"
    low: float | None = None
    high: float | None = 2.0

    def __post_init__(self) -> None:
        check_choice("rollout_correction.level", self.level, get_args(CorrectionLevel))
        check_choice("rollout_correction.mode", self.mode, get_args(CorrectionMode))
        if self.low is None and self.high is None:
            raise ValueError("rollout_correction.low and .high are both None; at least one bound is needed")
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None:
                check_number(f"rollout_correction.{name}", bound, 0.0, math.inf)
        if (self.low or 0.0) > (math.inf if self.high is None else self.high):
            raise ValueError(f"rollout_correction.low is {self.low} and .high {self.high}; low must not be above high")

    def ratio(self, batch: TokenBatch) -> Tensor:
        """The raw ratio of each token at `level`, [n]."""
        assert batch.rollout_logprobs is not None
        log_ratio = torch.nan_to_num(batch.old_logprobs.detach() - batch.rollout_logprobs, nan=0.0, posinf=math.inf, neginf=-math.inf)
        log_ratio = bounded(log_ratio)
        if self.level == "sequence":
            log_ratio = bounded(batch.sequence_sum(log_ratio))
        elif self.level == "geometric":
            log_ratio = batch.sequence_mean(log_ratio)
        return torch.exp(log_ratio)

    def weight(self, ratio: Tensor) -> Tensor:
        low, high = self.low or 0.0, math.inf if self.high is None else self.high
        if self.mode == "truncate":
            return ratio.clamp(low, high)
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
