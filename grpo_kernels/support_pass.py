"""The pass of rows whose sampler could draw only some tokens (top-k, top-p, min-p): a softmax over these and the target.

A sampler that keeps part of the vocabulary reports log-probabilities renormalised over it; a trainer that normalises over all of it sees
ratios that are too small by the mass that was cut (TRL #6789). The logits of the kept tokens are dot products with their rows of the
weight, K per row instead of V: no GEMM, and less work than the whole head for K up to thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_kernels.backends import Backend
from grpo_kernels.head import Head, HeadRows, working_dtype
from grpo_kernels.head_pass import Anchor, Flag, HeadPass, Wanted
from grpo_kernels.softmax import Statistics, target_slope

_WORKSPACE_BYTES = 64 << 20


@dataclass
class SupportChunk:
    """Statistics [n], no row extreme; and over the target and the kept tokens, target first, [n, 1 + K]: ids (the target's where there is
    none), their logits x - o, d x / d(h W^T), and [n, 1 + K, H] the rows of the weight."""

    logprobs: Tensor
    entropy: Tensor
    complement: Tensor
    log_total: Tensor
    extreme: Tensor
    any_extreme: Flag
    hidden: Tensor
    ids: Tensor
    distances: Tensor
    logit_slopes: Tensor
    entries: Tensor


class SupportPass:
    """In the place of a `HeadPass`, for rows with a support."""

    def __init__(self, head: Head, dtype: torch.dtype, wanted: Wanted, kept: int) -> None:
        self._head, self._dtype, self._wanted = head, dtype, wanted
        vocabulary, width = head.weight.shape
        self.rows_per_chunk = max(1, _WORKSPACE_BYTES // (4 * width * (1 + kept)))
        device = head.weight.device
        self._weight_gradient = torch.zeros(vocabulary, width, dtype=dtype, device=device) if wanted.weight else None
        self._bias_gradient = torch.zeros(vocabulary, dtype=dtype, device=device) if wanted.bias else None

    def forward(self, hidden: Tensor, rows: HeadRows, *, gradients: bool = True, anchor: Anchor = "target") -> SupportChunk:
        """The anchor is the largest logit in any case."""
        assert rows.support is not None
        head, hidden = self._head, hidden.to(self._dtype)
        inverse_temperature = rows.temperatures.reciprocal().to(self._dtype)[:, None]
        kept = (rows.support >= 0) & (rows.support != rows.targets[:, None])
        # The target stands in for what is not there: row 0 of the weight may be anything, and 0 * NaN is NaN.
        ids = torch.cat([rows.targets[:, None], torch.where(kept, rows.support, rows.targets[:, None])], 1)
        entries = head.weight[ids].to(self._dtype)
        logits = torch.bmm(entries, hidden[:, :, None])[:, :, 0]
        if head.bias is not None:
            logits = logits + head.bias[ids].to(self._dtype)
        slopes = inverse_temperature.expand_as(logits)
        if head.softcap is not None:
            saturation = torch.tanh(logits / head.softcap)
            logits, slopes = head.softcap * saturation, slopes * (1.0 - saturation.square())
        logits = logits * inverse_temperature
        logits[:, 1:].masked_fill_(~kept, -torch.inf)
        distances = logits - logits.amax(1, keepdim=True)
        target_distances = distances[:, 0].double()
        distances = distances.clamp(min=-1e30)  # 0 * -inf would be NaN
        exponentials = distances[:, 1:].exp()
        others = exponentials.sum(1, dtype=torch.float64)
        weighted = (exponentials * distances[:, 1:]).sum(1, dtype=torch.float64)
        statistics = Statistics.of(others, weighted, target_distances)
        extreme = torch.zeros_like(rows.targets, dtype=torch.bool)
        return SupportChunk(
            logprobs=statistics.logprobs.to(self._dtype),
            entropy=statistics.entropy.to(self._dtype),
            complement=statistics.complement.to(self._dtype),
            log_total=statistics.log_total.to(self._dtype),
            extreme=extreme,
            any_extreme=Flag(extreme),
            hidden=hidden,
            ids=ids,
            distances=distances,
            logit_slopes=slopes,
            entries=entries,
        )

    def backward(self, chunk: SupportChunk, slope: Tensor, entropy_slope: Tensor) -> Tensor | None:
        log_p = chunk.distances - chunk.log_total[:, None]
        gradient = -log_p.exp() * ((slope + entropy_slope * chunk.entropy)[:, None] + entropy_slope[:, None] * log_p)
        gradient[:, 0] = target_slope(slope, entropy_slope, chunk.logprobs, chunk.entropy, chunk.complement)
        gradient = gradient * chunk.logit_slopes
        at = chunk.ids.reshape(-1)
        if self._weight_gradient is not None:
            self._weight_gradient.index_add_(0, at, (gradient[:, :, None] * chunk.hidden[:, None]).flatten(0, 1))
        if self._bias_gradient is not None:
            self._bias_gradient.index_add_(0, at, gradient.reshape(-1))
        return torch.bmm(gradient[:, None], chunk.entries)[:, 0] if self._wanted.hidden else None

    def parameter_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        return self._weight_gradient, self._bias_gradient


class RowPass(Protocol):
    """What both passes are: a chunk of at most `rows_per_chunk` rows goes through `forward`, and then, where gradients are wanted, through
    `backward` before the next `forward`. A chunk has `logprobs`, `entropy` and `extreme`, [n], and `any_extreme`; rows that are, where
    nothing is right and nothing was added, go through `forward` again with `anchor` "maximum"."""

    rows_per_chunk: int

    def forward(self, hidden: Tensor, rows: HeadRows, *, gradients: bool = True, anchor: Anchor = "target") -> Any: ...

    def backward(self, chunk: Any, slope: Tensor, entropy_slope: Tensor) -> Tensor | None: ...

    def parameter_gradients(self) -> tuple[Tensor | None, Tensor | None]: ...


def pass_for(rows: HeadRows, head: Head, backend: Backend, hidden: torch.dtype, wanted: Wanted) -> RowPass:
    """For `rows` and hidden states of dtype `hidden`."""
    if rows.support is None:
        return HeadPass(head, backend, hidden, wanted, rows.targets.numel())
    return SupportPass(head, working_dtype(hidden, head.weight.dtype), wanted, rows.support.shape[1])
