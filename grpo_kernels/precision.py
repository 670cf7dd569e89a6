"""Matrix products at full precision, whatever the process is set to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Float32 products as float32: no autocast, no TF32 or bf16 passes whatever the caller's matmul precision settings say. And bfloat16
    ones summed in float32 throughout: torch by default lets a split product add its parts in bfloat16."""
    with torch.autocast(device.type, enabled=False), _PRECISION:
        yield


@dataclass(frozen=True)
class _Precisions:
    """The process's matmul settings: of the old interface (None where torch refuses to read it, because only the new one was used), of the
    new one where there is one, and whether bfloat16 products may be reduced in bfloat16, with, where torch has that, whether they may be
    split."""

    legacy: str | None
    current: tuple[str, ...]
    reduced: bool | tuple[bool, bool]

    @classmethod
    def now(cls) -> _Precisions:
        try:
            legacy = torch.get_float32_matmul_precision()
        except RuntimeError:
            legacy = None
        matmul = torch.backends.cuda.matmul
        reduced = matmul.allow_bf16_reduced_precision_reduction
        split = getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None)
        return cls(legacy, tuple(m.fp32_precision for m in _modules()), reduced if split is None else (reduced, split))

    def make_highest(self) -> None:
        # Through the old interface, which sets the new one too: set alone, that would contradict an old "high", and cuBLAS then refuses.
        torch.set_float32_matmul_precision("highest")
        reduced = self.reduced
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, reduced[1]) if isinstance(reduced, tuple) else False

    def restore(self) -> None:
        if self.legacy is not None:
            torch.set_float32_matmul_precision(self.legacy)
        for module, precision in zip(_modules(), self.current, strict=True):
            module.fp32_precision = precision
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.reduced


def _modules() -> list[Any]:
    modules = [getattr(module, "matmul", None) for module in (torch.backends.cuda, torch.backends.mkldnn)]
    return modules if all(hasattr(module, "fp32_precision") for module in modules) else []


class _FullPrecision:
    """The settings at their highest while any thread is inside; the last one out puts them back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: _Precisions | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = _Precisions.now()
                self._before.make_highest()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._before is not None:
                self._before.restore()


_PRECISION = _FullPrecision()
