"""The specification: the GRPO loss from full logits, written as in the papers, for any dtype. For tests and benchmarks only.

It shares nothing with the fused pass, not even the objective: two independent texts that agree are worth more than one. `Objective` says
what the settings mean, and names the papers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.objective import Objective


def reference_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """(logprobs [rows], entropy [rows]) from [rows, V] logits in `hidden`'s dtype; `temperature` is a number or [rows]."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def reference_grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    sequence_of_row: Tensor,
    mask: Tensor,
    tokens: int,
    sequences: int,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> Tensor:
    """The loss, one sequence after the other. All tensors are [rows]; `tokens` and `sequences` are the global counts.

    Masked rows are taken out before anything is computed. Log-ratios must be within +-20 here.
    """
    o = objective
    quantile = torch.quantile(entropy.detach()[mask], 1 - o.top_entropy) if o.top_entropy < 1 and mask.any() else None
    total = logprobs.new_zeros(())
    for sequence in torch.unique(sequence_of_row[mask]):
        rows = ((sequence_of_row == sequence) & mask).nonzero()[:, 0]
        logp, A, H = logprobs[rows], advantages[rows], entropy[rows]
        old = logp.detach() if old_logprobs is None else old_logprobs[rows]
        rollout = None if rollout_logprobs is None else rollout_logprobs[rows]
        policy = _policy_loss(o, logp, old, rollout, A) * _policy_weight(o, logp.detach(), old, rollout, A)
        if quantile is not None:
            policy = policy * (H.detach() >= quantile)
        loss = policy
        if o.kl_coef and ref_logprobs is not None:
            d = ref_logprobs[rows] - logp
            kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[o.kl]
            loss = loss + o.kl_coef * kl * (_ratio(o, logp, old) if o.kl_ratio_corrected else 1)
        if o.aggregation == "token":
            total = total + loss.sum() / tokens
        elif o.aggregation == "sequence":
            total = total + loss.mean() / sequences
        else:
            assert o.constant_length is not None
            total = total + loss.sum() / (sequences * o.constant_length)
        total = total - o.entropy_coef * H.sum() / tokens
    return total


def _ratio(o: Objective, logp: Tensor, old: Tensor) -> Tensor:
    return (logp - old).mean().exp().expand_as(logp) if o.ratio_level == "sequence" else (logp - old).exp()


def _policy_loss(o: Objective, logp: Tensor, old: Tensor, rollout: Tensor | None, A: Tensor) -> Tensor:
    r = _ratio(o, logp, old)
    if o.policy_loss == "clip":
        bounded = r if o.max_ratio is None else torch.clamp(r, max=o.max_ratio)
        return -torch.min(bounded * A, torch.clamp(r, 1 - o.clip_low, 1 + o.clip_high) * A)
    if o.policy_loss == "cispo":
        return -torch.clamp(r, max=1 + o.clip_high).detach() * A * logp
    if o.policy_loss == "sapo":
        positive = 4 / o.sapo_tau_pos * torch.sigmoid(o.sapo_tau_pos * (r - 1))
        negative = 4 / o.sapo_tau_neg * torch.sigmoid(o.sapo_tau_neg * (r - 1))
        return -torch.where(A > 0, positive, negative) * A
    if o.policy_loss == "gmpo":
        clipped = torch.clamp(logp - old, -o.clip_low, o.clip_high)
        worse = torch.where(A > 0, torch.min(logp - old, clipped), torch.where(A < 0, torch.max(logp - old, clipped), 0.0))
        return -A * worse.mean().exp()
    if o.policy_loss == "vespo":
        floor = math.log(1e-8)
        log_w = (logp - old).detach().sum()
        if rollout is not None and o.rollout_correction is not None:
            log_w = log_w + torch.clamp(_correction(o, old, rollout).log(), floor, 20).sum()
        log_w = torch.clamp(log_w, floor, 20)
        k = torch.where(A >= 0, o.vespo_k_pos, o.vespo_k_neg)
        rate = torch.where(A >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg)
        return -(log_w.exp() ** k * torch.exp(rate * (1 - log_w.exp()))) * A * logp
    assert o.policy_loss == "reinforce"
    return -A * logp


def _policy_weight(o: Objective, logp: Tensor, old: Tensor, rollout: Tensor | None, A: Tensor) -> Tensor:
    weight = torch.ones_like(logp)
    if o.rollout_correction is not None and rollout is not None and o.policy_loss != "vespo":
        weight = weight * _correction(o, old, rollout)
    if o.off_policy_threshold is not None:
        drift = torch.nan_to_num((old if rollout is None else rollout) - logp, nan=0.0).mean()
        weight = weight * ((A >= 0) | (drift <= o.off_policy_threshold))
    return weight


def _correction(o: Objective, old: Tensor, rollout: Tensor) -> Tensor:
    assert o.rollout_correction is not None
    log_ratio = torch.nan_to_num(old - rollout, nan=0.0)
    level = {"token": log_ratio, "sequence": log_ratio.sum(), "geometric": log_ratio.mean()}[o.rollout_correction.level]
    w = level.exp().expand_as(old)
    low = 0.0 if o.rollout_correction.low is None else o.rollout_correction.low
    high = math.inf if o.rollout_correction.high is None else o.rollout_correction.high
    if o.rollout_correction.mode == "truncate":
        return torch.clamp(w, low, high)
    return torch.where((w < low) | (w > high), 0.0, w)
