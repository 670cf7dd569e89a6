"""The compiled CPU module: every instruction set this machine has, odd sizes, threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from grpo_kernels.backends import cpu
from grpo_kernels.backends.cpu import CPUBackend
from grpo_kernels.backends.torch import TorchBackend


def test_the_module_was_built_where_there_is_a_compiler() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine, so no compiled module")
    assert cpu.import_error is None, cpu.import_error


@pytest.mark.skipif(cpu.import_error is not None, reason="no compiled module")
@pytest.mark.parametrize("instruction_set", CPUBackend.instruction_sets())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (31, 3), (33, 64), (1024, 320), (700, 263)])
def test_tile_against_float64(instruction_set: str, threads: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    storage = torch.randn(rows, cols + 5, generator=generator) * 8
    tile, before = storage[:, :cols], storage.clone()
    offset = torch.randn(cols, generator=generator)
    targets = torch.randint(-rows, 2 * rows, (cols,), generator=generator) + 100  # some inside this tile, some not
    sums, weighted = torch.ones(cols, dtype=torch.float64), torch.full((cols,), 2.0, dtype=torch.float64)
    saved = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        CPUBackend(instruction_set)._exponentiate(tile, 0.7, offset, targets, 100, sums, weighted)
    finally:
        torch.set_num_threads(saved)
    difference = before[:, :cols].double() * 0.7 - offset.double()
    exact = difference.exp()
    own = torch.arange(rows)[:, None] + 100 == targets
    exact[own] = 0.0
    assert torch.allclose(tile.double(), exact, rtol=5e-6, atol=1e-30)  # d itself carries a rounding of |logit| * 6e-8
    assert torch.allclose(sums, 1 + exact.sum(0), rtol=2e-6)
    assert torch.allclose(weighted, 2 + torch.where(own, 0.0, exact * difference).sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(storage[:, cols:], before[:, cols:]), "wrote beyond its columns"


@pytest.mark.skipif(cpu.import_error is not None, reason="no compiled module")
@pytest.mark.parametrize("instruction_set", CPUBackend.instruction_sets())
def test_extreme_logits(instruction_set: str) -> None:
    """Overflow becomes infinity (the caller redoes the row), NaN stays NaN, very negative logits vanish."""
    tile = torch.zeros(8, 16)
    tile[:, 0], tile[:, 1], tile[3, 2], tile[:, 3] = 1e4, -1e4, float("nan"), float("-inf")
    sums, weighted = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    CPUBackend(instruction_set)._exponentiate(tile, 1.0, torch.zeros(16), torch.full((16,), 99), 0, sums, weighted)
    assert sums[0] > 1e38
    assert 0 <= sums[1] < 1e-36
    assert sums[2].isnan()
    assert 0 <= sums[3] < 1e-36
    assert torch.equal(sums[4:], torch.full((12,), 8.0, dtype=torch.float64))


@pytest.mark.skipif(cpu.import_error is not None, reason="no compiled module")
def test_exp_is_accurate_over_its_range() -> None:
    x = torch.linspace(-87.2, 87.9, 200_000).view(-1, 8).contiguous()
    tile = x.clone()
    sums, weighted = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    CPUBackend()._exponentiate(tile, 1.0, torch.zeros(8), torch.full((8,), 10**9), 0, sums, weighted)
    exact = x.double().exp()
    assert float(((tile.double() - exact) / exact).abs().max()) < 2e-7


@pytest.mark.skipif(cpu.import_error is not None, reason="no compiled module")
def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="not available on this machine: mmx"):
        CPUBackend("mmx")._exponentiate(
            torch.zeros(2, 2), 1.0, torch.zeros(2), torch.zeros(2, dtype=torch.long), 0, *torch.zeros(2, 2).double()
        )


class Arguments(ctypes.Structure):
    """`AnchoredTile` of csrc/cpu/anchored_tile.h."""

    _fields_ = [
        ("tile", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride", "first_row")),
        ("inverse_temperature", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("offset", "targets", "sum", "weighted_sum")),
    ]


def test_sixteen_lanes_without_avx512(tmp_path: Path) -> None:
    """The AVX-512 build's text (16 floats per vector) compiled for whatever this machine has, where it may have no AVX-512 itself."""
    compiler = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "wide.cpp"
    source.write_text(
        '#define GRPO_KERNEL anchored_tile_generic\n#define GRPO_LANES 16\n#include "anchored_tile_kernel.h"\n'
        'extern "C" void run(const grpo::AnchoredTile* a) { grpo::anchored_tile_generic(*a, 0, a->cols); }\n'
    )
    library = tmp_path / "wide.so"
    include = Path(__file__).parents[1] / "csrc" / "cpu"
    command = [compiler, "-std=gnu++17", "-O2", "-Wno-psabi", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    rows, cols = 70, 16 * 4 + 16 + 3
    tile, offset, targets = torch.randn(rows, cols) * 5, torch.randn(cols), torch.randint(0, rows, (cols,))
    theirs, sums, weighted = tile.clone(), torch.zeros(cols, dtype=torch.float64), torch.zeros(cols, dtype=torch.float64)
    TorchBackend(torch.device("cpu"))._exponentiate(theirs, 1.3, offset, targets, 0, sums, weighted)
    ours, my_sums, my_weighted = tile.clone(), torch.zeros_like(sums), torch.zeros_like(sums)
    pointers = [t.data_ptr() for t in (offset, targets, my_sums, my_weighted)]
    ctypes.CDLL(str(library)).run(ctypes.byref(Arguments(ours.data_ptr(), rows, cols, cols, 0, 1.3, *pointers)))
    for mine, other in ((ours, theirs), (my_sums, sums), (my_weighted, weighted)):
        assert torch.allclose(mine, other, rtol=3e-6, atol=1e-6)


def test_the_compiled_and_the_torch_tile_agree() -> None:
    if cpu.import_error is not None:
        pytest.skip("no compiled module")
    tile, offset, targets = torch.randn(100, 37) * 5, torch.randn(37), torch.randint(0, 100, (37,))
    results = []
    for backend in (CPUBackend(), TorchBackend(torch.device("cpu"))):
        mine, sums, weighted = tile.clone(), torch.zeros(37, dtype=torch.float64), torch.zeros(37, dtype=torch.float64)
        backend._exponentiate(mine, 1.3, offset, targets, 0, sums, weighted)
        results.append((mine, sums, weighted))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=3e-6, atol=1e-6)
