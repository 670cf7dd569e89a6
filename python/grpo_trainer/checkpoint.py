"""Checkpoints: a transformers folder that any tool loads, plus what an exact continuation needs.

Data order and random numbers are functions of (seed, step), so weights, optimiser state and the step are all there is to keep.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch

from grpo_trainer.errors import UserError
from grpo_trainer.policy import Policy

_STATE = "trainer_state.pt"


def save_checkpoint(run: Path, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> Path:
    """Saves the state after `step` steps, then removes older checkpoints. A kill at any moment leaves a complete one.

    Raises:
        UserError: it could not be written (a full disk); the previous checkpoint is as it was.
    """
    folder = run / "checkpoints" / f"step_{step:06d}"
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob(".step_*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        policy.save(partial)
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, partial / _STATE)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except Exception as error:  # safetensors and torch wrap the system's errors in types of their own
        shutil.rmtree(partial, ignore_errors=True)
        kept = latest_checkpoint(run)
        before = f"the one in {kept[0]} is as it was" if kept else "there is none before it"
        raise UserError(f"the checkpoint after {step} steps could not be saved ({error}); {before}") from error
    for older in _checkpoints(run):
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
    return folder


def _checkpoints(run: Path) -> list[Path]:
    """Ours, oldest first: a copy that a user made under another name is not touched."""
    return sorted(folder for folder in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{6,}", folder.name))


def latest_checkpoint(run: Path) -> tuple[Path, int] | None:
    """The folder of the newest complete checkpoint and its step, or None."""
    found = [folder for folder in _checkpoints(run) if (folder / _STATE).is_file()]
    return (found[-1], int(found[-1].name.removeprefix("step_"))) if found else None


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    try:
        state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # an empty, cut or foreign file fails in many ways
        raise UserError(f"checkpoint {folder} cannot be resumed: {_STATE} is damaged ({error!r})") from error
