"""The mathematics of the objective per token, once for every kernel, and a single launch of it alone.

`token_terms` is `Objective.evaluate` with its derivative written out, for the objectives that look at one token at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.objective import Objective
from grpo_kernels.token_batch import MAX_LOG_RATIO, TokenBatch, TokenLoss
from grpo_kernels.triton_kernels.runtime import FUSED, LOG2E, on

_BLOCK = 256
_LIMIT = tl.constexpr(MAX_LOG_RATIO)
# ln 2 in two parts: the first has 9 bits, so that its product with a small integer is exact.
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)


@triton.jit
def _held(log_ratio):
    """`bounded`: within -+MAX_LOG_RATIO, NaN stays NaN. And whether the bound cut the gradient; not that of NaN."""
    held = tl.where(log_ratio > _LIMIT, _LIMIT, tl.where(log_ratio < -_LIMIT, -_LIMIT, log_ratio))
    return held, tl.abs(log_ratio) > _LIMIT


@triton.jit
def _exponential(x):
    """exp(x), exp(x) - 1 and exp(x) - 1 - x of |x| <= MAX_LOG_RATIO, each without cancellation near 0; NaN gives NaN.

    exp(x) = 2^k (1 + r + tail) with r = x - k ln 2 in -+0.3466, and tail = r^2 / 2! + ... + r^8 / 8!, cut at 4e-9 of itself. Not tl.exp,
    which on a GPU rounds x log2(e) first: a relative error of 7e-7 at x = 20.
    """
    k = tl.floor(x * LOG2E + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = 1.0 / 720 + r * (1.0 / 5040 + r * (1.0 / 40320))
    tail = r * r * (0.5 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * series))))
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)  # 2^k; of a NaN something, times a NaN
    exp = power + power * (r + tail)
    expm1 = (power - 1.0) + power * (r + tail)
    return exp, expm1, tl.where(k == 0.0, tail, expm1 - x)


@triton.jit
def token_terms(
    logp, entropy, old, ref, advantage, policy_weight, entropy_threshold,
    low, high, max_ratio, tau_pos, tau_neg, kl_coef,
    POLICY: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    HAS_MAX_RATIO: tl.constexpr, KL_RATIO_CORRECTED: tl.constexpr,
):  # fmt: skip
    """Loss, slope = d loss / d logp, ratio, kl, clipped_low, clipped_high and weight of tokens, before their shares; as `TokenLoss`.

    Per token, float32 scalars or blocks of one shape: from `logp` to `policy_weight` (what a HAS_ says is not there may be anything);
    `entropy_threshold` is a scalar. The keywords from `low` on are those of `token_settings`.
    """
    zero = tl.zeros_like(logp)
    # Without old log-probabilities the difference is 0 too, but NaN where logp is not finite.
    log_ratio, ratio_held = _held(logp - old) if HAS_OLD else _held(logp - logp)
    ratio, _, _ = _exponential(log_ratio)
    weight = policy_weight
    if HAS_THRESHOLD:
        weight = weight * tl.where(entropy >= entropy_threshold, 1.0, 0.0)

    # Comparisons and where, not minimum and maximum, which would lose a NaN. What is outside of a bound is a constant, on it is not.
    clipped_low = zero != 0.0
    clipped_high = clipped_low
    if POLICY == "clip":
        clipped_low = (ratio < low) & (advantage < 0)
        clipped_high = (ratio > high) & (advantage > 0)
        used = tl.where(clipped_low, low, tl.where(clipped_high, high, ratio))
        if HAS_MAX_RATIO:
            above = (ratio > max_ratio) & (advantage < 0)
            used = tl.where(above, max_ratio, used)
            clipped_high = clipped_high | above
        policy = -used * advantage
        policy_slope = tl.where(clipped_low | clipped_high | ratio_held, 0.0, policy)
    elif POLICY == "cispo":
        clipped_high = ratio > high
        policy_slope = -tl.where(clipped_high, high, ratio) * advantage
        policy = policy_slope * logp
    elif POLICY == "sapo":
        tau = tl.where(advantage > 0, tau_pos, tau_neg)
        z = tau * (ratio - 1.0)
        q = tl.exp(-tl.abs(z))
        policy = -4.0 / tau * (tl.where(z >= 0, 1.0, q) / (1.0 + q)) * advantage
        # sigmoid (1 - sigmoid) is q / (1 + q)^2, which keeps its digits where the sigmoid is close to 1.
        policy_slope = tl.where(ratio_held, 0.0, -4.0 * (q / ((1.0 + q) * (1.0 + q))) * advantage * ratio)
    else:
        tl.static_assert(POLICY == "reinforce")
        policy_slope = -advantage
        policy = policy_slope * logp
    # where, not a product: a token without weight or advantage has loss and slope 0, also where logp is -inf.
    counts = (weight != 0.0) & (advantage != 0.0)
    loss = tl.where(counts, policy * weight, 0.0)
    slope = tl.where(counts, policy_slope * weight, 0.0)

    kl = zero
    if HAS_REF:
        difference, difference_held = _held(ref - logp)
        if KL == "k1":
            kl = -difference
            kl_slope = zero + 1.0
        elif KL == "k2":
            kl = 0.5 * difference * difference
            kl_slope = -difference
        else:
            tl.static_assert(KL == "k3")
            _, expm1, kl = _exponential(difference)
            kl_slope = -expm1
        kl_slope = tl.where(difference_held, 0.0, kl_slope)
        if KL_RATIO_CORRECTED:
            kl = kl * ratio
            kl_slope = kl_slope * ratio + tl.where(ratio_held, 0.0, kl)
        # A KL that is only reported must not bring its NaN into the loss.
        loss += tl.where(kl_coef != 0.0, kl_coef * kl, 0.0)
        slope += tl.where(kl_coef != 0.0, kl_coef * kl_slope, 0.0)
    return loss, slope, ratio, kl, clipped_low, clipped_high, weight


# No variants by size or alignment: a learner's batches differ in both from step to step.
@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["logp_ptr", "entropy_ptr", "old_ptr", "ref_ptr", "advantage_ptr", "weight_ptr", "share_ptr"],
)
def _token_objective_kernel(
    values_ptr, flags_ptr, logp_ptr, entropy_ptr, old_ptr, ref_ptr, advantage_ptr, weight_ptr, threshold_ptr, share_ptr, n,
    low, high, max_ratio, tau_pos, tau_neg, kl_coef,
    POLICY: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    HAS_MAX_RATIO: tl.constexpr, KL_RATIO_CORRECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = n.to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    logp = tl.load(logp_ptr + at, mask=inside, other=0.0)
    old = tl.load(old_ptr + at, mask=inside, other=0.0)
    advantage = tl.load(advantage_ptr + at, mask=inside, other=0.0)
    policy_weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    share = tl.load(share_ptr + at, mask=inside, other=0.0).to(tl.float32)
    ref = logp
    if HAS_REF:
        ref = tl.load(ref_ptr + at, mask=inside, other=0.0)
    entropy = logp
    threshold = 0.0
    if HAS_THRESHOLD:
        entropy = tl.load(entropy_ptr + at, mask=inside, other=0.0)
        threshold = tl.load(threshold_ptr).to(tl.float32)
    loss, slope, ratio, kl, clipped_low, clipped_high, weight = token_terms(
        logp, entropy, old, ref, advantage, policy_weight, threshold, low, high, max_ratio, tau_pos, tau_neg, kl_coef,
        POLICY, KL, HAS_OLD, HAS_REF, HAS_THRESHOLD, HAS_MAX_RATIO, KL_RATIO_CORRECTED,
    )  # fmt: skip
    tl.store(values_ptr + at, loss, mask=inside)
    tl.store(values_ptr + rows + at, share * slope, mask=inside)
    tl.store(values_ptr + 2 * rows + at, ratio, mask=inside)
    tl.store(values_ptr + 3 * rows + at, kl, mask=inside)
    tl.store(values_ptr + 4 * rows + at, weight, mask=inside)
    tl.store(values_ptr + 5 * rows + at, 1.0, mask=inside)  # rollout_ratio: no correction is left where `computes`
    tl.store(flags_ptr + at, clipped_low, mask=inside)
    tl.store(flags_ptr + rows + at, clipped_high, mask=inside)


def computes(objective: Objective) -> bool:
    """Whether `token_terms` is this objective's mathematics: nothing in it looks at other tokens or at a function of the user."""
    corrected = objective.rollout_correction is not None or objective.off_policy_threshold is not None
    return objective.ratio_level == "token" and objective.policy_loss in ("clip", "cispo", "sapo", "reinforce") and not corrected


