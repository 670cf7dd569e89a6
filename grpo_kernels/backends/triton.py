"""The Triton backend, for NVIDIA GPUs: library GEMMs, and one kernel per chunk between them or in the epilogue of the first."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import ChunkRows, Keep, LogitSlopes, ParameterGradients, Sweep
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.head import Head
from grpo_kernels.loss_rows import LossRows

_MOST_ROWS = 4096
_WORKSPACE_BYTES = 5 << 28  # 1.25 GiB: 2048 rows of float32 products of 151936 logits
_LINE = 64  # a row of the workspace is a multiple of so many logits: aligned for 16-byte accesses in float32 and in bfloat16


@cache
def kernels() -> Any:
    """The package of the kernels, or the error for which it is not there: triton comes neither with torch's CPU builds nor on macOS, and
    one before 3.6 may lack what they use. Not imported before it is needed, which takes most of a second."""
    try:
        return importlib.import_module("grpo_kernels.triton_kernels")
    except Exception as error:  # a broken installation raises what it likes, and must not take torch's way down with it
        return error


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None."""
    if device.type not in ("cuda", "cpu") or torch.version.hip is not None:
        return f"its kernels are for NVIDIA GPUs, the tensors are on {device}"
    if device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return "the tensors are on the CPU; there it runs only in Triton's interpreter, for tests (TRITON_INTERPRET=1)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 units; compute capability 8.0 or newer is needed"
    if isinstance(kernels(), Exception):
        return f"triton cannot be imported ({kernels()}); 3.6 or newer is needed"
    if device.type == "cpu" and not kernels().INTERPRETED:
        return "the tensors are on the CPU, and TRITON_INTERPRET was off when triton was imported"
    return None


