"""Every Triton kernel compiled for an A100, an H100 and a B200 on a machine without a GPU, with the attributes that real calls have.

    python benchmarks/compiled_kernels.py             # prints the table
    python benchmarks/compiled_kernels.py --update    # writes docs/compiled_kernels.md
    python benchmarks/compiled_kernels.py --check     # says that all is as in the file, or names every cell that differs and exits with 1

All three compile every case (in Triton's usual cache, whose keys are the sources and the compiler's version), and exit with 1 if a kernel
is out of bounds, see `violations`. The launchers themselves run, on CPU tensors of real sizes that nobody touches: so dtypes, divisibility
and alignment are those of real calls. Only `JITFunction.run` is replaced: it compiles, and does not launch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from grpo_kernels import Objective
from grpo_kernels.token_batch import TokenBatch
from grpo_kernels.triton_kernels.advantages import group_advantages_of
from grpo_kernels.triton_kernels.anchored_gemm import anchored_products
from grpo_kernels.triton_kernels.objective import token_objective
from grpo_kernels.triton_kernels.rows import anchor_rows, products_gradient, row_gradient, row_loss, row_statistics
from grpo_kernels.triton_kernels.runtime import INTERPRETED, TARGETS, assuming
from grpo_kernels.triton_kernels.scaling import scaled
from grpo_kernels.triton_kernels.targets import hidden_gradient, target_products

FILE = Path(__file__).parents[1] / "docs" / "compiled_kernels.md"
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may use
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# 256 bits: on a B200 only. LDGSTS (cp.async) loads to shared memory.
WIDE_LOADS, WIDE_STORES = "LDG.128", "STG.128"
INSTRUCTIONS = {
    WIDE_LOADS: r"\bLDG(STS)?\.\S*\.(128|256)\b",
    WIDE_STORES: r"\bSTG\.\S*\.(128|256)\b",
    "UTMALDG": r"\bUTMALDG\b",
    "UTMASTG": r"\bUTMASTG\b",
    "LDL": r"\bLDL\b",
    "STL": r"\bSTL\b",
    **{name: rf"\b{name}\b" for name in TENSOR_CORES.values()},
}
TENSOR_MEMORY = 512  # columns, on a B200


@dataclass(frozen=True)
class Case:
    """A call of a launcher. needs: the instructions that its kernels must have, beside the tensor cores' where they multiply tiles."""

    launcher: str
    inputs: str
    call: Callable[[], object]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel of a case. counts: by the names in INSTRUCTIONS. tensor_memory: in columns."""

    case: tuple[str, str]
    kernel: str
    capability: int
    grid: tuple[int, ...]
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    tensor_memory: int
    multiplies: bool
    counts: dict[str, int]

    def __str__(self) -> str:
        return f"{', '.join(self.case)}: {self.kernel} on sm_{self.capability}"


# Columns of the table: how a cell is made and what the page says of it. The first four name the row.
COLUMNS: dict[str, tuple[Callable[[Compiled], object], str]] = {
    "launcher": (lambda c: c.case[0], "the function of `grpo_kernels.triton_kernels` that was called"),
    "case": (lambda c: c.case[1], "its inputs"),
    "kernel": (lambda c: c.kernel, "a kernel that it launched"),
    "sm": (lambda c: c.capability, "compute capability: 80 is an A100, 90 an H100, 100 a B200"),
    "programs": (lambda c: "x".join(map(str, c.grid)), "the grid"),
    "warps": (lambda c: c.warps, "of one program, 32 threads each"),
    "stages": (lambda c: c.stages, "of the software pipeline, where the kernel has one"),
    "registers": (lambda c: c.registers, "of a thread, at most 255"),
    "stack": (lambda c: c.stack, "bytes of a thread's stack; must be 0"),
    "spills": (lambda c: c.counts["LDL"] + c.counts["STL"], "LDL and STL instructions, the traffic of spilled registers; must be 0"),
    "shared": (
        lambda c: c.shared,
        f"bytes of shared memory of a program; at most {', '.join(f'{limit} on sm_{sm}' for sm, limit in SHARED_MEMORY.items())}",
    ),
    "tensor cores": (
        lambda c: f"{c.counts[TENSOR_CORES[c.capability]]} {TENSOR_CORES[c.capability]}" if c.multiplies else "",
        "their instructions, in kernels that multiply tiles; a newer GPU's do more each",
    ),
    "UTMALDG": (lambda c: c.counts["UTMALDG"], "loads of tiles by the tensor memory accelerator (TMA)"),
    "UTMASTG": (lambda c: c.counts["UTMASTG"], "stores of tiles by it"),
    WIDE_LOADS: (lambda c: c.counts[WIDE_LOADS], "loads of 16 bytes a thread; LDGSTS (cp.async) and loads of 32 bytes included"),
    WIDE_STORES: (lambda c: c.counts[WIDE_STORES], "stores of 16 bytes a thread; stores of 32 bytes included"),
}  # fmt: skip
NAMING = 4
Table = dict[tuple[str, ...], dict[str, str]]  # the naming cells -> column -> cell


# The calls. A case's tensors are made when it runs; memory that is never touched costs nothing.
N, WIDTH, VOCABULARY = 4096, 4096, 151936  # of Qwen3-8B; a multiple of 64


# Tensors of one element per row are slices of common buffers, as in a learner's step: not all aligned, unless n is a multiple of 4.
def float32(*shape: int) -> Tensor:
    return torch.empty(shape)


def bfloat16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def float64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def int64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def statistics_of(logits: Tensor) -> None:
    slots, targets = int64(2, len(logits))
    row_statistics(logits, slots, targets, float32(len(logits)))


def gradient_of(logits: Tensor) -> None:
    slots, targets = int64(2, len(logits))
    inverse, slope, entropy_slope = float32(3, len(logits))
    row_gradient(logits, slots, targets, inverse, float32(5, len(logits)), slope, entropy_slope, logits)


def loss_of(logits: Tensor, objective: Objective) -> None:
    slots, targets = int64(2, len(logits))
    inverse, advantages, weight, old, ref = float32(5, len(logits))
    shares, bonus = float64(2, len(logits))
    row_loss(
        logits, slots, targets, inverse, objective, advantages=advantages, policy_weight=weight, old_logprobs=old, ref_logprobs=ref,
        entropy_threshold=None, shares=shares, bonus=bonus, out=logits,
    )  # fmt: skip


def anchor(n: int, store: torch.dtype | None) -> None:
    inverse, offset = float32(2, n)
    anchor_rows(float32(n, VOCABULARY), VOCABULARY, int64(n), inverse, offset, bias=None, softcap=None, store=store)


def slopes_of_products(n: int, softcap: float | None) -> None:
    rows = float32(6, n)
    products_gradient(float32(n, VOCABULARY), VOCABULARY, int64(n), *rows, bias=None, softcap=softcap, store=torch.bfloat16)


def products_of(n: int, width: int, vocabulary: int, *, stored: bool, bias: bool = False) -> None:
    kept = bfloat16(n, -(-vocabulary // 64) * 64) if stored else None
    inverse, offset = float32(2, n)
    hidden, weight = bfloat16(n, width), bfloat16(vocabulary, width)
    anchored_products(hidden, weight, int64(n), inverse, offset, bfloat16(vocabulary) if bias else None, kept)


def at_targets(n: int) -> None:
    target_products(bfloat16(n, WIDTH), bfloat16(VOCABULARY, WIDTH), int64(n), None)


def gradient_of_hidden(n: int) -> None:
    others, scale = float32(2, n)
    hidden_gradient(float32(n, WIDTH), bfloat16(VOCABULARY, WIDTH), int64(n), others, scale)


def scale(dtype: torch.dtype) -> None:
    scaled(float32(VOCABULARY, WIDTH), float32(), dtype, in_place=True)


def advantages(n: int, size: int) -> None:
    group_advantages_of(float32(n), size, scale="group", leave_one_out=False, eps=1e-4, noise=1e-6)


def tokens(n: int, objective: Objective) -> None:
    logprobs, old, ref, advantages, entropy, weight = (float32(n) for _ in range(6))
    batch = TokenBatch(logprobs, old, ref, None, advantages, entropy, int64(n), float32(8), weight)
    token_objective(objective, batch, float64(n))


def cases(n: int = N) -> list[Case]:
    """With n rows, where a launcher takes rows."""
    dapo = Objective.dapo(kl="k3", kl_coef=0.01)
    loads, both = (WIDE_LOADS,), (WIDE_LOADS, WIDE_STORES)
    return [
        Case("row_statistics", "bf16, V 151936", lambda: statistics_of(bfloat16(n, VOCABULARY)), loads),
        Case("row_statistics", "float32, V 151936", lambda: statistics_of(float32(n, VOCABULARY)), loads),
        Case("row_gradient", "bf16 in place, V 151936", lambda: gradient_of(bfloat16(n, VOCABULARY)), both),
        Case("row_loss", "bf16 in place, V 151936, DAPO with KL", lambda: loss_of(bfloat16(n, VOCABULARY), dapo), both),
        Case("row_loss", "float32 in place, V 151936, DAPO with KL", lambda: loss_of(float32(n, VOCABULARY), dapo), both),
        Case("anchor_rows", "V 151936, stored in bf16", lambda: anchor(n, torch.bfloat16), both),
        Case("anchor_rows", "V 151936, sums only", lambda: anchor(n, None), loads),
        Case("products_gradient", "V 151936, stored in bf16", lambda: slopes_of_products(n, None), both),
        Case("products_gradient", "V 151936, stored in bf16, softcap", lambda: slopes_of_products(n, 30.0), both),
        Case("anchored_products", "H 4096, V 151936, stored", lambda: products_of(n, WIDTH, VOCABULARY, stored=True)),
        Case("anchored_products", "H 4096, V 151936, stored, bias", lambda: products_of(n, WIDTH, VOCABULARY, stored=True, bias=True)),
        Case("anchored_products", "H 4096, V 151936, sums only", lambda: products_of(n, WIDTH, VOCABULARY, stored=False)),
        Case("anchored_products", "H 100, V 50257, stored", lambda: products_of(n, 100, 50257, stored=True)),
        Case("target_products", "bf16, H 4096", lambda: at_targets(n), loads),
        Case("hidden_gradient", "bf16, H 4096", lambda: gradient_of_hidden(n), both),
        Case("scaled", "float32 in place, 151936 x 4096", lambda: scale(torch.float32), both),
        Case("scaled", "float32 to bf16, 151936 x 4096", lambda: scale(torch.bfloat16), both),
        Case("token_objective", "n 32768, DAPO with KL", lambda: tokens(32768, dapo)),
        Case("group_advantages_of", "n 4096 in groups of 8", lambda: advantages(4096, 8)),
    ]


@dataclass(frozen=True)
class NoGPU:
    """What Triton asks of its driver in order to compile. Its device is the compute capability: Triton keeps kernels by device."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling(capability: int) -> Iterator[list[tuple[CompiledKernel, tuple[int, ...]]]]:
    """Launches compile for that GPU and are listed, with their grids, instead of run."""
    launches: list[tuple[CompiledKernel, tuple[int, ...]]] = []
    run = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        if callable(grid):
            bind = kernel.device_caches[capability][-1]
            grid = grid(bind(*args, **kwargs)[0])
        launches.append((compiled, tuple(grid)))
        return compiled

    triton.runtime.driver.set_active(NoGPU(capability))
    with patch.object(JITFunction, "run", compile_only), assuming(TARGETS[capability]):
        yield launches


