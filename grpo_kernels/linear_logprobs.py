"""`linear_logprobs`: log-probabilities and entropies from hidden states, for reference and old-policy passes and for other losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.backends import Backend, select_backend
from grpo_kernels.head import Head, HeadRows, check_head, check_support, working_dtype
from grpo_kernels.head_pass import Anchor, Flag, Wanted, in_chunks
from grpo_kernels.packing import RowLayout
from grpo_kernels.precision import exact_products
from grpo_kernels.support_pass import pass_for


@dataclass(frozen=True)
class TokenLogprobs:
    """float32 (float64 for float64 inputs) tensors of the targets' shape: log-probability of the target, and entropy, in nats.

    Both carry gradients. Both are 0 at masked rows, so a mean is their sum by a count of your own, over all pieces of a step.
    """

    logprobs: Tensor
    entropy: Tensor


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    support: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> TokenLogprobs:
    """Log-probabilities and entropies without ever holding [rows, vocabulary] logits.

    Without gradients (a reference or old-policy pass) one matrix product, and nothing is stored. With gradients the backward pass computes
    the logits again, four products in all, for rows only whose upstream gradient is not 0; what is stored is [rows]. A loss whose slopes
    are known with the log-probabilities needs three, by `linear_grpo_loss`: GRPO, or with advantages of 1 and `Objective.reinforce()` SFT.

    Args: as `linear_grpo_loss`.

    Returns:
        TokenLogprobs of the targets' shape.

    Raises:
        ValueError, TypeError: on bad arguments, before any work, naming them.
        RuntimeError: in backward, when a second derivative is asked for.
    """
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_linear_logprobs  # the custom ops exist only where torch.compile is used

        return compiled_linear_logprobs(hidden, weight, bias, targets, mask, temperature, softcap, support, group, backend)
    check_head(hidden, weight, targets, bias, softcap)
    check_support(support, group)
    head = Head.of(weight, bias, softcap, group)
    job = LogprobJob.of(targets, mask, temperature, support, head, select_backend(backend, hidden.device))
    logprobs, entropy = _LinearLogprobs.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, job)
    return TokenLogprobs(logprobs.view(targets.shape), entropy.view(targets.shape))


@dataclass(frozen=True)
class LogprobJob:
    """`rows` [n] of the flattened input, what the head is asked for in them, and how it is computed."""

    rows: Tensor
    head_rows: HeadRows
    head: Head
    backend: Backend

    @classmethod
    def of(
        cls, targets: Tensor, mask: Tensor | None, temperature: float | Tensor, support: Tensor | None, head: Head, backend: Backend
    ) -> LogprobJob:
        rows = RowLayout.of(targets.shape, targets.device, mask, None).mask.nonzero()[:, 0]
        return cls(rows, HeadRows.of(rows, head.vocabulary, targets, temperature, support), head, backend)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy), each [N], from `hidden` [N, H]."""
        head_pass = pass_for(self.head_rows, self.head, self.backend, hidden.dtype, Wanted())
        logprobs = torch.zeros(hidden.shape[0], dtype=working_dtype(hidden.dtype, self.head.weight.dtype), device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        with torch.no_grad(), exact_products(hidden.device):

            def part(some: Tensor, anchor: Anchor) -> tuple[Tensor, Flag]:
                at = self.rows[some]
                chunk = head_pass.forward(hidden[at], self.head_rows[some], gradients=False, anchor=anchor)
                logprobs[at], entropy[at] = chunk.logprobs, chunk.entropy
                return chunk.extreme, chunk.any_extreme

            in_chunks(torch.arange(self.rows.numel(), device=hidden.device), head_pass.rows_per_chunk, part)
            self.backend.release()
        return logprobs, entropy

    def backward(
        self, hidden: Tensor, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden [N, H], weight and bias in the working dtype, from the upstream ones, each [N] or None."""
        dtype = working_dtype(hidden.dtype, self.head.weight.dtype)
        nothing = torch.zeros(hidden.shape[0], dtype=dtype, device=hidden.device)
        slopes = (nothing if logprob_gradient is None else logprob_gradient.to(dtype))[self.rows]
        entropy_slopes = (nothing if entropy_gradient is None else entropy_gradient.to(dtype))[self.rows]
        moves = ((slopes != 0) | (entropy_slopes != 0)).nonzero()[:, 0]
        wanted = replace(wanted, entropy=bool((entropy_slopes != 0).any()))
        hidden_gradient = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if wanted.hidden else None
        with torch.no_grad(), exact_products(hidden.device):
            head_pass = pass_for(self.head_rows, self.head, self.backend, hidden.dtype, wanted)

            def part(some: Tensor, anchor: Anchor) -> tuple[Tensor, Flag]:
                at = self.rows[some]
                chunk = head_pass.forward(hidden[at], self.head_rows[some], anchor=anchor)
                gradient = head_pass.backward(chunk, slopes[some], entropy_slopes[some])
                if hidden_gradient is not None and gradient is not None:
                    hidden_gradient[at] = gradient
                return chunk.extreme, chunk.any_extreme

            in_chunks(moves, head_pass.rows_per_chunk, part)
            self.backend.release()
            if hidden_gradient is not None and self.head.slice is not None:
                self.head.slice.sum(hidden_gradient)
        return hidden_gradient, *head_pass.parameter_gradients()


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: LogprobJob) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.job = job
        return job.forward(hidden)

    @staticmethod
    def backward(ctx: Any, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("linear_logprobs has no second derivative; call backward without create_graph=True")
        hidden, weight, bias = ctx.saved_tensors
        if logprob_gradient is None and entropy_gradient is None:
            return None, None, None, None
        job = replace(ctx.job, head=replace(ctx.job.head, weight=weight, bias=bias))  # those saved: checked for changes in place
        gradients = job.backward(hidden, logprob_gradient, entropy_gradient, Wanted(*ctx.needs_input_grad[:3]))
        tensors = (hidden, weight, bias)
        return *(None if g is None or t is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True)), None
