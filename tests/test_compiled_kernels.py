"""The kernels as compiled for GPUs that are not here: the committed table, the bounds, and the tool that makes and checks them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import compiled_kernels
from compiled_kernels import FILE, Case, compiled, differences, main, read, written

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grpo_kernels" / "triton_kernels"

# Each breaks one rule, but for those named "sound". Triton reads a kernel's source from its file, so this becomes one.
KERNELS = """
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from compiled_kernels import Case, compiled, violations

@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.exp(tl.load(x + at, mask=at < n)), mask=at < n)

@triton.jit
def multiply(x, y, out, width, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, width, 64):
        k = start + tl.arange(0, 64)
        left, right = tl.load(x + row[:, None] * width + k[None, :]), tl.load(y + k[:, None] + row[None, :] * width)
        products = tl.dot(left, right, products, input_precision="ieee")
    tl.store(out + row[:, None] * BLOCK + row[None, :], products)

@triton.jit
def multiply_by_descriptor(x, y, out, width, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, width, 64):
        products = tl.dot(x.load([0, start]), y.load([0, start]).T, products)
    tl.store(out + row[:, None] * BLOCK + row[None, :], products)

x, half, square = torch.empty(1 << 20), torch.empty(128, 4096, dtype=torch.bfloat16), torch.empty(128, 128)
tiles = TensorDescriptor.from_tensor(half, [128, 64])
wide = ("LDG.128", "STG.128")
for capability, case in [
    (90, Case("copy", "sound", lambda: copy[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, x, 1 << 20, 1024), wide)),
    (90, Case("copy", "spills", lambda: copy[(1,)](x, x, 1 << 20, 16384, num_warps=4, maxnreg=32))),
    (90, Case("copy", "two dimensions", lambda: copy[(8, 2)](x, x, 1 << 20, 1024))),
    (90, Case("copy", "unaligned input", lambda: copy[(8,)](x[1:], x, 1 << 20, 1024), wide)),
    (90, Case("copy", "odd size", lambda: copy[(8,)](x, x, 50257, 1024), wide)),
    (90, Case("multiply", "sound", lambda: multiply[(1,)](half, half, square, 4096, 128))),
    (90, Case("multiply", "descriptors", lambda: multiply_by_descriptor[(1,)](tiles, tiles, square, 4096, 128), ("UTMALDG",))),
    (90, Case("multiply", "float32", lambda: multiply[(1,)](x, x, square, 4096, 64))),
    (80, Case("multiply", "many stages", lambda: multiply[(1,)](half, half, square, 4096, 128, num_stages=8))),
    (90, Case("copy", "no launch", lambda: None)),
    (90, Case("copy", "wrong arguments", lambda: copy[(1,)](x))),
]:
    try:
        for kernel in compiled(case, capability):
            wrong = [text.split(": ")[-1] for text in violations(case, kernel)]
            print(f"{case.launcher}, {case.inputs}, sm_{capability} -> grid {kernel.grid}", *wrong, sep="; ")
    except RuntimeError as error:
        print(f"{case.launcher}, {case.inputs}, sm_{capability} -> {error}")
"""


# How many kernels each case compiles for three numbers of rows.
VARIANTS = """
from compiled_kernels import cases, compiling
for of_one_case in zip(cases(4096), cases(4001), cases(1)):
    with compiling(90) as launches:
        for case in of_one_case:
            case.call()
    print(case.launcher, case.inputs, len(launches), len({id(kernel) for kernel, _ in launches}), sep="; ")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process where kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "benchmarks")
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_kernels_are_within_bounds_and_as_in_the_table() -> None:
    result = run(str(ROOT / "benchmarks" / "compiled_kernels.py"), "--check")
    assert result.returncode == 0, result.stderr
    version, table = read(FILE.read_text())
    assert result.stdout.startswith(f"{len(table)} kernels, Triton {triton.__version__}: ")
    if version != triton.__version__:
        warnings.warn(result.stdout.strip(), stacklevel=1)


def test_the_number_of_rows_makes_no_variants(tmp_path: Path) -> None:
    """It differs from step to step, and with it the alignment of slices; each variant would be compiled during training. After the test
    above, so that Triton has the kernels in its cache."""
    script = tmp_path / "variants.py"
    script.write_text(VARIANTS)
    result = run(str(script))
    assert result.returncode == 0, result.stderr
    counts = {tuple(names): (int(launches), int(kernels)) for *names, launches, kernels in map(split, result.stdout.splitlines())}
    assert len(counts) == len(compiled_kernels.cases())
    assert {names: found for names, found in counts.items() if found != (3, 1)} == {}


