"""Which backend runs: the one rule, and why the others do not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from grpo_kernels.backends import cpu
from grpo_kernels.backends.base import Backend
from grpo_kernels.backends.cpu import CPUBackend
from grpo_kernels.backends.torch import TorchBackend

BackendName = Literal["auto", "torch", "cpu"]
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
    use = "used for GPU tensors" if compiled.available else "used for all tensors"
    return [compiled, BackendStatus("torch", True, use)]


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend called `name`; "auto" takes the compiled one for CPU tensors where it was built, torch otherwise.

    Raises:
        ValueError: an unknown name, or a backend that cannot run on `device` or on this machine; says why.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}; it must be one of {', '.join(BACKEND_NAMES)}")
    if name == "auto":
        name = "cpu" if device.type == "cpu" and cpu.import_error is None else "torch"
    if name == "torch":
        return TorchBackend(device)
    if device.type != "cpu":
        raise ValueError(f"backend 'cpu' was asked for, but the tensors are on {device}; use 'auto' or 'torch'")
    if cpu.import_error is not None:
        raise ValueError(f"backend 'cpu' is not available: {backend_statuses()[0].reason}")
    return CPUBackend()
