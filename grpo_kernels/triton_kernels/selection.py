"""How the first product and its softmax are made on a GPU: by the library's GEMM and a row kernel, or by the anchored GEMM.

    library     float32 products from cuBLAS, 4 bytes per logit; a kernel then reads them and writes exponentials, 4 + 2 bytes per logit
    anchored    our own GEMM writes the exponentials, 2 bytes per logit, at a lower rate than cuBLAS

The first costs time by the bandwidth and the second by the arithmetic, in proportion to the width H, so the narrow heads go to the second.
Both give the same result up to rounding. In order: the environment variable GRPO_KERNELS_GEMM1, what `tune` measured on this machine, the
table, the rule. Nothing is measured unless `tune` is called: a choice that changed between runs would change their last digits.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
import triton

from grpo_kernels.cache import cache_folder

FirstProduct = Literal["library", "anchored"]

OVERRIDE = "GRPO_KERNELS_GEMM1"

# A part of the device's name -> the width from which on the library wins. Predicted by the model in docs/gpu.md, which has our GEMM at 85 %
# of cuBLAS' rate, until they are measured.
LIBRARY_FROM = {"A100": 2200, "H100": 4100, "H200": 2900}
LIBRARY_FROM_ELSEWHERE = 4096


def first_product(device: torch.device, width: int, vocabulary: int, *, stores: bool = True) -> FirstProduct:
    """Which one for a head [vocabulary, width] on `device`. Not `stores`: only sums are wanted, and the anchored GEMM needs no memory.

    Raises:
        ValueError: the environment variable holds something else.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        if override not in get_args(FirstProduct):
            raise ValueError(f"{OVERRIDE} is {override!r}; it must be one of {', '.join(get_args(FirstProduct))}")
        return override  # type: ignore[return-value]  # checked above
    if not stores:
        return "anchored"
    measured = _tuned().get(_key(device, width, vocabulary))
    if measured is not None:
        return measured
    known = (width_ for name, width_ in LIBRARY_FROM.items() if name in _name(device))
    return "library" if width >= next(known, LIBRARY_FROM_ELSEWHERE) else "anchored"


def cache_file() -> Path:
    """Where `tune` keeps what it measured."""
    return cache_folder() / "first_product.json"


def remember(device: torch.device, width: int, vocabulary: int, choice: FirstProduct) -> None:
    """Adds to the file, which is replaced as a whole: a reader or a killed process never sees half of it.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_read(path), _key(device, width, vocabulary): choice}
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        new.write_text(json.dumps(entries, indent=1, sort_keys=True))
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    _tuned.cache_clear()


@cache
def _tuned() -> dict[str, FirstProduct]:
    try:
        return _read(cache_file())
    except RuntimeError:  # of Path.home(): there is none
        return {}


def _read(path: Path) -> dict[str, FirstProduct]:
    """A file that cannot be read, or says something else, is as good as none."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    known = get_args(FirstProduct)
    return {key: value for key, value in entries.items() if value in known} if isinstance(entries, dict) else {}


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


def _key(device: torch.device, width: int, vocabulary: int) -> str:
    return f"{_name(device)}; torch {torch.__version__}; triton {triton.__version__}; H={width} V={vocabulary}"
