"""The specification: the GRPO loss from full logits, written as in the papers, for any dtype. For tests and benchmarks only.

It shares nothing with the fused pass, not even the objective: two independent texts that agree are worth more than one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.objective import Objective


def reference_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    sequence_of_row: Tensor,
    mask: Tensor,
    tokens: int,
    sequences: int,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logprobs [rows], entropy [rows]) from [rows, V] logits in `hidden`'s dtype; autograd gives the gradients.

    `hidden` is [rows, H]; `advantages`, `mask`, `sequence_of_row`, `old_logprobs` and `ref_logprobs` are [rows]. `tokens` and
    `sequences` are the global counts. Masked rows must hold finite numbers here: they are multiplied by 0.
    """
    logits = hidden @ weight.t() / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = (logprobs - old).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages
    loss = -torch.min(unclipped, clipped)
    if objective.kl_coef and ref_logprobs is not None:
        estimators = {
            "k1": logprobs - ref_logprobs,
            "k2": (logprobs - ref_logprobs) ** 2 / 2,
            "k3": (ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1,
        }
        loss = loss + objective.kl_coef * estimators[objective.kl]
    keep = mask.to(loss.dtype)
    if objective.aggregation == "token":
        return (loss * keep).sum() / tokens, logprobs, entropy
    if objective.aggregation == "constant":
        assert objective.constant_length is not None
        return (loss * keep).sum() / (sequences * objective.constant_length), logprobs, entropy
    total = loss.new_zeros(())
    for sequence in torch.unique(sequence_of_row):
        mine = (sequence_of_row == sequence) & mask
        if mine.any():
            total = total + loss[mine].mean()
    return total / sequences, logprobs, entropy
