"""A run: everything that the loop needs, checked in the order that finds mistakes before work starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from grpo_kernels.backends import select_backend
from grpo_trainer.checkpoint import latest_checkpoint, load_optimizer
from grpo_trainer.config import Config, CountdownConfig, load_config
from grpo_trainer.data import PromptData, encode_task
from grpo_trainer.errors import UserError
from grpo_trainer.learner import Learner
from grpo_trainer.monitor.metrics import JsonLines
from grpo_trainer.policy import ModelSource, Policy, find_model, pick_device, set_threads
from grpo_trainer.rollout.engine import RolloutEngine
from grpo_trainer.rollout.local import LocalEngine
from grpo_trainer.run_folder import FolderLock, claim_folder, claim_new_folder
from grpo_trainer.tasks import Task, build_task

_CONFIG = "config.yaml"
_FIXED = ("task", "seed", "prompts_per_step", "dtype")  # what a resumed run cannot change


@dataclass
class Parts:
    """What evaluation needs, and training too."""

    config: Config
    source: ModelSource
    task: Task
    data: PromptData
    policy: Policy
    engine: RolloutEngine


@dataclass
class Run(Parts):
    """`first_step` is how many steps are done; the files in `folder` end there. `lock` keeps other processes out of it."""

    folder: Path
    learner: Learner
    first_step: int
    metrics: JsonLines
    samples: JsonLines
    evaluations: JsonLines
    lock: FolderLock | None = None

    def close(self) -> None:
        """Lets other processes have the folder."""
        if self.lock is not None:
            self.lock.release()


def start_run(config: Config) -> Run:
    """A new run in a folder of its own.

    Raises:
        UserError: whatever is wrong with the settings, the model, the data or the folder; the folder is gone again then.
    """
    config = _absolute(config)
    folder = claim_folder(Path(config.run_dir).expanduser()) if config.run_dir else claim_new_folder(config.task.name, config.seed)
    lock = FolderLock(folder)
    try:
        run = _build(config, folder, first_step=0, checkpoint=None)
        _write_config(config, folder)
    except BaseException:
        lock.release()
        lock.path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
        raise
    run.lock = lock
    return run


def resume_run(folder: Path, overrides: list[str]) -> Run:
    """Continues from the newest checkpoint (from the start where there is none) as if the run had never stopped.

    `overrides` may change anything but what would make it another run; `model` and `task.data` may name new places of the same.
    """
    if not (folder / _CONFIG).is_file():
        raise UserError(f"--resume {folder}: no {_CONFIG} there, so it is not a run folder")
    before = load_config(folder / _CONFIG)
    config = _absolute(load_config(folder / _CONFIG, overrides))
    for key in _FIXED:
        old, new = _identity(before, key), _identity(config, key)
        if old != new:
            raise UserError(
                f"{key} is {new!r}, but the run in {folder} has {old!r}; with another {key} it is another run, not its continuation"
            )
    lock = FolderLock(folder)
    try:
        found = latest_checkpoint(folder)
        checkpoint, done = found if found else (None, 0)
        run = _build(config, folder, done, checkpoint)
    except BaseException:
        lock.release()
        raise
    run.lock = lock
    _write_config(config, folder)
    for file in (run.metrics, run.samples):
        file.keep(done)
    # An evaluation made after `done` steps saw those very weights; later ones saw weights that are gone.
    run.evaluations.keep(done)
    return run


def load_parts(config: Config, checkpoint: Path | None = None) -> Parts:
    """Checks everything that can be checked without the weights, then loads them (from `checkpoint` where one is given).

    Raises:
        UserError: naming the setting, the model or the data that is wrong.
    """
    source = find_model(config.model)
    task = build_task(config.task, config.seed)
    data = encode_task(task, source, config)
    device = pick_device(config.device)
    try:
        select_backend(config.backend, device)
    except ValueError as error:
        raise UserError(str(error)) from None
    set_threads(config.threads)
    policy = Policy.load(source, device, config.dtype, location=str(checkpoint) if checkpoint else None)
    return Parts(config, source, task, data, policy, LocalEngine(policy, config.sampling.rows))


def _build(config: Config, folder: Path, first_step: int, checkpoint: Path | None) -> Run:
    parts = load_parts(config, checkpoint)
    policy = parts.policy
    reference = Policy.load(parts.source, policy.device, config.dtype).frozen() if config.objective.kl_coef else None
    learner = Learner(policy, reference, config)
    if checkpoint is not None:
        load_optimizer(checkpoint, learner.optimizer)
    return Run(
        **vars(parts),
        folder=folder,
        learner=learner,
        first_step=first_step,
        metrics=JsonLines(folder / "metrics.jsonl"),
        samples=JsonLines(folder / "samples.jsonl"),
        evaluations=JsonLines(folder / "evaluations.jsonl"),
    )


def _write_config(config: Config, folder: Path) -> None:
    partial = folder / f".{_CONFIG}.partial"
    partial.write_text(yaml.safe_dump(config.model_dump() | {"run_dir": str(folder)}, sort_keys=False), encoding="utf-8")
    partial.replace(folder / _CONFIG)


def _absolute(config: Config) -> Config:
    """Places as absolute paths, so that the run can be continued from any folder."""
    model = Path(config.model).expanduser()
    changes: dict[str, object] = {"model": str(model.resolve())} if model.is_dir() else {}
    if isinstance(config.task, CountdownConfig) and config.task.data is not None:
        changes["task"] = config.task.model_copy(update={"data": str(Path(config.task.data).expanduser().resolve())})
    return config.model_copy(update=changes)


def _identity(config: Config, key: str) -> object:
    value = getattr(config, key)
    return value.model_copy(update={"data": None}) if isinstance(value, CountdownConfig) else value
