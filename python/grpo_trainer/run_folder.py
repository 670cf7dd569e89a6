"""The folder of a run: claimed so that no two processes write into it."""

from __future__ import annotations

import fcntl
import itertools
import time
from pathlib import Path

from grpo_trainer.errors import UserError


def claim_folder(folder: Path) -> Path:
    """Makes the folder a user asked for; it may exist if it is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise UserError(f"run_dir is {str(folder)!r}; it cannot be used: {error}") from None
    if occupied:
        raise UserError(
            f"run_dir is {str(folder)!r}; it exists and is not empty. Choose another, or continue it: grpo train --resume {folder}"
        )
    return folder


def claim_new_folder(task: str, seed: int) -> Path:
    """A new folder below runs/, this process's alone: mkdir fails where another was faster."""
    base = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    try:
        base.parent.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise UserError(f"no run folder can be made here ({error}); give run_dir") from None
    raise AssertionError("unreachable")


class FolderLock:
    """Held while a process trains in a folder; the system drops it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        try:
            self._file = self.path.open("w")
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(f"another process is training in {folder}") from None

    def release(self) -> None:
        self._file.close()
