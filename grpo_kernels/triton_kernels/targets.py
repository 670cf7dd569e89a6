"""What the rows of a chunk need of their targets' rows of the weight, W_y: <h, W_y> before the first product, and the gradient of h after
the second. One read of each; in torch W_y would be gathered into memory, in float32, first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.triton_kernels.runtime import DOUBLE_TOO, FLOAT, FUSED, INDEX, expect, on

_OPTIONS = {"BLOCK": 1024, "num_warps": 4, **FUSED}


# Slices of common buffers: aligned for some numbers of rows only, which are not to make variants.
_PER_ROW = ["targets", "out", "others", "scales"]


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _target_products_kernel(
    hidden, weight, targets, bias, out, width, hidden_stride, hidden_step, weight_stride, weight_step, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    product = tl.zeros((), tl.float64)
    if target >= 0:
        total = tl.zeros([BLOCK], tl.float64)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            h = tl.load(hidden + row * hidden_stride + at * hidden_step, mask=at < width, other=0.0).to(tl.float32)
            w = tl.load(weight + target * weight_stride + at * weight_step, mask=at < width, other=0.0).to(tl.float32)
            total += (h * w).to(tl.float64)
        product = tl.sum(total)
        if bias is not None:
            product += tl.load(bias + target).to(tl.float64)
    tl.store(out + row, product)


def target_products(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    """<h, W_y> + bias_y, [n] float64, of products in float32; 0 where the target is -1.

    Args:
        hidden: [n, H], any float dtype but float64, any strides. weight: [V, H], of any dtype and strides as well.
        targets: [n] int64. bias: [V] contiguous, or None.
    """
    expect(hidden, hidden.shape[:1], INDEX, targets=targets)
    expect(hidden, weight.shape[:1], (torch.float16, torch.bfloat16, *DOUBLE_TOO), bias=bias)
    out = torch.empty(hidden.shape[0], dtype=torch.float64, device=hidden.device)
    if hidden.shape[0]:
        with on(hidden.device):
            _target_products_kernel[(hidden.shape[0],)](
                hidden, weight, targets, bias, out, hidden.shape[1], hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
                **_OPTIONS,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _hidden_gradient_kernel(weighted_rows, weight, targets, others, scales, width, weight_stride, weight_step, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    other = tl.load(others + row)
    scale = tl.load(scales + row)
    there = tl.where(target >= 0, width, 0)  # a target elsewhere is not read: 0 * NaN is NaN
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = weighted_rows + row * width + at
        x = tl.load(place, mask=at < width, other=0.0)
        w = tl.load(weight + target * weight_stride + at * weight_step, mask=at < there, other=0.0).to(tl.float32)
        tl.store(place, scale * (x - other * w), mask=at < width)


def hidden_gradient(weighted_rows: Tensor, weight: Tensor, targets: Tensor, others: Tensor, scale: Tensor) -> Tensor:
    """scale (sum over j != y of E_j W_j - others W_y), [n, H] float32, over `weighted_rows`, which holds the sum.

    Args:
        weighted_rows: [n, H] float32, contiguous. weight: [V, H], any float dtype but float64, any strides.
        targets: [n] int64, -1: another process has the target's row. others, scale: [n] float32.
    """
    expect(weighted_rows, (weighted_rows.shape[0], weight.shape[1]), FLOAT, weighted_rows=weighted_rows)
    expect(weighted_rows, weighted_rows.shape[:1], INDEX, targets=targets)
    expect(weighted_rows, weighted_rows.shape[:1], FLOAT, others=others, scale=scale)
    if weighted_rows.shape[0]:
        with on(weighted_rows.device):
            _hidden_gradient_kernel[(weighted_rows.shape[0],)](
                weighted_rows, weight, targets, others, scale, weight.shape[1], weight.stride(0), weight.stride(1), **_OPTIONS
            )
    return weighted_rows
