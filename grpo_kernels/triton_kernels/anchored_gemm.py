"""GEMM 1 with the anchored softmax in its epilogue: the logits h W^T are never stored, only exp(x - o) and its row sums.

Two kernels differ in how tiles travel: by pointers (sm_80 and later, any alignment) or by tensor descriptors (TMA: sm_90 and sm_100).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_kernels.triton_kernels.runtime import (
    FAR,
    FLOAT,
    FUSED,
    INDEX,
    INTERPRETED,
    LOG2E,
    NEAR,
    expect,
    multiplicand,
    on,
    stored,
    target_of,
)


@triton.jit
def _exp(x):
    """What `tl.exp` does, less its three instructions for subnormal results, which become 0. 1 % of the kernel at H = 4096."""
    if INTERPRETED:
        result = tl.exp(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], dtype=tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def _tile_of(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """GROUP row tiles at a time go over the vocabulary side by side, so that a tile of W comes from memory once for all of them."""
    first = index // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = index % (GROUP * column_tiles)
    return first + within % height, within // height


@triton.jit
def _halves(tile):
    """The left and the right half of the columns. Registers are only renamed: a thread holds parts of both."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _exponentials(products, first, target, inverse_temperature, offset, bias, vocabulary, HAS_BIAS: tl.constexpr):
    """exp(x - o), 0 at the target and beyond the vocabulary, with its row sums and those of exp(x - o) (x - o).

    Column numbers are relative to `first`, and a column beyond the vocabulary is bounded by FAR instead of masked: per element this
    leaves one comparison, where a two-dimensional mask took registers to hold and 3 more instructions.
    """
    columns = tl.arange(0, products.shape[1])
    inside = columns < vocabulary - first
    if HAS_BIAS:
        products += tl.load(bias + first + columns, mask=inside, other=float("-inf")).to(tl.float32)[None, :]
        ceiling = NEAR
    else:
        ceiling = tl.where(inside, NEAR, FAR)[None, :]
    distance = products * inverse_temperature[:, None] - offset[:, None]
    distance = tl.minimum(distance, ceiling, propagate_nan=tl.PropagateNan.ALL)
    distance = tl.maximum(distance, FAR, propagate_nan=tl.PropagateNan.ALL)
    distance = tl.where(columns[None, :] == (target - first)[:, None], FAR, distance)
    exponential = _exp(distance)
    return exponential, tl.sum(exponential, 1), tl.sum(exponential * distance, 1)


