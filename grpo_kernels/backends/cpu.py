"""The compiled CPU backend: torch's GEMMs, and one fused kernel per tile for exponentials and both row sums."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.torch import TorchBackend

try:
    _native: Any = importlib.import_module("grpo_kernels._native")
    import_error: str | None = None
except ImportError as error:
    _native, import_error = None, str(error)


class CPUBackend(TorchBackend):
    name = "cpu"

    def __init__(self, instruction_set: str | None = None) -> None:
        """`instruction_set`: one of `instruction_sets()`; None takes the best that this machine has."""
        if _native is None:
            raise RuntimeError(f"the compiled module is not there ({import_error})")
        super().__init__(torch.device("cpu"))
        self._instruction_set = instruction_set

    @staticmethod
    def instruction_sets() -> list[str]:
        """What this machine can run, best first; empty without the compiled module."""
        return [] if _native is None else _native.supported_instruction_sets()

    def _exponentiate(
        self, tile: Tensor, inverse_temperature: float, offset: Tensor, targets: Tensor, begin: int, sums: Tensor, weighted: Tensor
    ) -> None:
        if tile.dtype != torch.float32:
            super()._exponentiate(tile, inverse_temperature, offset, targets, begin, sums, weighted)
            return
        _check_pointers(tile, offset, targets, sums, weighted)
        _native.anchored_tile(
            tile=tile.data_ptr(),
            rows=tile.shape[0],
            cols=tile.shape[1],
            stride=tile.stride(0),
            first_row=begin,
            inverse_temperature=inverse_temperature,
            offset=offset.data_ptr(),
            targets=targets.data_ptr(),
            sum=sums.data_ptr(),
            weighted_sum=weighted.data_ptr(),
            threads=torch.get_num_threads(),
            instruction_set=self._instruction_set,
        )


def _check_pointers(tile: Tensor, offset: Tensor, targets: Tensor, sums: Tensor, weighted: Tensor) -> None:
    """The kernel believes its pointers: what it reads and writes is checked here, also under python -O."""
    columns = tile.shape[1:]
    expected = ((tile, torch.float32, tile.shape), (offset, torch.float32, columns), (targets, torch.int64, columns))
    for tensor, dtype, shape in (*expected, (sums, torch.float64, columns), (weighted, torch.float64, columns)):
        dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
        if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.shape != shape or not dense:
            raise ValueError(
                f"anchored_tile got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
                f"it takes {dtype} {tuple(shape)}, dense in its last dimension, on the CPU"
            )
