"""The GRPO objective: its settings as data, and its mathematics per token. The one place of the loss mathematics in Python."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from grpo_kernels.checks import check_choice, check_number
from grpo_kernels.packing import LossCounts
from grpo_kernels.rollout_correction import RolloutCorrection
from grpo_kernels.token_batch import MAX_LOG_RATIO, TokenBatch, TokenLoss, bounded

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]
RatioLevel = Literal["token", "sequence"]
PolicyLossName = Literal["clip", "cispo", "sapo", "gmpo", "vespo", "reinforce"]
PolicyLoss = PolicyLossName | Callable[[TokenBatch], Tensor]

# VESPO's authors bound the sequence weight from below at 1e-8.
_VESPO_MIN_LOG_WEIGHT = math.log(1e-8)

_BY_SETTINGS: dict[str, Objective] = {}
_WITH_FUNCTION: weakref.WeakValueDictionary[str, Objective] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Objective:
    """What is minimised: a policy-gradient loss per token, a KL penalty, an entropy bonus, and how tokens are averaged.

    With `r` = exp(logp - old) of a token, or with `ratio_level` "sequence" exp(mean over the sequence of logp - old) (GSPO, arXiv
    2507.18071 eq. 7), advantage `A` and stop-gradient sg, a token's policy loss is, by `policy_loss`:

        clip        -min(min(r, max_ratio) A, clip(r, 1 - clip_low, 1 + clip_high) A)        arXiv 1707.06347; max_ratio: arXiv 1912.09729
        cispo       -sg(min(r, 1 + clip_high)) A logp                                        arXiv 2506.13585
        sapo        -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A                  arXiv 2511.20347
        gmpo        -A exp(mean over the sequence of log r, each clipped at -clip_low, clip_high as by PPO)    arXiv 2507.20673
        vespo       -sg(phi(w)) A logp, phi(w) = w^k e^(lambda (1 - w)), w = prod of the sequence's token ratios,
                    rollout-corrected ones with `rollout_correction`                         arXiv 2602.10693
        reinforce   -A logp
        a function  of a `TokenBatch`, that returns the [n] losses, differentiable in `logprobs`

    Without old log-probabilities, the first update on a batch, r = 1 with the gradient of logp. The loss is then

        sum over tokens of share * (policy_weight * policy loss + kl_coef * KL) - entropy_coef * mean over all tokens of the entropy

    where `share` is by `aggregation`: "sequence", the mean over sequences of the mean over a sequence's tokens (arXiv 2402.03300 eq. 3);
    "token", the mean over all tokens (DAPO, arXiv 2503.14476); "constant", 1 / (sequences x constant_length) (Dr. GRPO, arXiv 2503.20783).
    All counts are global, see `LossCounts`.

    KL, with d = ref - logp: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 (Schulman 2020, http://joschu.net/blog/kl-approx.html). k1's gradient
    in the loss has expectation zero on policy: it is only noise. `kl_ratio_corrected` multiplies by r, which with the token's r makes the
    gradient of k3 that of the reverse KL (arXiv 2512.02556). For KL in the reward leave kl_coef at 0: `kl_penalized_rewards`.

    `policy_weight` is the product of: `rollout_correction`, see there (but for vespo); `off_policy_threshold`, which drops the tokens with
    A < 0 of a sequence whose mean(rollout - logp), or mean(old - logp) without rollout log-probabilities, is larger (arXiv 2512.02556
    eq. 9); `top_entropy`, which keeps the policy loss of that fraction of the tokens, those of largest entropy, and of one at least (arXiv
    2506.01939). A function as `policy_loss` is not clipped, but weighted, averaged and joined with KL and entropy like the others; one
    that looks at whole sequences says so by `ratio_level` "sequence". GMPO's range is -clip_low to clip_high of
    log r for either sign of A. Make an objective once, not per step: torch.compile tells them apart.

    Raises:
        ValueError: at construction, naming the field, what was given and what is allowed.
    """

    policy_loss: PolicyLoss = "clip"
    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_ratio: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    kl: KLEstimator = "k3"
    kl_coef: float = 0.0
    kl_ratio_corrected: bool = False
    entropy_coef: float = 0.0
    top_entropy: float = 1.0
    rollout_correction: RolloutCorrection | None = None
    off_policy_threshold: float | None = None
    aggregation: Aggregation = "sequence"
    constant_length: int | None = None
    key: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if not callable(self.policy_loss):
            check_choice("policy_loss", self.policy_loss, get_args(PolicyLossName), "or a function of a TokenBatch")
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        check_choice("kl", self.kl, get_args(KLEstimator))
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_number("clip_low", self.clip_low, 0.0, 1.0)
        check_number("top_entropy", self.top_entropy, 0.0, 1.0)
        for name in ("clip_high", "kl_coef", "entropy_coef", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            check_number(name, getattr(self, name), 0.0, math.inf)
        for name in ("sapo_tau_pos", "sapo_tau_neg"):
            check_number(name, getattr(self, name), 1e-3, math.inf)
        if self.max_ratio is not None:
            check_number("max_ratio", self.max_ratio, 1.0 + self.clip_high, math.inf)  # below, it would undo the upper clip
            if self.policy_loss != "clip":
                raise ValueError(f"max_ratio is {self.max_ratio}, but policy_loss is {self.policy_loss!r}; only 'clip' has it")
        if self.off_policy_threshold is not None:
            check_number("off_policy_threshold", self.off_policy_threshold, 0.0, math.inf)
        if not isinstance(self.rollout_correction, RolloutCorrection | None):
            raise ValueError(f"rollout_correction is {self.rollout_correction!r}; it must be None or a RolloutCorrection")
        if self.policy_loss == "vespo" and self.rollout_correction is not None and self.rollout_correction.level != "token":
            raise ValueError(
                f"rollout_correction.level is {self.rollout_correction.level!r}; policy_loss 'vespo', which multiplies the tokens' "
                "ratios itself, needs 'token'"
            )
        if not isinstance(self.kl_ratio_corrected, bool):
            raise ValueError(f"kl_ratio_corrected is {self.kl_ratio_corrected!r}; it must be True or False")
        length = self.constant_length
        if self.aggregation == "constant" and not (isinstance(length, Integral) and not isinstance(length, bool) and length >= 1):
            raise ValueError(
                f"constant_length is {self.constant_length}; aggregation 'constant' needs the maximum completion length (at least 1)"
            )
        if self.aggregation != "constant" and self.constant_length is not None:
            raise ValueError(f"constant_length is {self.constant_length}, but aggregation is {self.aggregation!r}; leave it out")
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()  # in the process that it was sent to as well

    def _register(self) -> None:
        """For `of_key`. Equal settings share an entry. One with a function, which may hold a batch's tensors, is told by its identity, for
        two functions may print alike, and is forgotten with its last owner."""
        registry: MutableMapping[str, Objective] = _WITH_FUNCTION if callable(self.policy_loss) else _BY_SETTINGS
        object.__setattr__(self, "key", f"{self!r} {id(self)}" if callable(self.policy_loss) else repr(self))
        registry[self.key] = self

    @classmethod
    def grpo(cls, **changes: Any) -> Objective:
        """DeepSeekMath's GRPO (arXiv 2402.03300 eq. 3). The paper's kl_coef is 0.04, with advantages scaled by the group's std."""
        return _preset({"aggregation": "sequence"}, changes)

    @classmethod
    def dr_grpo(cls, *, constant_length: int, **changes: Any) -> Objective:
        """Dr. GRPO (arXiv 2503.20783): no length normalisation, no KL. Use it with `group_advantages(..., scale="none")`."""
        return _preset({"aggregation": "constant", "constant_length": constant_length}, changes)

    @classmethod
    def dapo(cls, **changes: Any) -> Objective:
        """DAPO (arXiv 2503.14476 eq. 8): a higher upper clip, the mean over all tokens, no KL."""
        return _preset({"clip_high": 0.28, "aggregation": "token"}, changes)

    @classmethod
    def bnpo(cls, **changes: Any) -> Objective:
        """TRL's "bnpo": the mean over the tokens of the micro-batch, so call the loss without `counts`."""
        return _preset({"aggregation": "token"}, changes)

    @classmethod
    def gspo(cls, **changes: Any) -> Objective:
        """GSPO (arXiv 2507.18071 eq. 5, clip range section 5.1): the ratio of a whole sequence, to the power 1 / length."""
        return _preset({"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"}, changes)

    @classmethod
    def gmpo(cls, **changes: Any) -> Objective:
        """GMPO (arXiv 2507.20673): the geometric mean of the clipped ratios; log r is clipped at -+0.4."""
        return _preset({"policy_loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequence"}, changes)

    @classmethod
    def cispo(cls, *, max_weight: float = 5.0, **changes: Any) -> Objective:
        """CISPO (arXiv 2506.13585): the ratio is a constant weight of at most `max_weight` = 1 + clip_high; no token loses its gradient."""
        check_number("max_weight", max_weight, 1.0, math.inf)
        return _preset({"policy_loss": "cispo", "clip_high": max_weight - 1.0, "aggregation": "token"}, changes)

    @classmethod
    def sapo(cls, **changes: Any) -> Objective:
        """SAPO (arXiv 2511.20347): a smooth gate in place of the clip."""
        return _preset({"policy_loss": "sapo", "aggregation": "sequence"}, changes)

    @classmethod
    def vespo(cls, **changes: Any) -> Objective:
        """VESPO (arXiv 2602.10693): each sequence weighted by a gamma density of its ratio."""
        return _preset({"policy_loss": "vespo", "aggregation": "token"}, changes)

    @classmethod
    def luspo(cls, **changes: Any) -> Objective:
        """LUSPO (arXiv 2602.05261): GSPO's ratio, each sequence weighted by its length (a mean over sequences of token sums)."""
        return _preset({"ratio_level": "sequence", "aggregation": "constant", "constant_length": 1}, changes)

    @classmethod
    def reinforce(cls, **changes: Any) -> Objective:
        """REINFORCE, the mean over all tokens of -A logp."""
        return _preset({"policy_loss": "reinforce", "aggregation": "token"}, changes)

    @classmethod
    def rloo(cls, **changes: Any) -> Objective:
        """RLOO (arXiv 2402.14740): REINFORCE on whole completions (a mean over sequences of token sums), with
        `group_advantages(..., baseline="leave_one_out", scale="none")`."""
        return _preset({"policy_loss": "reinforce", "aggregation": "constant", "constant_length": 1}, changes)

    @staticmethod
    def of_key(key: str) -> Objective:
        """The objective with that `key`: custom ops take tensors and plain numbers."""
        return _BY_SETTINGS.get(key) or _WITH_FUNCTION[key]

    @property
    def moves_without_advantage(self) -> bool:
        """Whether a token with advantage 0 still has a gradient (KL, entropy), or may have one (a user's own loss)."""
        return self.kl_coef != 0.0 or self.entropy_coef != 0.0 or callable(self.policy_loss)

    @property
    def looks_at_sequences(self) -> list[str]:
        """What, by name, makes a token's policy loss depend on the current log-probabilities of others in its sequence; empty: nothing."""
        correction = self.rollout_correction
        reasons = {
            "ratio_level 'sequence'": self.ratio_level == "sequence",
            f"policy_loss {self.policy_loss!r}": self.policy_loss in ("gmpo", "vespo"),
            "off_policy_threshold": self.off_policy_threshold is not None,
            "rollout_correction.level": correction is not None and correction.level != "token",
        }
        return [name for name, looks in reasons.items() if looks]

    def evaluate(self, batch: TokenBatch) -> TokenLoss:
        """Policy loss and KL penalty of each token, before averaging and without the entropy bonus."""
        token_log_ratio = bounded(batch.logprobs - batch.old_logprobs)
        log_ratio = batch.sequence_mean(token_log_ratio) if self.ratio_level == "sequence" else token_log_ratio
        ratio = torch.exp(log_ratio)
        weight = batch.policy_weight
        rollout_ratio = torch.ones_like(weight)
        if batch.rollout_logprobs is not None and self.rollout_correction is not None:
            rollout_ratio = self.rollout_correction.ratio(batch)
            if self.policy_loss != "vespo":  # which has it in its phi
                weight = weight * self.rollout_correction.weight(rollout_ratio)
        if self.off_policy_threshold is not None:
            weight = weight * self._on_policy(batch)
        if batch.entropy_threshold is not None:
            weight = weight * (batch.entropy >= batch.entropy_threshold.to(batch.entropy.dtype))
        policy = self._policy_loss(batch, ratio, token_log_ratio)
        # A built-in loss without advantage is 0, also where logp is -inf.
        counts = weight != 0 if callable(self.policy_loss) else (weight != 0) & (batch.advantages != 0)
        loss = torch.where(counts, policy * weight, 0.0)
        kl = torch.zeros_like(batch.logprobs)
        if batch.ref_logprobs is not None:
            kl = kl_estimate(self.kl, batch.logprobs, batch.ref_logprobs)
            if self.kl_ratio_corrected:
                kl = kl * ratio
            loss = loss + self.kl_coef * kl if self.kl_coef else loss
        low, high = self._clipped(batch.advantages, ratio.detach(), token_log_ratio.detach())
        return TokenLoss(loss, ratio.detach(), kl.detach(), low, high, rollout_ratio, weight)

    def _policy_loss(self, batch: TokenBatch, ratio: Tensor, token_log_ratio: Tensor) -> Tensor:
        advantages = batch.advantages
        if callable(self.policy_loss):
            return _checked(self.policy_loss(batch), batch)
        if self.policy_loss == "reinforce":
            return -advantages * batch.logprobs
        if self.policy_loss == "cispo":
            return -ratio.detach().clamp(max=1.0 + self.clip_high) * advantages * batch.logprobs
        if self.policy_loss == "sapo":
            tau = _choose(advantages > 0, self.sapo_tau_pos, self.sapo_tau_neg, ratio)
            return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
        if self.policy_loss == "gmpo":
            sign = torch.sign(advantages)
            clipped = token_log_ratio.clamp(-self.clip_low, self.clip_high)
            pessimistic = sign * torch.minimum(sign * token_log_ratio, sign * clipped)
            return -advantages * torch.exp(batch.sequence_mean(pessimistic))
        if self.policy_loss == "vespo":
            return -self._vespo_weight(batch, token_log_ratio.detach()) * advantages * batch.logprobs
        capped = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
        return -torch.minimum(capped * advantages, ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages)

    def _vespo_weight(self, batch: TokenBatch, token_log_ratio: Tensor) -> Tensor:
        log_weight = batch.sequence_sum(token_log_ratio)
        if batch.rollout_logprobs is not None and self.rollout_correction is not None:
            correction = self.rollout_correction.weight(self.rollout_correction.ratio(batch))
            log_weight = log_weight + batch.sequence_sum(correction.log().clamp(_VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO))
        log_weight = log_weight.clamp(_VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
        positive = batch.advantages >= 0
        k = _choose(positive, self.vespo_k_pos, self.vespo_k_neg, log_weight)
        rate = _choose(positive, self.vespo_lambda_pos, self.vespo_lambda_neg, log_weight)
        return torch.exp(rate + k * log_weight - rate * log_weight.exp())

    def _on_policy(self, batch: TokenBatch) -> Tensor:
        sampled = batch.old_logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
        drift = bounded(torch.nan_to_num(sampled - batch.logprobs.detach(), nan=0.0, posinf=math.inf, neginf=-math.inf))
        assert self.off_policy_threshold is not None
        return (batch.advantages >= 0) | (batch.sequence_mean(drift) <= self.off_policy_threshold)

    def _clipped(self, advantages: Tensor, ratio: Tensor, token_log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the bound cut the token's gradient: the ratio is outside on the side to which the advantage pushes, or above max_ratio.
        For cispo, whose gradient is only weakened, whether its weight was cut."""
        none = torch.zeros_like(advantages, dtype=torch.bool)
        if self.policy_loss == "clip":
            low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
            high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
            return low, high if self.max_ratio is None else high | ((ratio > self.max_ratio) & (advantages < 0))
        if self.policy_loss == "cispo":
            return none, ratio > 1.0 + self.clip_high
        if self.policy_loss == "gmpo":
            return (token_log_ratio < -self.clip_low) & (advantages < 0), (token_log_ratio > self.clip_high) & (advantages > 0)
        return none, none

    def token_shares(self, mask: Tensor, sequence_of_row: Tensor, lengths: Tensor, counts: LossCounts) -> Tensor:
        """Each row's share of the average, [rows] float64: `sum(shares * losses)` over all pieces of a batch is the loss.

        `mask` is [rows] bool, `sequence_of_row` [rows] int64, `lengths` [sequences] the tokens of each sequence that count.
        """
        if self.aggregation == "token":
            return mask.double() / max(counts.tokens, 1)
        if self.aggregation == "constant":
            assert self.constant_length is not None
            return mask.double() / (max(counts.sequences, 1) * self.constant_length)
        return mask.double() / (max(counts.sequences, 1) * lengths.clamp(min=1)[sequence_of_row])


def kl_estimate(kl: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Each token's estimate of KL(policy | reference), in nats, of the log-probabilities' shape: k1, k2 or k3 as in `Objective`, with the
    log-ratio held at -+20.

    Raises:
        ValueError: for an unknown estimator.
    """
    check_choice("kl", kl, get_args(KLEstimator))
    difference = bounded(ref_logprobs - logprobs)
    if kl == "k1":
        return -difference
    if kl == "k2":
        return 0.5 * difference.square()
    return torch.expm1(difference) - difference  # expm1: k3 is quadratic near 0, where exp(d) - 1 has no digits left


def top_entropy_threshold(entropy: Tensor, mask: Tensor | None = None, *, fraction: float) -> float:
    """The entropy above which the top `fraction` of the tokens with `mask` lies: a quantile, interpolated linearly.

    For `linear_grpo_loss(..., entropy_threshold=...)` from the entropies of all micro-batches of a step (gather those of other
    processes first); of no tokens, infinity. `entropy` and `mask` are of one shape, any.

    Raises:
        ValueError: naming the argument.
    """
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == entropy.shape and not mask.dtype.is_floating_point):
        got = f"shape {tuple(mask.shape)} and dtype {mask.dtype}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(f"mask has {got}; it must be bool or integer of entropy's shape {tuple(entropy.shape)}")
    check_number("fraction", fraction, 0.0, 1.0)
    values = entropy.detach().reshape(-1).double() if mask is None else entropy.detach()[mask.to(entropy.device) != 0].double()
    if values.numel() == 0:
        return math.inf
    # torch.quantile refuses more than 2^24 values. Not (1 - fraction) (n - 1), whose rounding would put the threshold above a value that
    # it should be.
    last = values.numel() - 1
    position = last - fraction * last
    below = int(position)
    ordered = values.sort().values[below : below + 2]
    return float(torch.lerp(ordered[0], ordered[-1], position - below))


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where of two numbers, in the dtype of `like`: its own would be torch's default dtype, whatever that is set to."""
    return torch.full_like(like.detach(), no).masked_fill(condition, yes)


def _preset(settings: dict[str, Any], changes: dict[str, Any]) -> Objective:
    return Objective(**(settings | changes))


def _checked(losses: Any, batch: TokenBatch) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != batch.logprobs.shape or losses.dtype.is_complex:
        got = f"shape {tuple(losses.shape)} and dtype {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"policy_loss returned {got}; it must return a tensor of one real loss per token, {tuple(batch.logprobs.shape)}")
    return losses
