"""The GRPO objective: its settings as data, and its mathematics per token. The one place of the loss mathematics in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_kernels.packing import LossCounts

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]

# Log-ratios are held in [-20, 20] before exp: e^20 = 4.9e8 is far outside every clip range, and a finite input then gives a
# finite loss and gradient (exp overflows float32 at 88). Beyond the bound the term is constant, so its gradient is 0.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """Per-token results, each [rows] float32. `loss` carries the graph back to the log-probabilities; the rest is detached."""

    loss: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True)
class Objective:
    """What is minimised: a clipped policy-gradient loss per token, a KL penalty, and how tokens are averaged.

    Per token with log-probability `logp`, advantage `A` and `r = exp(logp - old)` (r = 1 when `old` is not given, the first update):

        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * KL(logp, ref)

    with KL one of k1 = logp - ref, k2 = (logp - ref)^2 / 2, k3 = exp(ref - logp) - (ref - logp) - 1 (Schulman 2020,
    http://joschu.net/blog/kl-approx.html). k1's gradient has expectation zero on policy: as a penalty in the loss it is only noise.

    `aggregation`: "sequence", the mean over sequences of the mean over a sequence's tokens (GRPO, arXiv 2402.03300 eq. 3); "token",
    the mean over all tokens (DAPO, arXiv 2503.14476); "constant", the sum over tokens by `sequences x constant_length`
    (Dr. GRPO, arXiv 2503.20783). The counts are global: see `LossCounts`.

    Raises:
        ValueError: at construction, naming the field, what was given and what is allowed.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KLEstimator = "k3"
    kl_coef: float = 0.0
    aggregation: Aggregation = "sequence"
    constant_length: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}; it must be in [0, 1]")
        if not 0.0 <= self.clip_high < float("inf"):
            raise ValueError(f"clip_high is {self.clip_high}; it must be finite and at least 0")
        if self.kl not in ("k1", "k2", "k3"):
            raise ValueError(f"kl is {self.kl!r}; it must be 'k1', 'k2' or 'k3'")
        if not 0.0 <= self.kl_coef < float("inf"):
            raise ValueError(f"kl_coef is {self.kl_coef}; it must be finite and at least 0")
        if self.aggregation not in ("token", "sequence", "constant"):
            raise ValueError(f"aggregation is {self.aggregation!r}; it must be 'token', 'sequence' or 'constant'")
        if self.aggregation == "constant" and not (isinstance(self.constant_length, int) and self.constant_length >= 1):
            raise ValueError(
                f"constant_length is {self.constant_length}; aggregation 'constant' needs the maximum completion length (at least 1)"
            )
        if self.aggregation != "constant" and self.constant_length is not None:
            raise ValueError(f"constant_length is {self.constant_length}, but aggregation is {self.aggregation!r}; leave it out")

    @classmethod
    def grpo(cls, *, kl_coef: float = 0.0, clip: float = 0.2) -> Objective:
        """DeepSeekMath's GRPO (arXiv 2402.03300 eq. 3). The paper's kl_coef is 0.04, with advantages scaled by the group's std."""
        return cls(clip_low=clip, clip_high=clip, kl_coef=kl_coef, aggregation="sequence")

    @classmethod
    def dr_grpo(cls, *, constant_length: int, clip: float = 0.2) -> Objective:
        """Dr. GRPO (arXiv 2503.20783): no length normalisation, no KL. Use it with `group_advantages(..., scale="none")`."""
        return cls(clip_low=clip, clip_high=clip, aggregation="constant", constant_length=constant_length)

    @classmethod
    def dapo(cls, *, clip_low: float = 0.2, clip_high: float = 0.28) -> Objective:
        """DAPO (arXiv 2503.14476 eq. 8): a higher upper clip, the mean over all tokens, no KL."""
        return cls(clip_low=clip_low, clip_high=clip_high, aggregation="token")

    @property
    def needs_every_token(self) -> bool:
        """Whether a token with advantage 0 still has a gradient (from the KL penalty)."""
        return self.kl_coef != 0.0

    def token_loss(self, logprobs: Tensor, old_logprobs: Tensor | None, ref_logprobs: Tensor | None, advantages: Tensor) -> TokenLoss:
        """The loss of each token before averaging.

        Args:
            logprobs: [rows], current log-probabilities, natural log; the gradient flows to these only.
            old_logprobs: [rows] or None, log-probabilities under the policy that sampled. None: equal to `logprobs`, so the ratio is 1.
            ref_logprobs: [rows] or None, log-probabilities under the reference; needed when kl_coef is not 0.
            advantages: [rows].
        """
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        ratio = torch.exp((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        kl = torch.zeros_like(logprobs)
        if ref_logprobs is not None:
            kl = self._kl(logprobs, ref_logprobs)
            loss = loss + self.kl_coef * kl if self.kl_coef else loss
        with torch.no_grad():
            # Clipped means that the gradient is cut: the ratio is outside on the side to which the advantage pushes.
            low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
            high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        return TokenLoss(loss, ratio.detach(), kl.detach(), low, high)

    def _kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        difference = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.kl == "k1":
            return -difference
        if self.kl == "k2":
            return 0.5 * difference.square()
        return torch.expm1(difference) - difference  # expm1: k3 is quadratic near 0, where exp(d) - 1 has no digits left

    def token_weights(self, mask: Tensor, sequence_of_row: Tensor, sequences: int, counts: LossCounts) -> Tensor:
        """Each row's share of the average, [rows] float32: `sum(weights * token_loss)` over all pieces of a batch is the loss.

        `mask` is [rows] bool, `sequence_of_row` [rows] int64 in [0, sequences).
        """
        if self.aggregation == "token":
            return mask.float() / max(counts.tokens, 1)  # .float(): a bool tensor would be divided in torch's default dtype
        if self.aggregation == "constant":
            assert self.constant_length is not None
            return mask.float() / (max(counts.sequences, 1) * self.constant_length)
        lengths = torch.zeros(sequences, dtype=torch.int64, device=mask.device).index_add_(0, sequence_of_row, mask.long())
        return mask.float() / (max(counts.sequences, 1) * lengths.clamp(min=1)[sequence_of_row]).float()
