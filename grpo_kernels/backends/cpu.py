"""The compiled CPU backend: torch's GEMMs, and one fused kernel per tile between them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import ChunkRows, LogitSlopes, Sweep
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
        if tile.dtype != torch.float32:
            super()._anchor(tile, begin, bias, softcap, rows, offset, result, keep_distances=keep_distances)
            return
        height, columns = tile.shape
        _check_pointer("tile", tile, torch.float32, (height, columns))
        if bias is not None:
            _check_pointer("bias", bias, torch.float32, (height,))
        for name, tensor, dtype in (
            ("inverse_temperature", rows.inverse_temperature, torch.float32),
            ("offset", offset, torch.float32),
            ("targets", rows.targets, torch.int64),
            ("others", result.others, torch.float64),
            ("weighted", result.weighted, torch.float64),
        ):
            _check_pointer(name, tensor, dtype, (columns,))
        _native.anchored_tile(
            tile=tile.data_ptr(),
            rows=height,
            cols=columns,
            stride=tile.stride(0),
            first_row=begin,
            bias=0 if bias is None else bias.data_ptr(),
            softcap=softcap or 0.0,
            keep_distances=keep_distances,
            inverse_temperature=rows.inverse_temperature.data_ptr(),
            offset=offset.data_ptr(),
            targets=rows.targets.data_ptr(),
            sum=result.others.data_ptr(),
            weighted_sum=result.weighted.data_ptr(),
            threads=torch.get_num_threads(),
            instruction_set=self._instruction_set,
        )

    def _differentiate(self, tile: Tensor, softcap: float | None, rows: ChunkRows, slopes: LogitSlopes) -> None:
        if tile.dtype != torch.float32:
            super()._differentiate(tile, softcap, rows, slopes)
            return
        height, columns = tile.shape
        _check_pointer("tile", tile, torch.float32, (height, columns))
        arguments = {
            "inverse_temperature": rows.inverse_temperature,
            "offset": slopes.offset,
            "log_total": slopes.log_total,
            "slope": slopes.slope,
            "entropy_slope": slopes.entropy_slope,
        }
        for name, tensor in arguments.items():
            _check_pointer(name, tensor, torch.float32, (columns,))
        _native.logit_gradient(
            tile=tile.data_ptr(),
            rows=height,
            cols=columns,
            stride=tile.stride(0),
            softcap=softcap or 0.0,
            threads=torch.get_num_threads(),
            instruction_set=self._instruction_set,
            **{name: tensor.data_ptr() for name, tensor in arguments.items()},
        )


def _check_pointer(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The kernels believe their pointers: what they read and write is checked here, also under python -O."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.shape != shape or not dense:
        raise ValueError(
            f"a CPU kernel got {name} of {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it takes {dtype} {shape}, dense in its last dimension, on the CPU"
        )