class TritonBackend(TorchBackend):
    """A chunk is row-major, [rows, vocabulary]. bfloat16 hidden states and weight are multiplied as such, with float32 results: products,
    sums and the weight's gradient are float32, and the exponentials that GEMM 2 and GEMM 3 read bfloat16. Of all other dtypes float32
    copies are multiplied, of the weight in tiles. float64 is torch's.
    """

    name = "triton"

    def rows_per_chunk(self, head: Head, rows: int, keep: Keep, *, weight_gradient: bool) -> int:
        """As many as fit the workspace, and at least 1024, for the weight's gradient to be worth its traffic. All at once, where that
        takes no more memory than the float32 sums of the weight's gradient, which then are not needed.

        Processes that share a vocabulary must take the same chunks, whichever way each of them, with its size, settings and measurements,
        makes the first product.
        """
        halved = head.slice is None and self._anchors(head, keep, stores=True)
        per_row = (2 if halved else 4) * head.largest_slice
        fitting = int(min(_MOST_ROWS, max(1024, _WORKSPACE_BYTES // per_row // 256 * 256)))
        saved = 4 * head.largest_slice * head.weight.shape[1] if weight_gradient else 0
        return max(rows, 1) if rows <= _MOST_ROWS and rows * per_row <= _WORKSPACE_BYTES + saved else fitting

    def prepared(self, rows: LossRows, dtype: torch.dtype) -> LossRows:
        return rows if dtype == torch.float64 else rows.one_launch(kernels().computes, kernels().token_objective)

    def scaled(self, gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
        if gradient.dtype == torch.float64:
            return super().scaled(gradient, factor, dtype, in_place=in_place)
        return kernels().scaled(gradient, factor, dtype, in_place=in_place)

    def gradient_dtype(self, head: Head, hidden: torch.dtype, *, one_chunk: bool) -> torch.dtype:
        if one_chunk and hidden == head.weight.dtype == torch.bfloat16:
            return torch.bfloat16  # one GEMM with float32 accumulators, rounded once at its end
        return super().gradient_dtype(head, hidden, one_chunk=one_chunk)

    def sweep(self, head: Head, rows: ChunkRows, offset: Tensor, *, keep: Keep, weighted_rows: bool) -> Sweep:
        if offset.dtype == torch.float64:
            return super().sweep(head, rows, offset, keep=keep, weighted_rows=weighted_rows)
        dtype = _factor_dtype(head, rows)
        stores = keep == "exponentials" or weighted_rows
        kept: Tensor | None
        if dtype == torch.bfloat16 and self._anchors(head, keep, stores=stores):
            kept = self._chunk(head, rows, torch.bfloat16) if stores else None
            others, weighted = kernels().anchored_products(
                rows.hidden, head.weight, rows.targets, rows.inverse_temperature, offset, bias=_bias(head), kept=kept
            )
        else:
            kept = products = self._products(head, rows, dtype)
            others, weighted = kernels().anchor_rows(
                products, head.weight.shape[0], rows.targets, rows.inverse_temperature, offset, bias=_bias(head), softcap=head.softcap,
                store=dtype if stores else None,
            )  # fmt: skip
            kept = _stored(products, dtype) if stores else products
        sums = None
        if weighted_rows:
            assert kept is not None
            sums = torch.empty(rows.hidden.shape, dtype=torch.float32, device=offset.device)
            self._multiply(kept, head, sums)
        return Sweep(others.double(), weighted.double(), None if keep == "nothing" else kept, sums)

    def target_products(self, head: Head, rows: ChunkRows) -> Tensor:
        if rows.inverse_temperature.dtype == torch.float64:
            return super().target_products(head, rows)
        products: Tensor = kernels().target_products(rows.hidden, head.weight, rows.targets, _bias(head))
        return products

    def hidden_gradient(self, head: Head, rows: ChunkRows, weighted_rows: Tensor, others: Tensor, scale: Tensor) -> Tensor:
        if weighted_rows.dtype == torch.float64:
            return super().hidden_gradient(head, rows, weighted_rows, others, scale)
        gradient: Tensor = kernels().hidden_gradient(weighted_rows, head.weight, rows.targets, others, scale)
        return gradient

    def add_exponentials(self, head: Head, rows: ChunkRows, kept: Tensor, others: Tensor, scale: Tensor, into: ParameterGradients) -> None:
        if kept.dtype == torch.float64:
            super().add_exponentials(head, rows, kept, others, scale, into)
            return
        entries = kept[:, : head.weight.shape[0]]
        at = rows.targets.clamp(min=0)[:, None]
        entries.scatter_(1, at, torch.where(rows.targets[:, None] >= 0, -others[:, None].to(kept.dtype), entries.gather(1, at)))
        scaled = torch.mul(rows.hidden, scale[:, None], out=torch.empty_like(rows.hidden, dtype=kept.dtype))  # in float32, rounded once
        _add(into, entries, scaled, scale)

    def add_distances(
        self, head: Head, rows: ChunkRows, kept: Tensor, slopes: LogitSlopes, hidden_gradient: Tensor | None, into: ParameterGradients
    ) -> None:
        """What is kept are the products themselves."""
        if kept.dtype == torch.float64:
            super().add_distances(head, rows, kept, slopes, hidden_gradient, into)
            return
        dtype = _factor_dtype(head, rows)
        kernels().products_gradient(
            kept, head.weight.shape[0], rows.targets, rows.inverse_temperature, slopes.offset, slopes.log_total, slopes.slope,
            slopes.entropy_slope, slopes.target_gradient, bias=_bias(head), softcap=head.softcap, store=dtype,
        )  # fmt: skip
        gradient = _stored(kept, dtype)
        if hidden_gradient is not None:
            self._multiply(gradient, head, hidden_gradient)
        _add(into, gradient[:, : head.weight.shape[0]], rows.hidden, torch.ones_like(slopes.slope))

    def _anchors(self, head: Head, keep: Keep, *, stores: bool) -> bool:
        """Whether the anchored GEMM makes the first product of bfloat16 factors; `stores`: and keeps its exponentials."""
        if keep == "distances" or head.softcap is not None or head.weight.dtype != torch.bfloat16 or head.weight.stride(1) != 1:
            return False
        vocabulary, width = head.weight.shape
        return bool(kernels().first_product(head.weight.device, width, vocabulary, stores=stores) == "anchored")

    def _products(self, head: Head, rows: ChunkRows, dtype: torch.dtype) -> Tensor:
        """h W^T, [n, padded] float32 from factors in `dtype`."""
        products = self._chunk(head, rows, torch.float32)
        hidden = rows.hidden.to(dtype)
        for tile, entries in _entries(head, dtype):
            _product(hidden, entries.t(), products[:, tile])
        return products

    def _multiply(self, left: Tensor, head: Head, into: Tensor) -> None:
        """into = left W, [n, H] float32, with `left` [n, padded]."""
        for tile, entries in _entries(head, left.dtype):
            if tile.start == 0:
                _product(left[:, tile], entries, into)
            else:
                into.addmm_(left[:, tile], entries)

    def _chunk(self, head: Head, rows: ChunkRows, dtype: torch.dtype) -> Tensor:
        """[n, padded] of the workspace."""
        padded = -(-head.weight.shape[0] // _LINE) * _LINE
        return self._buffer(rows.hidden.shape[0], padded, rows.hidden.new_empty(0, dtype=dtype))


def _bias(head: Head) -> Tensor | None:
    return None if head.bias is None else head.bias.contiguous()


def _factor_dtype(head: Head, rows: ChunkRows) -> torch.dtype:
    """In which the matrices are multiplied."""
    return torch.bfloat16 if rows.hidden.dtype == head.weight.dtype == torch.bfloat16 else torch.float32


def _entries(head: Head, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in `dtype`: whole, or in tiles where it must be converted."""
    vocabulary = head.weight.shape[0]
    step = vocabulary if head.weight.dtype == dtype else 8192
    for begin in range(0, vocabulary, step):
        tile = slice(begin, min(begin + step, vocabulary))
        yield tile, head.weight[tile].to(dtype)


def _stored(products: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, padded] of what a kernel has written over the products: each row's at its beginning."""
    return products if dtype == products.dtype else products.view(dtype)[:, : products.shape[1]]


def _add(into: ParameterGradients, left: Tensor, right: Tensor, ones: Tensor) -> None:
    """weight += left^T right and bias += left^T ones, with `left` [n, V], whose dtype `right` [n, H] and `ones` [n] are converted to."""
    if into.weight is not None:
        if not into.fresh and into.weight.dtype != torch.float32:  # rows that came after the one chunk: now they are sums
            into.weight = into.weight.float()
        _product(left.t(), right.to(left.dtype), into.weight, add=not into.fresh)
    if into.bias is not None:
        _product(left.t(), ones[:, None].to(left.dtype), into.bias[:, None], add=not into.fresh)
    into.fresh = False


@cache
def _adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch adds the product of such factors to a float32 matrix: there were versions that had `out_dtype` and refused."""
    some = torch.zeros(16, 16, dtype=dtype, device=device)
    into = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(into, some, some, out_dtype=torch.float32, out=into)
    except RuntimeError:
        return False
    return True


def _product(left: Tensor, right: Tensor, into: Tensor, *, add: bool = False) -> None:
    """into = left right, or +=; summed in float32 whatever the factors' dtype, and rounded once where `into` is bfloat16."""
    if left.dtype == into.dtype:
        _ = into.addmm_(left, right) if add else torch.mm(left, right, out=into)
    elif left.device.type == "cuda":
        if not add:
            torch.mm(left, right, out_dtype=into.dtype, out=into)
        elif _adds_in_place(left.dtype, left.device):
            torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
        else:
            into.add_(torch.mm(left, right, out_dtype=into.dtype))
    else:  # the interpreter: a CPU multiplies bfloat16 to bfloat16 only
        product = left.float() @ right.float()
        _ = into.add_(product) if add else into.copy_(product)
