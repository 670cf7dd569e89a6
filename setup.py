"""Builds the compiled module `grpo_kernels._native` with CMake. Everything else is in pyproject.toml.

The module is optional: without a compiler the wheel is pure Python and the operators fall back to torch, so a failed build is a warning.
`GRPO_KERNELS_SKIP_EXT=1` leaves it out on purpose. No torch is imported here: the module takes raw pointers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.unlink(missing_ok=True)  # of an earlier build in this folder: it must not pass for the result of a failed one
        if os.environ.get("GRPO_KERNELS_SKIP_EXT") == "1":
            return
        import pybind11

        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DGRPO_MODULE_FILE={target.name}", f"-DGRPO_MODULE_DIR={target.parent}",
        ]  # fmt: skip
        if shutil.which("ninja"):  # a compiler may come without make
            configure += ["-G", "Ninja"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the compiled CPU module could not be built ({error}); grpo-kernels will use its torch backend") from error


setup(
    ext_modules=[Extension("grpo_kernels._native", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
