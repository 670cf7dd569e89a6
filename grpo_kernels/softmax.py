"""From the sums of an anchored softmax to log-probabilities and entropies, in float64 on one number per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp overflows float32 at 88, and -c / (1 + s) * E underflows before: below this log-probability a row takes its largest logit as offset.
MIN_ANCHORED_LOGPROB = -60.0
# Distances x - o are held between these before exp. A row that reaches the upper one is extreme and is redone, and what is kept of it until
# then must be finite, because it is multiplied by 0: a nat above the limit, exp leaves room for a sum over any vocabulary. The lower one
# stands for -inf, of which 0 * -inf would be NaN.
MAX_DISTANCE, MIN_DISTANCE = -MIN_ANCHORED_LOGPROB + 1.0, -1e30


@dataclass(frozen=True)
class Statistics:
    """[n] each: log-probability of the target, entropy in nats, others / total = 1 - p_y, the total and its logarithm."""

    logprobs: Tensor
    entropy: Tensor
    complement: Tensor
    total: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, others: Tensor, weighted: Tensor, distance: Tensor) -> Statistics:
        """From s = sum over j != y of exp(x_j - o), the same sum weighted by x_j - o, and distance = x_y - o, all [n] float64, where the
        offset o is x_y up to a rounding, or the row's largest logit.

        The target's own term is left out of s, so that 1 - p_y = s / total and logp = -log1p(s / exp(distance)) keep their digits as
        p_y -> 1.
        """
        own = torch.exp(distance)
        total = others + own
        log_total = torch.log(total)
        logprobs = torch.where(distance > -1.0, -torch.log1p(others / own), distance - log_total)
        entropy = log_total - (weighted + torch.where(own > 0, own * distance, 0.0)) / total
        return cls(logprobs, entropy.clamp(min=0.0), others / total, total, log_total)


def is_extreme(others: Tensor) -> Tensor:
    """Rows that must be redone with their largest logit as the offset, NaN included; [n] bool."""
    return ~(torch.log1p(others) <= -MIN_ANCHORED_LOGPROB)


def target_slope(slope: Tensor, entropy_slope: Tensor, logprobs: Tensor, entropy: Tensor, complement: Tensor) -> Tensor:
    """d loss / d x_y = c (1 - p_y) - e p_y (log p_y + H), [n], with c and e the slopes by log-probability and entropy."""
    # A log-probability of -inf has probability 0, and 0 * -inf would be NaN.
    return slope * complement - entropy_slope * logprobs.exp() * (logprobs.clamp(min=-1e30) + entropy)