def compiled(case: Case, capability: int) -> list[Compiled]:
    """The kernels that the case launches on such a GPU."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted, not compiled: unset it before Python starts")
    with compiling(capability) as launches:
        try:
            case.call()
        except Exception as error:
            raise RuntimeError(f"{case.launcher}, {case.inputs}, on sm_{capability}: {error}") from error
    if not launches:
        raise RuntimeError(f"{case.launcher}, {case.inputs}: no kernel was launched")
    return [measured(case, capability, kernel, grid) for kernel, grid in launches]


def measured(case: Case, capability: int, kernel: CompiledKernel, grid: tuple[int, ...]) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
        sass = output(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, static, local = map(int, found.groups())
    if capability >= 90:
        static = max(static - 1024, 0)  # the driver's share of a program that has any; the limits leave it out, too
    meta = kernel.metadata
    return Compiled(
        (case.launcher, case.inputs), meta.name, capability, grid, meta.num_warps, meta.num_stages, registers, stack + local,
        meta.shared + static, meta.tmem_size or 0, "tt.dot" in kernel.asm["ttir"],
        {name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()},
    )  # fmt: skip


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def violations(case: Case, kernel: Compiled) -> list[str]:
    """What is wrong with it, by the rules for every kernel and by what the case needs."""
    limit = SHARED_MEMORY[kernel.capability]
    needs = (*case.needs, TENSOR_CORES[kernel.capability]) if kernel.multiplies else case.needs
    spills = kernel.counts["LDL"] + kernel.counts["STL"]
    wrong = [
        (kernel.stack > 0 or spills > 0, f"{kernel.stack} bytes of stack, {spills} LDL and STL"),
        (kernel.shared > limit, f"{kernel.shared} bytes of shared memory; {limit} is the most"),
        (kernel.tensor_memory > TENSOR_MEMORY, f"{kernel.tensor_memory} columns of tensor memory; {TENSOR_MEMORY} is the most"),
        (any(size != 1 for size in kernel.grid[1:]), f"a grid of {len(kernel.grid)} dimensions"),
        *((kernel.counts[name] == 0, f"no {name}") for name in needs),
    ]
    return [f"{kernel}: {text}" for is_wrong, text in wrong if is_wrong]


def of_task(task: tuple[int, int]) -> list[Compiled]:
    index, capability = task
    return compiled(cases()[index], capability)


def table_of(kernels: list[Compiled]) -> Table:
    """A kernel that a case launches several times in the same way stands once; in different ways, its later rows are numbered."""
    table: Table = {}
    for kernel in kernels:
        cells = {name: str(cell(kernel)) for name, (cell, _) in COLUMNS.items()}
        again = 1
        while (key := tuple(cells.values())[:NAMING]) in table and table[key] != cells:
            again += 1
            cells["kernel"] = f"{kernel.kernel} ({again})"
        table[key] = cells
    return table


def written(table: Table) -> str:
    """The page, in Markdown."""
    lines = [
        "# What the kernels compile to",
        "",
        f"Triton {triton.__version__}. Written by `python benchmarks/compiled_kernels.py --update` on a machine without a GPU, by calling",
        "the launchers as on a GPU; `tests/test_compiled_kernels.py` compares it. Instructions are counted in the machine code, not as",
        "often as they run.",
        "",
        *(f"* **{name}**: {meaning}" for name, (_, meaning) in COLUMNS.items()),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + " --- |" * len(COLUMNS),
        *(f"| {' | '.join(cells.values())} |" for cells in table.values()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[str, Table]:
    """The Triton version of a page, and its table."""
    version = re.search(r"^Triton (\S+)\. ", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert version, "not a page of compiled_kernels.py"
    names, _, *cells = rows
    return version[1], {tuple(row[:NAMING]): dict(zip(names, row, strict=True)) for row in cells}


def differences(old: Table, new: Table) -> list[str]:
    """Cell by cell, from the file's to what was compiled just now."""
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        name = ", ".join(key[:-1]) + f", sm_{key[-1]}"
        if key not in new or key not in old:
            found.append(f"{name}: {'in the file, but not compiled' if key in old else 'not in the file'}")
            continue
        for column in {**old[key], **new[key]}:
            before, now = old[key].get(column), new[key].get(column)
            if before != now:
                found.append(f"{name}: {column} was {before}, is {now}")
    return found


def everything() -> tuple[Table, list[str]]:
    """The table of every case on every GPU, and what is out of bounds."""
    if INTERPRETED:
        sys.exit("TRITON_INTERPRET is set, so kernels are interpreted, not compiled: unset it")
    all_cases = cases()
    tasks = list(product(range(len(all_cases)), TARGETS))
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        results = list(pool.map(of_task, tasks))
    wrong = [
        text
        for (index, _), kernels in zip(tasks, results, strict=True)
        for kernel in kernels
        for text in violations(all_cases[index], kernel)
    ]
    return table_of([kernel for kernels in results for kernel in kernels]), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--update", action="store_true", help="write the table's file")
    what.add_argument("--check", action="store_true", help="compare with the table's file")
    arguments = parser.parse_args()

    table, wrong = everything()
    if arguments.check:
        version, committed = read(FILE.read_text())
        if version == triton.__version__:
            wrong += differences(committed, table)
            verdict = f"as in {FILE.name}"
        else:
            verdict = f"within the bounds; {FILE.name} is of Triton {version}"
        if not wrong:
            print(f"{len(table)} kernels, Triton {triton.__version__}: {verdict}")
    elif arguments.update:
        FILE.write_text(written(table))
    else:
        print(written(table), end="")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
