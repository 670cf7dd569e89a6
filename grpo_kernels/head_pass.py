"""The pass of one chunk of rows through the head: log-probabilities, entropies, and the gradients of what is made of them.

Anchored softmax. With the target's logit x_y (one dot product per row, known before any GEMM) as the softmax offset,
E_j = exp(x_j - x_y) needs no maximum, no second pass over the logits and no rescaling:

    s = sum over j != y of E_j      logp = -log1p(s)      1 - p_y = s / (1 + s)      H = -logp - sum_j E_j (x_j - x_y) / (1 + s)

and with c = d loss / d logp the gradients are d h = a (sum_j E_j W_j - s W_y) and d W = E'^T (a h), a = -c / ((1 + s) T),
E'_y = -s: the row scale comes after GEMM 2, so that a tile of W serves GEMM 1 and GEMM 2 while it is in the cache. Leaving the target out
of the sum keeps 1 - p_y exact when p_y -> 1, where "1 - p" has lost every digit. The target was sampled, so E is bounded by 1 / p_y; a row
for which that is too large is extreme, adds nothing, and goes through the pass once more, after all others, with its maximum as the offset.

A soft cap, or an entropy H in the loss with e = d loss / d H, makes the gradient more than a row scale of E:

    d x_j = -p_j (c + e (log p_j + H)) for j != y,      d x_y = c (1 - p_y) - e p_y (log p_y + H)

Then the distances x_j - x_y are kept in place of E, and GEMM 2 and GEMM 3 follow when c and e are known.

A vocabulary that is split over processes needs x_y from its owner and one sum of (s, sum E d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, ChunkRows, Sweep
from grpo_kernels.backends.base import Keep, LogitSlopes, ParameterGradients
from grpo_kernels.head import Head, HeadRows, working_dtype
from grpo_kernels.softmax import Statistics, is_extreme, target_slope

Anchor = Literal["target", "maximum"]


@dataclass(frozen=True)
class Wanted:
    """Which gradients a pass makes; `entropy`: whether the loss depends on the entropy."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    entropy: bool = False

    @classmethod
    def by(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, entropy: bool) -> Wanted:
        """Those of the tensors that require one, where gradients are enabled."""
        enabled = torch.is_grad_enabled()
        return cls(
            hidden=enabled and hidden.requires_grad,
            weight=enabled and weight.requires_grad,
            bias=enabled and bias is not None and bias.requires_grad,
            entropy=entropy,
        )

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


class Flag:
    """Whether any of `values` is true. To ask waits for what was launched before this was made, and for nothing after."""

    def __init__(self, values: Tensor) -> None:
        any_ = values.any()
        self._done = None
        self._value = any_
        if any_.device.type == "cuda":
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(any_, non_blocking=True)
            self._done = torch.cuda.current_stream(any_.device).record_event()

    def __bool__(self) -> bool:
        if self._done is not None:
            self._done.synchronize()
        return bool(self._value)


@dataclass
class SoftmaxChunk:
    """A chunk's statistics, [n] float32 (float64 where an input is), and what its gradients need.

    logprobs: of the targets. entropy: in nats, of each row. complement: 1 - p_y. total: Z = sum over j of exp(x_j - o). log_total: its
    logarithm. offset: o. target_logits: x_y. extreme: [n] bool, rows of which none of this means anything; they have no gradient, and go
    through `forward` once more with the maximum as their anchor. any_extreme: whether there are some.
    """

    rows: ChunkRows
    sweep: Sweep
    logprobs: Tensor
    entropy: Tensor
    complement: Tensor
    total: Tensor
    log_total: Tensor
    offset: Tensor
    target_logits: Tensor
    extreme: Tensor
    any_extreme: Flag


