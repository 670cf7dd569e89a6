"""What an objective is computed from, and what it gives, per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Log-ratios are held in [-20, 20] before exp: e^20 = 4.9e8 is far outside every clip range, and a finite input then gives a
# finite loss and gradient (exp overflows float32 at 88). Beyond the bound a ratio or an estimate is constant, so its gradient is 0.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenBatch:
    """What the objective of some tokens is computed from, and what a user's own `policy_loss` is given.

    [n] tensors in float32, or float64 where the hidden states are: only tokens that count (mask true), and whole sequences of them only
    with `Objective.ratio_level` "sequence" or where else the objective looks at sequences; otherwise any part of them that fits. Only
    `logprobs` carries a gradient. `policy_weight` and `entropy_threshold` are applied after the policy loss, not by it.

    Attributes:
        logprobs: log-probabilities of the targets under the current policy, in nats.
        old_logprobs: under the policy of the last rollout; the current ones where none were given.
        ref_logprobs: under the reference policy, or None.
        rollout_logprobs: as the rollout engine reported them, NaN where it could not, or None.
        advantages: of each token.
        entropy: of each token's distribution, in nats.
        sequence_of_row: int64, the sequence of each token.
        lengths: [sequences] float, the tokens of each sequence that count, at least 1.
        policy_weight: constant factor of each token's policy loss that is known beforehand.
        entropy_threshold: tokens of smaller entropy have no policy loss, or None.
        whole_sequences: whether all of a sequence's tokens are here.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    advantages: Tensor
    entropy: Tensor
    sequence_of_row: Tensor
    lengths: Tensor
    policy_weight: Tensor
    entropy_threshold: Tensor | None = None
    whole_sequences: bool = True

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum of `values` [n] over each token's sequence, [n].

        Raises:
            ValueError: where only a part of a sequence may be here.
        """
        if not self.whole_sequences:
            raise ValueError("ratio_level is 'token'; a policy_loss that looks at whole sequences needs Objective(ratio_level='sequence')")
        sums = torch.zeros(self.lengths.numel(), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.sequence_of_row, values)[self.sequence_of_row]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` [n] over each token's sequence, [n]."""
        return self.sequence_sum(values) / self.lengths[self.sequence_of_row].to(values.dtype)


@dataclass(frozen=True)
class TokenLoss:
    """Per-token results, each [n]. `loss` carries the graph back to the log-probabilities; the rest is detached.

    `rollout_ratio` is exp(old - rollout) at the correction's level before it is truncated or masked; `policy_weight` the product of all
    constant factors of the policy loss: rollout correction, off-policy mask, entropy mask.
    """

    loss: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    rollout_ratio: Tensor
    policy_weight: Tensor


def bounded(log_ratio: Tensor) -> Tensor:
    """Within -+MAX_LOG_RATIO. A NaN passes through with its gradient: clamp would make that 0, and hide the NaN from a gradient norm."""
    return torch.where(log_ratio.isnan(), log_ratio, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
