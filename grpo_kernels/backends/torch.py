"""The pass in plain torch, on any device: the fallback everywhere, and the frame in which the compiled CPU kernel runs.

Anchored softmax. With the target's logit x_y (one dot product per row, known before any GEMM) as the softmax offset,
E_j = exp(x_j - x_y) needs no maximum, no second pass over the logits and no rescaling:

    s = sum over j != y of E_j      logp = -log1p(s)      1 - p_y = s / (1 + s)

and with c = d loss / d logp the gradients are d h = a (sum_j E_j W_j - s W_y) and d W = E'^T (a h), a = -c / ((1 + s) T),
E'_y = -s. Leaving the target out of the sum keeps 1 - p_y exact when p_y -> 1, where "1 - p" has lost every digit.
The target was sampled, so E is bounded by 1 / p_y; a row for which that is too large takes the maximum as its offset instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_kernels.backends.base import SoftmaxChunk

# exp overflows float32 at 88 and -c/(1+s) * E underflows before: below this log-probability a row is redone with its maximum.
_MIN_ANCHORED_LOGPROB = -60.0


class TorchBackend:
    name = "torch"

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        # A CPU's GEMM is starved by fewer than 256 rows and a tile of 1024 x 512 still fits its cache; a GPU wants large launches.
        self._vocabulary_tile = 1024 if on_cpu else 8192
        self._fewest_rows, self._most_rows = (256, 512) if on_cpu else (1024, 4096)
        self._workspace_bytes = (64 << 20) if on_cpu else (1 << 30)
        self._workspace: Tensor | None = None

    def rows_per_chunk(self, vocabulary: int) -> int:
        """As many as let the exponentials, [V, rows] in float32, fit the workspace, within bounds."""
        fitting = self._workspace_bytes // (4 * max(vocabulary, 1))
        return int(min(self._most_rows, max(self._fewest_rows, fitting // 64 * 64)))

    def softmax(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, hidden_gradient: bool, weight_gradient: bool
    ) -> SoftmaxChunk:
        dtype = working_dtype(hidden, weight)
        rows, targets = hidden.to(dtype), targets.contiguous()
        target_rows = weight[targets].to(dtype)
        target_logits = (rows * target_rows).sum(1) / temperature
        arguments = (rows, weight, targets, temperature, hidden_gradient, weight_gradient)
        others, weighted, exponentials, weighted_rows = self._sweep(target_logits, *arguments)
        offset = target_logits.double().clone()  # .double() alone is no copy of float64
        extreme = ~(torch.log1p(others) <= -_MIN_ANCHORED_LOGPROB)  # written so that NaN counts as extreme
        if bool(extreme.any()):
            at = extreme.nonzero()[:, 0]
            few = (rows[at], weight, targets[at], temperature, hidden_gradient, weight_gradient)
            maximum = self._row_maximum(rows[at], weight, temperature)
            self._workspace = None  # the chunk's exponentials stay where they are; the few rows get memory of their own
            others[at], weighted[at], some_exponentials, some_rows = self._sweep(maximum, *few)
            offset[at] = maximum.double()
            if exponentials is not None and some_exponentials is not None:
                exponentials[:, at] = some_exponentials
            if weighted_rows is not None and some_rows is not None:
                weighted_rows[at] = some_rows
        # float64 on [n] numbers costs nothing and makes the float32 results correctly rounded.
        distance = target_logits.double() - offset
        own = torch.exp(distance)  # 1 for an anchored row
        total = others + own
        log_total = torch.where(distance == 0, torch.log1p(others), torch.log(total))
        entropy = log_total - (weighted + torch.where(own > 0, own * distance, 0.0)) / total
        result = dtype if dtype == torch.float64 else torch.float32
        return SoftmaxChunk(
            logprobs=(distance - log_total).to(result),
            entropy=entropy.clamp(min=0.0).to(result),
            others=others.to(result),
            total=total.to(result),
            exponentials=exponentials,
            weighted_rows=weighted_rows,
            target_rows=target_rows,
        )

    def add_weight_gradient(self, chunk: SoftmaxChunk, targets: Tensor, scaled_hidden: Tensor, gradient: Tensor, *, first: bool) -> None:
        exponentials = chunk.exponentials
        assert exponentials is not None
        columns = torch.arange(targets.numel(), device=targets.device)
        exponentials[targets, columns] = -chunk.others.to(exponentials.dtype)
        for begin in range(0, gradient.shape[0], self._vocabulary_tile):
            tile = slice(begin, begin + self._vocabulary_tile)
            if first:
                torch.mm(exponentials[tile], scaled_hidden, out=gradient[tile])
            else:
                gradient[tile].addmm_(exponentials[tile], scaled_hidden)

    def _sweep(
        self,
        offset: Tensor,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        hidden_gradient: bool,
        weight_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """One pass over the vocabulary: (s, sum of E (x - offset), E or None, E W or None).

        Tiles are [vocabulary, tokens]: the row sums then run along contiguous lanes and every GEMM has a plain layout, where a
        row-major [tokens, V] buffer costs the first one a third of its speed to 4K aliasing. A tile of W in half precision is widened
        once, and serves GEMM 1 and GEMM 2.
        """
        vocabulary, count = weight.shape[0], rows.shape[0]
        keep = vocabulary if weight_gradient else min(vocabulary, self._vocabulary_tile)
        exponentials = self._buffer(keep, count, rows)
        sums = torch.zeros(count, dtype=torch.float64, device=rows.device)
        weighted = torch.zeros_like(sums)
        weighted_rows = torch.zeros_like(rows) if hidden_gradient else None
        transposed = rows.t()
        for begin in range(0, vocabulary, self._vocabulary_tile):
            entries = weight[begin : begin + self._vocabulary_tile].to(rows.dtype)
            tile = exponentials[begin if weight_gradient else 0 :][: entries.shape[0]]
            torch.mm(entries, transposed, out=tile)
            self._exponentiate(tile, 1.0 / temperature, offset, targets, begin, sums, weighted)
            if weighted_rows is not None:
                weighted_rows.addmm_(tile.t(), entries)
        return sums, weighted, exponentials if weight_gradient else None, weighted_rows

    def _exponentiate(
        self, tile: Tensor, inverse_temperature: float, offset: Tensor, targets: Tensor, begin: int, sums: Tensor, weighted: Tensor
    ) -> None:
        """Logits to exponentials in place, the target's to 0; adds the sums. `csrc/cpu/anchored_tile.h` says the same."""
        inside = ((targets >= begin) & (targets < begin + tile.shape[0])).nonzero()[:, 0]
        tile.mul_(inverse_temperature).sub_(offset)
        difference = tile.clamp(min=-1e30)  # a copy; a logit of -inf would make 0 * -inf below a NaN, and NaN passes through
        tile.exp_()
        tile[targets[inside] - begin, inside] = 0.0
        difference[targets[inside] - begin, inside] = 0.0
        sums += tile.sum(0)
        # A far-away entry may overflow here; such a row is extreme and redone with its maximum.
        weighted += difference.mul_(tile).sum(0)

    def _buffer(self, height: int, width: int, like: Tensor) -> Tensor:
        """[height, width] of the workspace, kept from chunk to chunk: fresh memory would be zeroed by the system each time."""
        size = height * width
        if self._workspace is None or self._workspace.numel() < size or self._workspace.dtype != like.dtype:
            self._workspace = like.new_empty(size)
        return self._workspace[:size].view(height, width)

    def _row_maximum(self, rows: Tensor, weight: Tensor, temperature: float) -> Tensor:
        maximum = rows.new_full((rows.shape[0],), -math.inf)
        for begin in range(0, weight.shape[0], self._vocabulary_tile):
            entries = weight[begin : begin + self._vocabulary_tile].to(rows.dtype)
            maximum = torch.maximum(maximum, (entries @ rows.t()).amax(0) / temperature)
        return maximum


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Float32 products as float32: no autocast, no TF32 or bf16 passes whatever the caller's `set_float32_matmul_precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def working_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """float32 for half and single precision (logits are never rounded to bf16), float64 for float64."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