class HeadPass:
    """Chunks go through `forward` and then, where gradients are wanted, through `backward` before the next `forward`.

    On a GPU nothing here waits for a result, so that chunk after chunk can be launched ahead of the device.
    """

    def __init__(self, head: Head, backend: Backend, hidden: torch.dtype, wanted: Wanted, rows: int) -> None:
        """`hidden`: the dtype of the hidden states. `rows`: how many will come in all."""
        self._head, self._backend, self._wanted = head, backend, wanted
        self._dtype = working_dtype(hidden, head.weight.dtype)
        self._by_distances = wanted.any and (wanted.entropy or head.softcap is not None)
        keep = self._keep(gradients=wanted.any)
        self.rows_per_chunk = backend.rows_per_chunk(head, rows, keep, weight_gradient=wanted.weight)
        weight_dtype = backend.gradient_dtype(head, hidden, one_chunk=rows <= self.rows_per_chunk)
        device = head.weight.device
        # The first chunk overwrites them; fresh memory need not be cleared.
        self._gradients = ParameterGradients(
            weight=torch.empty(head.weight.shape, dtype=weight_dtype, device=device) if wanted.weight else None,
            bias=torch.empty(head.weight.shape[0], dtype=self._dtype, device=device) if wanted.bias else None,
        )

    def forward(self, hidden: Tensor, rows: HeadRows, *, gradients: bool = True, anchor: Anchor = "target") -> SoftmaxChunk:
        """`hidden` is [n, H]. Without `gradients` nothing is kept."""
        head = self._head
        inverse_temperature = rows.temperatures.reciprocal()
        chunk_rows = ChunkRows(hidden, head.own(rows.targets).contiguous(), inverse_temperature.to(self._dtype))
        target_logits = self._target_logits(chunk_rows, inverse_temperature)
        offset = target_logits.to(self._dtype) if anchor == "target" else self._maximum(chunk_rows)
        sweep = self._sweep(chunk_rows, offset, gradients)
        extreme = is_extreme(sweep.others)
        if anchor == "maximum":  # then only a NaN makes a row extreme, and stays one
            extreme = torch.zeros_like(extreme)
        statistics = Statistics.of(sweep.others, sweep.weighted, target_logits - offset.double())
        return SoftmaxChunk(
            rows=chunk_rows,
            sweep=sweep,
            logprobs=statistics.logprobs.to(self._dtype),
            entropy=statistics.entropy.to(self._dtype),
            complement=statistics.complement.to(self._dtype),
            total=statistics.total.to(self._dtype),
            log_total=statistics.log_total.to(self._dtype),
            offset=offset,
            target_logits=target_logits.to(self._dtype),
            extreme=extreme,
            any_extreme=Flag(extreme),
        )

    def backward(self, chunk: SoftmaxChunk, slope: Tensor, entropy_slope: Tensor) -> Tensor | None:
        """The gradient of `hidden`, [n, H], where wanted; those of the weights are added up. Of a split vocabulary it is this process's
        share. `slope` is d loss / d logp and `entropy_slope` d loss / d entropy, [n]."""
        slope, entropy_slope = (slopes.masked_fill(chunk.extreme, 0.0) for slopes in (slope, entropy_slope))
        if self._by_distances:
            return self._backward_by_distances(chunk, slope, entropy_slope)
        return self._backward_by_exponentials(chunk, slope)

    def parameter_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Of weight [V, H] and bias [V], where wanted."""
        gradients = (self._gradients.weight, self._gradients.bias)
        if self._gradients.fresh:
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
        return gradients

    def _target_logits(self, rows: ChunkRows, inverse_temperature: Tensor) -> Tensor:
        """x_y, [n] float64."""
        head = self._head
        logits = self._backend.target_products(head, rows)
        if head.slice is not None:
            logits = head.slice.sum(logits)
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return logits * inverse_temperature

    def _keep(self, *, gradients: bool) -> Keep:
        if gradients and self._by_distances:
            return "distances"
        return "exponentials" if gradients and (self._wanted.weight or self._wanted.bias) else "nothing"

    def _sweep(self, rows: ChunkRows, offset: Tensor, gradients: bool) -> Sweep:
        keep = self._keep(gradients=gradients)
        weighted_rows = gradients and self._wanted.hidden and not self._by_distances
        sweep = self._backend.sweep(self._head, rows, offset, keep=keep, weighted_rows=weighted_rows)
        if self._head.slice is not None:
            sweep.others, sweep.weighted = self._head.slice.sum(torch.stack([sweep.others, sweep.weighted]))
        return sweep

    def _maximum(self, rows: ChunkRows) -> Tensor:
        maximum = self._backend.row_maximum(self._head, rows)
        return maximum if self._head.slice is None else self._head.slice.maximum(maximum)

    def _backward_by_exponentials(self, chunk: SoftmaxChunk, slope: Tensor) -> Tensor | None:
        rows, kept = chunk.rows, chunk.sweep.kept
        scale = (-slope / chunk.total * rows.inverse_temperature).masked_fill(chunk.extreme, 0.0)  # 0 / infinity is 0, 0 / NaN is not
        others = chunk.sweep.others.to(self._dtype).masked_fill(chunk.extreme, 0.0)
        if kept is not None:
            self._backend.add_exponentials(self._head, rows, kept, others, scale, self._gradients)
        if chunk.sweep.weighted_rows is None:
            return None
        return self._backend.hidden_gradient(self._head, rows, chunk.sweep.weighted_rows, others, scale)

    def _backward_by_distances(self, chunk: SoftmaxChunk, slope: Tensor, entropy_slope: Tensor) -> Tensor | None:
        rows, kept = chunk.rows, chunk.sweep.kept
        assert kept is not None
        target_gradient = target_slope(slope, entropy_slope, chunk.logprobs, chunk.entropy, chunk.complement) * rows.inverse_temperature
        if self._head.softcap is not None:
            target_gradient *= 1.0 - (chunk.target_logits / (rows.inverse_temperature * self._head.softcap)).square()
        hidden_gradient = torch.zeros(rows.hidden.shape, dtype=self._dtype, device=rows.hidden.device) if self._wanted.hidden else None
        slopes = LogitSlopes(
            offset=chunk.offset,
            # Of an extreme row: every probability is then 0, whatever was kept, and 0 times a slope of 0 is 0.
            log_total=chunk.log_total.masked_fill(chunk.extreme, 1e30),
            slope=slope + (entropy_slope * chunk.entropy).masked_fill(chunk.extreme, 0.0),
            entropy_slope=entropy_slope.contiguous(),
            target_gradient=target_gradient.masked_fill(chunk.extreme, 0.0),
        )
        self._backend.add_distances(self._head, rows, kept, slopes, hidden_gradient, self._gradients)
        return hidden_gradient


def balanced(rows: int, most: int) -> Iterator[slice]:
    """[0, rows) in as few pieces of at most `most` as there can be, of nearly equal size: a short last one would starve the GEMMs.

    A multiple of 16 rows each, as far as `most` allows, for aligned vectors.
    """
    pieces = -(-rows // most)
    size = min(most, -(-rows // max(pieces, 1) // 16) * 16)
    for begin in range(0, rows, max(size, 1)):
        yield slice(begin, min(begin + size, rows))


def in_chunks(places: Tensor, most: int, part: Callable[[Tensor, Anchor], tuple[Tensor, Flag]]) -> None:
    """Calls `part` with at most `most` of the places [n] at a time. It returns which of them were extreme, [n] bool, and whether any was;
    those get their turn again at the end, anchored at their maximum. To look for them is the one place where the device is waited for,
    with the last chunk's gradient products still before it."""
    found = [part(places[piece], "target") for piece in balanced(places.numel(), most)]
    if not any([bool(flag) for _, flag in found]):
        return
    again = places[torch.cat([extreme for extreme, _ in found])]
    for piece in balanced(again.numel(), most):
        part(again[piece], "maximum")
