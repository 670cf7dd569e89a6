"""`pip install .` in an isolated build: with a compiler, and without one; no torch at build time either way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import sys
# An editable install's finder would supply the compiled module that the wheel under test does not have.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import torch, grpo_kernels
hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
result = grpo_kernels.linear_grpo_loss(hidden, weight, torch.arange(5), torch.randn(5), objective=grpo_kernels.Objective.dapo())
result.loss.backward()
assert weight.grad.abs().sum() > 0
print(grpo_kernels.__file__)
for status in grpo_kernels.backends():
    print(status.name, status.available, status.reason)
"""


def copy_of_sources(folder: Path) -> Path:
    """So that nothing of this checkout's own build is in reach."""
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.egg-info", "runs", "__pycache__", ".*_cache")
    return Path(shutil.copytree(ROOT, folder / "source with spaces", ignore=ignore))


def build_wheel(folder: Path, environment: dict[str, str], *, leftover: bool = False) -> Path:
    source = copy_of_sources(folder)
    if leftover:  # of an earlier build in the same folder
        stale = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "grpo_kernels"
        stale.mkdir(parents=True)
        (stale / ("_native" + sysconfig.get_config_var("EXT_SUFFIX"))).write_bytes(b"stale")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def use_wheel(wheel: Path, folder: Path) -> str:
    """What a program prints that imports the wheel, and not this checkout, from another directory."""
    target = folder / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(target) in done.stdout
    return done.stdout


def test_the_source_distribution_has_all_that_a_build_needs(tmp_path: Path) -> None:
    source = copy_of_sources(tmp_path)
    build = "import setuptools.build_meta as backend; print(backend.build_sdist('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(source / done.stdout.split()[-1]) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = ["CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md"]
    for folder in ("csrc", "grpo_kernels", "python"):
        needed += [str(path.relative_to(source)) for path in (source / folder).rglob("*") if path.suffix in (".h", ".cpp", ".py", ".pyi")]
    assert len(needed) > 60
    assert set(needed) <= packed


@pytest.mark.parametrize("how", ["no compiler", "skipped"])
def test_without_the_compiled_module(tmp_path: Path, how: str) -> None:
    nothing = str(tmp_path / "no-compiler")
    environment = {"CC": nothing, "CXX": nothing} if how == "no compiler" else {"GRPO_KERNELS_SKIP_EXT": "1"}
    wheel = build_wheel(tmp_path, environment, leftover=True)
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    text = use_wheel(wheel, tmp_path)
    assert "cpu False the compiled module cannot be imported (No module named 'grpo_kernels._native')" in text
    assert "C++17 compiler" in text
    assert "torch True used for all tensors" in text


def test_with_a_compiler(tmp_path: Path) -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    wheel = build_wheel(tmp_path, {})
    names = zipfile.ZipFile(wheel).namelist()
    assert len([name for name in names if name.startswith("grpo_kernels/_native") and name.endswith(".so")]) == 1
    assert {"grpo_kernels/py.typed", "grpo_trainer/cli.py", "grpo_trainer/tasks/countdown.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert "cpu True" in use_wheel(wheel, tmp_path)


def test_the_operators_import_nothing_of_the_trainer() -> None:
    code = (
        "import sys, grpo_kernels; bad = [m for m in sys.modules if m.split('.')[0] in "
        "('grpo_trainer', 'transformers', 'pydantic', 'rich', 'matplotlib')]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
