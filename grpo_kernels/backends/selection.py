"""Which backend runs: the one rule, and why the others do not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from grpo_kernels.backends import cpu, triton
from grpo_kernels.backends.base import Backend
from grpo_kernels.backends.cpu import CPUBackend
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.backends.triton import TritonBackend

BackendName = Literal["auto", "torch", "cpu", "triton"]
BACKEND_NAMES: tuple[str, ...] = get_args(BackendName)


@dataclass(frozen=True)
class BackendStatus:
    """`reason` says why it is not available, or what it is used for."""

    name: str
    available: bool
    reason: str


def backend_statuses() -> list[BackendStatus]:
    """Every backend on this machine, the preferred first."""
    if cpu.import_error is None:
        best = CPUBackend.instruction_sets()[0]
        compiled = BackendStatus("cpu", True, f"used for CPU tensors; instruction set {best}")
    else:
        hint = "reinstall with a C++17 compiler on PATH (pip install --force-reinstall --no-deps .)"
        if os.environ.get("GRPO_KERNELS_SKIP_EXT") == "1":
            hint = "unset GRPO_KERNELS_SKIP_EXT and reinstall"
        compiled = BackendStatus("cpu", False, f"the compiled module cannot be imported ({cpu.import_error}); {hint}")
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    reason = triton.unavailable(gpu or torch.device("cpu"))
    if gpu is None and reason is None:
        reason = "used where it is asked for, in Triton's interpreter (TRITON_INTERPRET=1)"
    kernels = BackendStatus("triton", gpu is not None and reason is None, reason or "used for tensors on NVIDIA GPUs")
    rest = [status.name for status in (compiled, kernels) if status.available]
    use = {(): "all tensors", ("cpu",): "GPU tensors", ("triton",): "CPU tensors"}.get(tuple(rest), "float64 tensors on a GPU")
    return [compiled, kernels, BackendStatus("torch", True, f"used for {use}")]


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend called `name`. "auto" takes the compiled one for CPU tensors and Triton's for an NVIDIA GPU's, where they are available,
    torch otherwise.

    Raises:
        ValueError: an unknown name, or a backend that cannot run on `device` or on this machine; says why.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}; it must be one of {', '.join(BACKEND_NAMES)}")
    if name == "auto":
        name = _automatic(device)
    if name == "torch":
        return TorchBackend(device)
    if name == "triton":
        reason = triton.unavailable(device)
        if reason is not None:
            raise ValueError(f"backend 'triton' is not available: {reason}")
        return TritonBackend(device)
    if device.type != "cpu":
        raise ValueError(f"backend 'cpu' was asked for, but the tensors are on {device}; use 'auto', 'triton' or 'torch'")
    if cpu.import_error is not None:
        raise ValueError(f"backend 'cpu' is not available: {backend_statuses()[0].reason}")
    return CPUBackend()


def _automatic(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu" if cpu.import_error is None else "torch"
    return "triton" if device.type == "cuda" and triton.unavailable(device) is None else "torch"
