"""A gradient times the upstream scalar, which nearly always is 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.triton_kernels.runtime import FUSED, on, stored

_BLOCK = 4096


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["factor"])
def _scale_kernel(source, out, factor, size, length, outer_stride, inner_stride, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    # The host would have to wait for the device to look at it: every program looks, and nearly always ends here.
    if (not IN_PLACE) or scale != 1.0:
        blocks = tl.cdiv(size, BLOCK)
        row = (tl.program_id(0) // blocks).to(tl.int64)
        at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        start = row // length * outer_stride + row % length * inner_stride
        x = tl.load(source + start + at, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(out + (start if IN_PLACE else row * size) + at, stored(x, out.dtype.element_ty), mask=inside)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """`gradient * factor` in `dtype`, the product in float32; one read and one write, and none where nothing would change.

    Args:
        gradient: of any float dtype but float64; contiguous, or [rows, V] or [batch, length, V] with last stride 1.
        factor: a scalar on its device.
        in_place: the gradient may be overwritten, and is where it has that dtype.
    """
    in_place = in_place and gradient.dtype == dtype
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    if gradient.numel():
        view = gradient.view(1, 1, -1) if gradient.is_contiguous() else gradient[None] if gradient.dim() == 2 else gradient
        batch, length, size = view.shape
        with on(gradient.device):
            _scale_kernel[(batch * length * triton.cdiv(size, _BLOCK),)](
                gradient, out, factor, size, length, view.stride(0), view.stride(1), IN_PLACE=in_place, BLOCK=_BLOCK, num_warps=8, **FUSED
            )
    return out
