"""What the kernels and launchers share: the interpreter's workarounds, and what is known of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.softmax import MAX_DISTANCE, MIN_DISTANCE

# TRITON_INTERPRET=1, read when a kernel is defined: kernels then run in Python on CPU tensors, one program after another.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FLOAT, DOUBLE_TOO, INDEX = (torch.float32,), (torch.float32, torch.float64), (torch.int64,)  # what launchers `expect`
# Of every launch: a b + c may be one rounding. Triton 3.9 warns where it is not said, and 3.10 has another default.
FUSED = {"enable_fp_fusion": True}
NEAR, FAR = tl.constexpr(MAX_DISTANCE), tl.constexpr(MIN_DISTANCE)  # between which distances x - o are held
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """float32 `x` as it is stored in `dtype`, rounded to nearest even. The interpreter's own bfloat16 conversion truncates, and is wrong
    for subnormal numbers (Triton 3.9): it gets what it need not round."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(dtype)


@triton.jit
def multiplicand(x):
    """A loaded tile as `tl.dot` takes it. The interpreter's product of bfloat16 tiles is wrong by orders of magnitude (Triton 3.9)."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@dataclass(frozen=True)
class Target:
    """A GPU as far as launchers choose by it. capability: such as 90 for sm_90."""

    capability: int
    multiprocessors: int


# sm_80: A100; sm_90: H100; sm_100: B200. Only for compiling without a GPU, see `assuming`.
TARGETS = {80: Target(80, 108), 90: Target(90, 132), 100: Target(100, 148)}
_INTERPRETER = Target(90, 3)  # few multiprocessors, so that a persistent kernel's programs have several tiles each

_assumed: list[Target] = []
_known: dict[torch.device, Target] = {}


def target_of(device: torch.device) -> Target:
    if _assumed:
        return _assumed[-1]
    if device.type != "cuda":
        return _INTERPRETER
    if device not in _known:
        properties = torch.cuda.get_device_properties(device)
        _known[device] = Target(10 * properties.major + properties.minor, properties.multi_processor_count)
    return _known[device]


def expect(like: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    """A kernel believes its pointers: each of the tensors that is there must be contiguous, of this shape, of one of these dtypes, and on
    the device of `like`.

    Raises:
        ValueError: naming the tensor, what it is and what it must be.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != like.device or not tensor.is_contiguous():
            raise ValueError(
                f"a Triton kernel got {name} of {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
                f"it takes {' or '.join(map(str, dtypes))} {tuple(shape)}, contiguous, on {like.device}"
            )


@contextmanager
def assuming(target: Target) -> Iterator[None]:
    """Launchers choose as on `target`, whatever is there: for compiling ahead of time, with no GPU."""
    _assumed.append(target)
    try:
        yield
    finally:
        _assumed.pop()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