def token_settings(objective: Objective, *, old: bool, ref: bool, threshold: bool) -> dict[str, Any]:
    """The keywords of `token_terms` from `low` on; `old`, `ref` and `threshold` say what is there.

    The coefficients are floats, also where the user gave an int: Triton would compile an int's value in.
    """
    return {
        "low": 1.0 - float(objective.clip_low),
        "high": 1.0 + float(objective.clip_high),
        "max_ratio": float(objective.max_ratio or 0.0),
        "tau_pos": float(objective.sapo_tau_pos),
        "tau_neg": float(objective.sapo_tau_neg),
        "kl_coef": float(objective.kl_coef),
        "POLICY": objective.policy_loss,
        "KL": objective.kl,
        "HAS_OLD": old,
        "HAS_REF": ref,
        "HAS_THRESHOLD": threshold,
        "HAS_MAX_RATIO": objective.max_ratio is not None,
        "KL_RATIO_CORRECTED": objective.kl_ratio_corrected,
    }


def token_objective(objective: Objective, batch: TokenBatch, shares: Tensor) -> tuple[TokenLoss, Tensor]:
    """The `TokenLoss` of `objective.evaluate(batch)`, all of it detached, and the slopes share * d loss / d logp [n], in one launch.

    An objective that `computes`, and a batch in float32; `shares` [n] float64 or float32.
    """
    n = batch.logprobs.numel()
    # Two buffers, not eight tensors: as many allocations, and arguments of the launch.
    values = torch.empty(6, n, dtype=torch.float32, device=batch.logprobs.device)
    flags = torch.empty(2, n, dtype=torch.bool, device=batch.logprobs.device)
    if n:
        ref, threshold = batch.ref_logprobs, batch.entropy_threshold
        settings = token_settings(objective, old=True, ref=ref is not None, threshold=threshold is not None)
        with on(values.device):
            _token_objective_kernel[(triton.cdiv(n, _BLOCK),)](
                values, flags, batch.logprobs.contiguous(), batch.entropy.contiguous(), batch.old_logprobs.contiguous(),
                None if ref is None else ref.contiguous(), batch.advantages.contiguous(), batch.policy_weight.contiguous(),
                threshold, shares.contiguous(), n, **settings, BLOCK=_BLOCK, **FUSED,
            )  # fmt: skip
    loss, slopes, ratio, kl, weight, rollout_ratio = values
    return TokenLoss(loss, ratio, kl, flags[0], flags[1], rollout_ratio, weight), slopes