@triton.jit
def _epilogue(
    products, row_tile, column_tile, targets, inverse_temperatures, offsets, bias, kept, kept_stride, sums, n, vocabulary, columns,
    column_tiles, HAS_BIAS: tl.constexpr, STORE: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """From the accumulator to `kept` and to this column tile's entries of `sums`, PARTS groups of columns one after another: a whole tile
    of exponentials, distances and products does not fit the registers."""
    BLOCK_N: tl.constexpr = products.shape[0]
    BLOCK_V: tl.constexpr = products.shape[1]
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present = rows < n
    target = tl.load(targets + rows, mask=present, other=-1).to(tl.int32)
    inverse_temperature = tl.load(inverse_temperatures + rows, mask=present, other=0.0)
    offset = tl.load(offsets + rows, mask=present, other=0.0)
    if PARTS == 1:
        parts = (products,)
    elif PARTS == 2:
        parts = _halves(products)
    else:
        left, right = _halves(products)
        parts = _halves(left) + _halves(right)
    others = tl.zeros((BLOCK_N,), tl.float32)
    weighted = tl.zeros((BLOCK_N,), tl.float32)
    for i in tl.static_range(PARTS):
        first = column_tile * BLOCK_V + i * (BLOCK_V // PARTS)
        exponential, sum_of_part, weighted_of_part = _exponentials(
            parts[i], first, target, inverse_temperature, offset, bias, vocabulary, HAS_BIAS
        )
        others += sum_of_part
        weighted += weighted_of_part
        if STORE:
            if DESCRIPTOR:
                kept.store([row_tile * BLOCK_N, first], stored(exponential, tl.bfloat16))
            else:
                at = first + tl.arange(0, BLOCK_V // PARTS)
                tl.store(
                    kept + rows.to(tl.int64)[:, None] * kept_stride + at[None, :],
                    stored(exponential, tl.bfloat16),
                    mask=present[:, None] & (at < columns)[None, :],
                )
    place = sums + column_tile.to(tl.int64) * n + rows
    tl.store(place, others, mask=present)
    tl.store(place + column_tiles.to(tl.int64) * n, weighted, mask=present)


# Not specialised: the chunk's size, which would mean a compilation for each; values that may be 1, which would become constants; and the
# alignment of tensors of one element per row, slices of common buffers that are aligned for some sizes only.
_PER_ROW = ["targets", "inverse_temperatures", "offsets", "sums"]


@triton.jit(do_not_specialize=["n", "vocabulary", "row_tiles", "column_tiles"], do_not_specialize_on_alignment=_PER_ROW)
def _pointer_kernel(
    hidden, weight, targets, inverse_temperatures, offsets, bias, kept, sums, n, vocabulary, columns, width, row_tiles, column_tiles,
    hidden_stride, weight_stride, kept_stride,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One tile per program. Rows beyond the last repeat it, and are then not stored, or bounded away as columns."""
    row_tile, column_tile = _tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP)
    rows = tl.minimum(row_tile * BLOCK_N + tl.arange(0, BLOCK_N), n - 1).to(tl.int64)
    entries = tl.minimum(column_tile * BLOCK_V + tl.arange(0, BLOCK_V), vocabulary - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_H)
    left = hidden + rows[:, None] * hidden_stride + inner[None, :]
    right = weight + entries[None, :] * weight_stride + inner[:, None]
    products = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for begin in range(0, width, BLOCK_H):
        inside = inner < width - begin
        x = tl.load(left, mask=inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None], other=0.0)
        products = tl.dot(multiplicand(x), multiplicand(y), products, input_precision="ieee")
        left += BLOCK_H
        right += BLOCK_H
    _epilogue(
        products, row_tile, column_tile, targets, inverse_temperatures, offsets, bias, kept, kept_stride, sums, n, vocabulary, columns,
        column_tiles, HAS_BIAS, STORE, False, PARTS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["n", "vocabulary", "width", "row_tiles", "column_tiles", "programs"], do_not_specialize_on_alignment=_PER_ROW
)
def _descriptor_kernel(
    hidden, weight, targets, inverse_temperatures, offsets, bias, kept, sums, n, vocabulary, width, row_tiles, column_tiles, programs,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """As many programs as are resident, each with every `programs`-th tile. Loads and stores beyond a tensor's edge are left out by the
    hardware, and loads then give 0. The loops are flattened into one, so that a tile's first loads are under way during the epilogue of
    the one before; without the assumption an unused second epilogue, for a width of 0, takes registers and spills."""
    tl.assume(width > 0)
    for index in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=True):
        row_tile, column_tile = _tile_of(index, row_tiles, column_tiles, GROUP)
        products = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for begin in range(0, width, BLOCK_H):
            x = hidden.load([row_tile * BLOCK_N, begin])
            y = weight.load([column_tile * BLOCK_V, begin])
            products = tl.dot(multiplicand(x), multiplicand(y).T, products, input_precision="ieee")
        _epilogue(
            products, row_tile, column_tile, targets, inverse_temperatures, offsets, bias, kept, 0, sums, n, vocabulary, 0,
            column_tiles, HAS_BIAS, STORE, True, PARTS,
        )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """rows, columns and width of a tile (BLOCK_N, BLOCK_V, BLOCK_H); `parts` of the columns that the epilogue takes one after another;
    `group`, see `_tile_of`; `resident` programs on a multiprocessor, for the persistent kernel."""

    rows: int
    columns: int
    width: int
    parts: int
    warps: int
    stages: int
    group: int = 16
    resident: int = 1


# The largest tiles that do not spill. Compiled by Triton 3.9, storing; "spills": bytes of stack.
#
#   sm_90, descriptors              registers  shared memory
#     128x256x64, 4 parts, 4 stages       249        209 KB   HOPPER
#       2 parts                           255        225 KB   no spill, nothing to spare
#       1 part, 3 stages                  255        209 KB   spills 24
#       with a bias                       255        209 KB   spills 8
#     128x256x64, 2 parts, 3 stages       255        177 KB   HOPPER_WITH_BIAS
#     256x128x64, 2 parts, with a bias    241        225 KB   twice the bias registers saved, but 8 HGMMA of half the width
#     128x128x64, 4 warps, 2 parts        234        145 KB   two would be resident with 3 stages, at 4/3 of the traffic from L2
#   sm_100, descriptors
#     128x128x64, 4 warps, 2 parts        186        112 KB   BLACKWELL: two resident, one's products under the other's epilogue
#       8 warps                           255        113 KB   spills 64
#       with a bias                       178        112 KB   spills 80 with Triton 3.6 (4 parts 152)
#     128x128x64, 4 warps, 1 part         168         97 KB   BLACKWELL_WITH_BIAS: 2 stages, for two to be resident
#     128x256x64, 4 warps, 4 parts        255        208 KB   spills 128 (not flattened 120, 8 parts 96, 8 warps 430, warp-specialised 104)
#   sm_80, pointers; at most 99 KB, so that sm_86, sm_89 and sm_120 run it too
#     128x256x32, 4 parts, 5 stages       255         96 KB   ALIGNED
#     128x128x64, 2 parts, 4 stages       188         96 KB   fits, at 4/3 of the traffic from L2
#   any, pointers that cannot be read 16 bytes at a time
#     128x128x32, 1 part, 2 stages    196-254         32 KB   UNALIGNED
#     128x256x64, 4 parts                 255         48 KB   spills 416
HOPPER = Tiling(128, 256, 64, parts=4, warps=8, stages=4)
HOPPER_WITH_BIAS = Tiling(128, 256, 64, parts=2, warps=8, stages=3)
BLACKWELL = Tiling(128, 128, 64, parts=2, warps=4, stages=3, resident=2)
BLACKWELL_WITH_BIAS = Tiling(128, 128, 64, parts=1, warps=4, stages=2, resident=2)
ALIGNED = Tiling(128, 256, 32, parts=4, warps=8, stages=5)
UNALIGNED = Tiling(128, 128, 32, parts=1, warps=8, stages=2)
INTERPRETER = Tiling(16, 256, 32, parts=2, warps=4, stages=1, group=2)


def anchored_products(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """For x = (h W^T + bias) / T and the distances d = min(x - o, 61): the sums over j != y of exp(d) and of exp(d) d, each [n] float32.

    hidden: [n, H], weight: [V, H], both bfloat16, rows of any stride. targets: [n] int64, -1 where another process has the target.
    inverse_temperature, offset: [n] float32. bias: [V] or None.
    kept: [n, padded] bfloat16 with padded >= V, for exp(d), with 0 at the target and beyond the vocabulary; None: nothing is stored.

    Everything is computed in float32 from the float32 accumulators; exp(d) is rounded after it was summed. A logit of -inf counts as
    exp 0, NaN makes its row NaN, and a row whose logits are more than 60 above its offset has sums of at least exp(60).
    """
    tensors = [hidden, weight] if kept is None else [hidden, weight, kept]
    if any(t.dim() != 2 or t.stride(1) != 1 or t.dtype != torch.bfloat16 for t in tensors) or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "a Triton kernel got " + ", ".join(f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in tensors) + "; it takes "
            "hidden [n, H], weight [V, H] and kept [n, padded], each bfloat16 with last stride 1"
        )
    expect(hidden, (hidden.shape[0],), INDEX, targets=targets)
    expect(hidden, (hidden.shape[0],), FLOAT, inverse_temperature=inverse_temperature, offset=offset)
    capability = target_of(hidden.device).capability
    descriptors = capability // 10 in (9, 10) and all(_describable(t) for t in tensors)
    if INTERPRETED:
        tiling = INTERPRETER
    elif descriptors and capability >= 100:
        tiling = BLACKWELL if bias is None else BLACKWELL_WITH_BIAS
    elif descriptors:
        tiling = HOPPER if bias is None else HOPPER_WITH_BIAS
    else:
        tiling = ALIGNED if all(_vectorised(t) for t in tensors) else UNALIGNED
    try:
        return _launch(hidden, weight, targets, inverse_temperature, offset, bias, kept, tiling, descriptors=descriptors)
    except OutOfResources as error:  # raised before anything runs
        if tiling is UNALIGNED:
            raise
        warnings.warn(f"anchored_products uses its smallest tiles, as Triton {triton.__version__} reports: {error}", stacklevel=2)
    return _launch(hidden, weight, targets, inverse_temperature, offset, bias, kept, UNALIGNED, descriptors=False)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    tiling: Tiling,
    *,
    descriptors: bool,
) -> tuple[Tensor, Tensor]:
    (n, width), vocabulary = hidden.shape, weight.shape[0]
    columns = vocabulary if kept is None else kept.shape[1]
    row_tiles, column_tiles = triton.cdiv(n, tiling.rows), triton.cdiv(columns, tiling.columns)
    # One row of partial sums per column tile, added up in a fixed order: the same bits every time, which atomic additions do not give.
    sums = torch.empty(2, column_tiles, n, dtype=torch.float32, device=hidden.device)
    if n == 0:
        return sums[0].sum(0), sums[1].sum(0)
    bias = None if bias is None else bias.contiguous()
    options = {
        "BLOCK_N": tiling.rows, "BLOCK_V": tiling.columns, "BLOCK_H": tiling.width, "PARTS": tiling.parts, "GROUP": tiling.group,
        "HAS_BIAS": bias is not None, "STORE": kept is not None, "num_warps": tiling.warps, "num_stages": tiling.stages, **FUSED,
    }  # fmt: skip
    with on(hidden.device):
        if descriptors:
            programs = min(row_tiles * column_tiles, tiling.resident * target_of(hidden.device).multiprocessors)
            _descriptor_kernel[(programs,)](
                TensorDescriptor.from_tensor(hidden, [tiling.rows, tiling.width]),
                TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.width]),
                targets, inverse_temperature, offset, bias,
                None if kept is None else TensorDescriptor.from_tensor(kept, [tiling.rows, tiling.columns // tiling.parts]),
                sums, n, vocabulary, width, row_tiles, column_tiles, programs, **options,
            )  # fmt: skip
        else:
            _pointer_kernel[(row_tiles * column_tiles,)](
                hidden, weight, targets, inverse_temperature, offset, bias, kept, sums, n, vocabulary, columns, width,
                row_tiles, column_tiles, hidden.stride(0), weight.stride(0), 0 if kept is None else kept.stride(0), **options,
            )  # fmt: skip
    others, weighted = sums.sum(1)
    return others, weighted


def _describable(t: Tensor) -> bool:
    """Whether the hardware's tensor maps can have it: 16-byte steps between rows that do not overlap."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(0) >= t.shape[1] and t.stride(1) == 1


def _vectorised(t: Tensor) -> bool:
    """Whether Triton loads it 16 bytes at a time: it tells multiples of 16 elements from all others, and nothing in between."""
    return t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 and t.shape[1] % 16 == 0 and t.stride(1) == 1
