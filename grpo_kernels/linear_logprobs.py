"""`linear_logprobs`: log-probabilities and entropies from hidden states, for reference and old-policy passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends import select_backend
from grpo_kernels.backends.torch import exact_products, working_dtype
from grpo_kernels.linear_loss import check_head, check_targets


@dataclass(frozen=True)
class LinearLogprobs:
    """float32 (float64 for float64 inputs) tensors of the targets' shape: log-probability of the target, and entropy, in nats."""

    logprobs: Tensor
    entropy: Tensor


def linear_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, backend: str = "auto") -> LinearLogprobs:
    """One matrix product and nothing stored: what a reference or old-policy pass needs.

    Args:
        hidden: [rows, H] or [batch, length, H]; row t predicts `targets[t]`.
        weight: [V, H].
        targets: [rows] or [batch, length] integer token ids.
        temperature: the logits are divided by it.
        backend: "auto", "cpu" or "torch".

    Raises:
        ValueError: on bad arguments, naming them.
        RuntimeError: when a gradient would be expected of it: it has no backward, and says so rather than return constants.
    """
    check_head(hidden, weight, targets, temperature)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        raise RuntimeError("linear_logprobs has no backward; call it under torch.no_grad(), or use linear_grpo_loss for gradients")
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    check_targets(flat, torch.arange(flat.numel(), device=flat.device), weight.shape[0])
    chosen = select_backend(backend, hidden.device)
    size = chosen.rows_per_chunk(weight.shape[0])
    dtype = working_dtype(hidden, weight)
    logprobs = torch.empty(flat.numel(), dtype=dtype, device=hidden.device)
    entropy = torch.empty_like(logprobs)
    with exact_products(hidden.device):
        for begin in range(0, flat.numel(), size):
            piece = slice(begin, begin + size)
            chunk = chosen.softmax(rows[piece], weight, flat[piece], float(temperature), hidden_gradient=False, weight_gradient=False)
            logprobs[piece], entropy[piece] = chunk.logprobs, chunk.entropy
    return LinearLogprobs(logprobs.view(targets.shape), entropy.view(targets.shape))
