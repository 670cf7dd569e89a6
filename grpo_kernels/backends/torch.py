"""The sweeps in plain torch, on any device: the fallback everywhere, and the frame in which the compiled CPU kernels run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_kernels.backends.base import ChunkRows, Keep, LogitSlopes, ParameterGradients, Sweep
from grpo_kernels.head import Head, working_dtype
from grpo_kernels.loss_rows import LossRows
from grpo_kernels.softmax import MAX_DISTANCE, MIN_DISTANCE


class TorchBackend:
    """Tiles are [vocabulary, tokens]: the row sums then run along contiguous lanes and every GEMM has a plain layout, where a row-major
    [tokens, V] buffer costs the first one a third of its speed to 4K aliasing. A tile of W in half precision is widened once, and serves
    both GEMM 1 and GEMM 2.
    """

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        # A CPU's GEMM is starved by fewer than 256 rows and a tile of 1024 x 512 still fits its cache; a GPU wants large launches.
        self._vocabulary_tile = 1024 if on_cpu else 8192
        self._fewest_rows, self._most_rows = (256, 512) if on_cpu else (1024, 4096)
        self._workspace_bytes = (64 << 20) if on_cpu else (1 << 30)
        self._workspace: Tensor | None = None

    def rows_per_chunk(self, head: Head, rows: int, keep: Keep, *, weight_gradient: bool) -> int:
        """As many as let the exponentials, [V, rows] in float32, fit the workspace, within bounds."""
        fitting = self._workspace_bytes // (4 * head.largest_slice)
        return int(min(self._most_rows, max(self._fewest_rows, fitting // 64 * 64)))

    def release(self) -> None:
        self._workspace = None

    def prepared(self, rows: LossRows, dtype: torch.dtype) -> LossRows:
        return rows

    def scaled(self, gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
        return (gradient.mul_(factor) if in_place else gradient * factor).to(dtype)

    def gradient_dtype(self, head: Head, hidden: torch.dtype, *, one_chunk: bool) -> torch.dtype:
        return working_dtype(hidden, head.weight.dtype)

    def sweep(self, head: Head, rows: ChunkRows, offset: Tensor, *, keep: Keep, weighted_rows: bool) -> Sweep:
        hidden, count = rows.hidden.to(offset.dtype), rows.hidden.shape[0]
        vocabulary = head.weight.shape[0]
        buffer = self._buffer(vocabulary if keep != "nothing" else min(vocabulary, self._vocabulary_tile), count, hidden)
        sums = torch.zeros(count, dtype=torch.float64, device=hidden.device)
        result = Sweep(sums, torch.zeros_like(sums), None, torch.zeros_like(hidden) if weighted_rows else None)
        transposed = hidden.t()
        for tile in self._tiles(vocabulary):
            entries = head.weight[tile].to(hidden.dtype)
            logits = buffer[tile] if keep != "nothing" else buffer[: entries.shape[0]]
            torch.mm(entries, transposed, out=logits)
            bias = None if head.bias is None else head.bias[tile].to(hidden.dtype).contiguous()
            self._anchor(logits, tile.start, bias, head.softcap, rows, offset, result, keep_distances=keep == "distances")
            if result.weighted_rows is not None:
                result.weighted_rows.addmm_(logits.t(), entries)
        result.kept = None if keep == "nothing" else buffer
        return result

    def target_products(self, head: Head, rows: ChunkRows) -> Tensor:
        at = rows.targets.clamp(min=0)
        dtype = rows.inverse_temperature.dtype
        products = (rows.hidden.to(dtype) * head.weight[at].to(dtype)).sum(1, dtype=torch.float64)
        if head.bias is not None:
            products += head.bias[at]
        return torch.where(rows.targets >= 0, products, 0.0)

    def hidden_gradient(self, head: Head, rows: ChunkRows, weighted_rows: Tensor, others: Tensor, scale: Tensor) -> Tensor:
        target_rows = head.weight[rows.targets.clamp(min=0)].to(weighted_rows.dtype)
        if head.slice is not None:  # where, not a product: the row that stands in may hold NaN
            target_rows = torch.where(rows.targets[:, None] >= 0, target_rows, 0.0)
        return scale[:, None] * (weighted_rows - others[:, None] * target_rows)

    def row_maximum(self, head: Head, rows: ChunkRows) -> Tensor:
        hidden = rows.hidden.to(rows.inverse_temperature.dtype)
        maximum = hidden.new_full((hidden.shape[0],), -math.inf)
        for tile in self._tiles(head.weight.shape[0]):
            logits = hidden @ head.weight[tile].to(hidden.dtype).t()
            if head.bias is not None:
                logits += head.bias[tile].to(logits.dtype)
            if head.softcap is not None:
                logits.div_(head.softcap).tanh_().mul_(head.softcap)
            maximum = torch.maximum(maximum, logits.amax(1) * rows.inverse_temperature)
        return maximum

    def add_exponentials(self, head: Head, rows: ChunkRows, kept: Tensor, others: Tensor, scale: Tensor, into: ParameterGradients) -> None:
        scaled_hidden = scale[:, None] * rows.hidden
        at, columns = _inside(rows.targets, 0, kept.shape[0])
        kept[at, columns] = -others[columns]
        for tile in self._tiles(kept.shape[0]):
            _add_product(into.weight, tile, kept[tile], scaled_hidden, into.fresh)
            _add_product(None if into.bias is None else into.bias[:, None], tile, kept[tile], scale[:, None], into.fresh)
        into.fresh = False

    def add_distances(
        self, head: Head, rows: ChunkRows, kept: Tensor, slopes: LogitSlopes, hidden_gradient: Tensor | None, into: ParameterGradients
    ) -> None:
        hidden, ones = rows.hidden.to(kept.dtype), torch.ones_like(slopes.slope)[:, None]
        for tile in self._tiles(kept.shape[0]):
            gradient = kept[tile]
            self._differentiate(gradient, head.softcap, rows, slopes)
            at, columns = _inside(rows.targets, tile.start, gradient.shape[0])
            gradient[at, columns] = slopes.target_gradient[columns]
            if hidden_gradient is not None:
                hidden_gradient.addmm_(gradient.t(), head.weight[tile].to(gradient.dtype))
            _add_product(into.weight, tile, gradient, hidden, into.fresh)
            _add_product(None if into.bias is None else into.bias[:, None], tile, gradient, ones, into.fresh)
        into.fresh = False

    def _anchor(
        self,
        tile: Tensor,
        begin: int,
        bias: Tensor | None,
        softcap: float | None,
        rows: ChunkRows,
        offset: Tensor,
        result: Sweep,
        *,
        keep_distances: bool,
    ) -> None:
        """Products to exponentials or distances in place; adds to the sums. `csrc/cpu/anchored_tile.h` says the same, but for a
        product of minus infinity under a soft cap, which here is -softcap and there no logit at all."""
        at, columns = _inside(rows.targets, begin, tile.shape[0])
        if bias is not None:
            tile.add_(bias[:, None])
        if softcap is not None:
            tile.div_(softcap).tanh_().mul_(softcap)
        tile.mul_(rows.inverse_temperature).sub_(offset)
        tile[at, columns] = -math.inf
        # A logit of -inf would make 0 * -inf below a NaN; NaN passes through.
        tile.clamp_(min=MIN_DISTANCE, max=MAX_DISTANCE)
        exponentials = tile.exp()
        result.others += exponentials.sum(0)
        result.weighted += (tile * exponentials).sum(0)
        if not keep_distances:
            tile.copy_(exponentials)

    def _differentiate(self, tile: Tensor, softcap: float | None, rows: ChunkRows, slopes: LogitSlopes) -> None:
        """Distances to gradients of the products in place. `csrc/cpu/logit_gradient.h` says the same."""
        factor = rows.inverse_temperature
        if softcap is not None:
            factor = factor * (1.0 - ((tile + slopes.offset) / (factor * softcap)).square_())
        tile.sub_(slopes.log_total).clamp_(min=-1e30)
        probability = tile.exp()
        tile.mul_(slopes.entropy_slope).add_(slopes.slope).mul_(probability).mul_(factor).neg_()

    def _tiles(self, vocabulary: int) -> Iterator[slice]:
        for begin in range(0, vocabulary, self._vocabulary_tile):
            yield slice(begin, min(begin + self._vocabulary_tile, vocabulary))

    def _buffer(self, height: int, width: int, like: Tensor) -> Tensor:
        """[height, width] of the workspace, kept from chunk to chunk: fresh memory would be zeroed by the system each time."""
        size = height * width
        if self._workspace is None or self._workspace.numel() < size or self._workspace.dtype != like.dtype:
            self._workspace = None  # before the new one is there: the two must not be alive together
            self._workspace = like.new_empty(size)
        return self._workspace[:size].view(height, width)


def _add_product(into: Tensor | None, tile: slice, left: Tensor, right: Tensor, fresh: bool) -> None:
    if into is None:
        return
    if fresh:
        torch.mm(left, right, out=into[tile])
    else:
        into[tile].addmm_(left, right)


def _inside(targets: Tensor, begin: int, height: int) -> tuple[Tensor, Tensor]:
    """Positions of the targets inside a tile: (its rows, columns)."""
    columns = ((targets >= begin) & (targets < begin + height)).nonzero()[:, 0]
    return targets[columns] - begin, columns