def split(line: str) -> list[str]:
    return line.split("; ")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the tool says of each of KERNELS."""
    script = tmp_path_factory.mktemp("kernels") / "kernels.py"
    script.write_text(KERNELS)
    result = run(str(script))
    assert result.returncode == 0, result.stderr
    return dict(line.split(" -> ") for line in result.stdout.splitlines())


@pytest.mark.parametrize(
    ("kernel", "verdict"),
    [
        ("copy, sound, sm_90", "grid (1024,)"),
        ("copy, two dimensions, sm_90", "grid (8, 2); a grid of 2 dimensions"),
        ("copy, unaligned input, sm_90", "grid (8,); no LDG.128"),
        ("copy, odd size, sm_90", "grid (8,); no LDG.128; no STG.128"),
        ("multiply, sound, sm_90", "grid (1,)"),
        ("multiply, descriptors, sm_90", "grid (1,)"),
        ("multiply, float32, sm_90", "grid (1,); no HGMMA"),
        ("multiply, many stages, sm_80", "grid (1,); 229376 bytes of shared memory; 166912 is the most"),
        ("copy, no launch, sm_90", "copy, no launch: no kernel was launched"),
    ],
)
def test_what_is_reported_of_a_kernel(verdicts: dict[str, str], kernel: str, verdict: str) -> None:
    assert verdicts[kernel] == verdict


def test_spills_and_errors_are_reported(verdicts: dict[str, str]) -> None:
    spills = re.fullmatch(r"grid \(1,\); (\d+) bytes of stack, (\d+) LDL and STL", verdicts["copy, spills, sm_90"])
    assert spills
    assert int(spills[1]) > 0
    assert int(spills[2]) > 0
    assert verdicts["copy, wrong arguments, sm_90"].startswith("copy, wrong arguments, on sm_90: dynamic_func() missing")


def test_interpreted_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compiled(Case("nothing", "", lambda: None), 90)


def test_every_differing_cell_is_named() -> None:
    _, table = read(FILE.read_text())
    assert differences(table, table) == []
    row, *others = table
    changed = {**table, row: {**table[row], "registers": "256", "warps": "99"}}
    name = f"{', '.join(row[:-1])}, sm_{row[-1]}"
    assert differences(table, changed) == [
        f"{name}: warps was {table[row]['warps']}, is 99", f"{name}: registers was {table[row]['registers']}, is 256",
    ]  # fmt: skip
    fewer = {other: table[other] for other in others}
    assert differences(table, fewer) == [f"{name}: in the file, but not compiled"]
    assert differences(fewer, table) == [f"{name}: not in the file"]


def test_check_fails_on_a_wrong_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is compiled here: what is found is what the file says, and the file is a copy in which one cell is wrong."""
    text = FILE.read_text()
    version, table = read(text)
    copy = tmp_path / FILE.name
    wrong: list[str] = []
    monkeypatch.setattr(compiled_kernels, "everything", lambda: (table, list(wrong)))
    monkeypatch.setattr(compiled_kernels, "FILE", copy)
    monkeypatch.setattr(sys, "argv", ["compiled_kernels.py", "--check"])
    monkeypatch.setattr(triton, "__version__", version)
    copy.write_text(text)
    main()
    assert capsys.readouterr().out == f"{len(table)} kernels, Triton {version}: as in compiled_kernels.md\n"

    line = next(line for line in text.splitlines() if line.startswith("| row_statistics"))
    cells = line.split(" | ")
    registers = list(compiled_kernels.COLUMNS).index("registers")
    copy.write_text(text.replace(line, " | ".join([*cells[:registers], "7", *cells[registers + 1 :]])))
    with pytest.raises(SystemExit, match=f"registers was 7, is {cells[registers]}$"):  # a text: printed, and exit code 1
        main()
    copy.write_text(text.replace(f"Triton {version}.", "Triton 1.0."))  # of another version only the bounds count
    main()
    assert capsys.readouterr().out == f"{len(table)} kernels, Triton {version}: within the bounds; compiled_kernels.md is of Triton 1.0\n"
    wrong.append("8 bytes of stack")
    with pytest.raises(SystemExit, match="8 bytes of stack"):
        main()
    assert capsys.readouterr().out == ""


def test_page_is_read_as_written() -> None:
    _, table = read(FILE.read_text())
    assert read(written(table)) == (triton.__version__, table)


def test_every_launcher_and_kernel_is_in_the_table() -> None:
    """So that a new one cannot be forgotten. A launcher is a public function that reaches a launch `kernel[grid](...)` in its module."""
    _, table = read(FILE.read_text())
    launchers, kernels, called = set[str](), set[str](), set[str]()
    for path in PACKAGE.glob("*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        jitted = [node for node in functions if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)]
        kernels |= {node.name for node in jitted}
        called |= {name for node in jitted for name in calls(node)}
        reach = {
            node.name
            for node in functions
            if any(isinstance(call.func, ast.Subscript) for call in ast.walk(node) if isinstance(call, ast.Call))
        }
        while more := {node.name for node in functions if calls(node) & reach} - reach:
            reach |= more
        launchers |= {name for name in reach if not name.startswith("_")}
    assert launchers
    assert launchers == {cells["launcher"] for cells in table.values()}
    assert kernels - called == {cells["kernel"] for cells in table.values()}


def calls(function: ast.FunctionDef) -> set[str]:
    """The names that it calls."""
    return {node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
