"""Runs that stop, by request, by a kill or by a full disk, and go on: exactly, from anywhere, and one at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import grpo_trainer.run as run_module
from grpo_trainer.config import validate
from grpo_trainer.errors import UserError
from grpo_trainer.groups import Group
from grpo_trainer.learner import Learner
from grpo_trainer.loop import train
from grpo_trainer.run import resume_run, start_run
from runs import Digits, comparable, quiet, run_to_end, settings, weights


@pytest.mark.parametrize("changes", [{}, {"updates_per_step": 2, "objective": {"kl_coef": 0.05}}])
def test_resume_is_exact(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    whole = start_run(validate(settings(tmp_path, steps=5, save_every=2, run_dir=str(tmp_path / "whole"), **changes)))
    expected = run_to_end(whole)

    broken = start_run(validate(settings(tmp_path, steps=5, save_every=2, run_dir=str(tmp_path / "broken"), **changes)))
    update = Learner.update

    def fail_in_step_4(self: Learner, groups: list[Group], step: int) -> Any:
        if step == 3:
            raise RuntimeError("power cut")
        return update(self, groups, step)

    monkeypatch.setattr(Learner, "update", fail_in_step_4)
    with pytest.raises(RuntimeError, match="power cut"):
        run_to_end(broken)
    monkeypatch.undo()
    monkeypatch.setattr(run_module, "build_task", lambda config, seed: Digits())
    assert len(broken.metrics.read()) == 3  # one step more than the checkpoint holds
    with broken.metrics.path.open("a") as file:
        file.write('{"step": 4, "half a li')

    resumed = resume_run(tmp_path / "broken", [])
    assert resumed.first_step == 2
    assert comparable(run_to_end(resumed)) == comparable(expected)
    assert resumed.samples.read() == whole.samples.read()
    assert resumed.evaluations.read() == whole.evaluations.read()
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_finished_run_can_be_extended(tmp_path: Path, digits: None) -> None:
    run_to_end(start_run(validate(settings(tmp_path, steps=2))))
    longer = resume_run(tmp_path / "run", ["steps=4"])
    assert longer.first_step == 2
    rows = run_to_end(longer)
    unbroken = run_to_end(start_run(validate(settings(tmp_path, steps=4, run_dir=str(tmp_path / "other")))))
    assert comparable(rows) == comparable(unbroken)
    again = resume_run(tmp_path / "run", [])
    assert again.config.steps == 4  # the new length is remembered
    again.close()
    with pytest.raises(UserError, match=r"seed is 9, but the run in .* has 0"):
        resume_run(tmp_path / "run", ["seed=9"])


def test_a_run_killed_before_its_last_evaluation_gets_it_on_resume(tmp_path: Path, digits: None) -> None:
    run = start_run(validate(settings(tmp_path, steps=2)))
    run_to_end(run)
    whole = run.evaluations.read()
    run.evaluations.keep(0)
    resumed = resume_run(tmp_path / "run", [])
    run_to_end(resumed)
    assert resumed.evaluations.read() == whole
    run_to_end(resume_run(tmp_path / "run", []))
    assert resumed.evaluations.read() == whole


@pytest.mark.parametrize("every", [1, 2])
def test_an_interrupt_loses_no_evaluation(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    changes: dict[str, Any] = {"steps": 5, "evaluation": {"every": every, "samples": 2}}
    whole = start_run(validate(settings(tmp_path, run_dir=str(tmp_path / "whole"), **changes)))
    run_to_end(whole)
    run = start_run(validate(settings(tmp_path, **changes)))
    real = Learner.update

    def interrupt_in_step_2(self: Learner, groups: list[Group], step: int) -> Any:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, groups, step)

    monkeypatch.setattr(Learner, "update", interrupt_in_step_2)
    assert not train(run, quiet(run))
    run.close()
    monkeypatch.setattr(Learner, "update", real)
    resumed = resume_run(tmp_path / "run", [])
    assert resumed.first_step == 2
    run_to_end(resumed)
    assert resumed.evaluations.read() == whole.evaluations.read()


def test_two_processes_never_share_a_folder(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(validate(settings(tmp_path)))
    with pytest.raises(UserError, match="another process is training"):
        resume_run(tmp_path / "run", [])
    run.close()
    monkeypatch.chdir(tmp_path)
    unnamed = validate(settings(tmp_path) | {"run_dir": None})
    folders = {start_run(unnamed).folder for _ in range(3)}
    assert len(folders) == 3


def test_a_run_can_be_continued_from_another_folder(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = start_run(validate(settings(tmp_path, steps=1) | {"model": "model", "run_dir": "run"}))
    run_to_end(run)
    monkeypatch.chdir("/")
    run_to_end(resume_run(tmp_path / "run", ["steps=2"]))
    (tmp_path / "model").rename(tmp_path / "moved")
    longer = resume_run(tmp_path / "run", ["steps=3", f"model={tmp_path / 'moved'}"])
    assert len(run_to_end(longer)) == 3


def test_a_users_own_copy_of_a_checkpoint_is_left_alone(tmp_path: Path, digits: None) -> None:
    run_to_end(start_run(validate(settings(tmp_path, steps=1))))
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step_000001_best", "step_mine"):
        shutil.copytree(checkpoints / "step_000001", checkpoints / name)
    run_to_end(resume_run(tmp_path / "run", ["steps=2"]))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000001_best", "step_000002", "step_mine"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.pt", b""),
        ("trainer_state.pt", b"x" * 100),
        ("model.safetensors", b"x" * 50),
        ("model.safetensors", None),
        ("config.json", None),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, digits: None, name: str, content: bytes | None) -> None:
    run_to_end(start_run(validate(settings(tmp_path, steps=1))))
    file = tmp_path / "run" / "checkpoints" / "step_000001" / name
    file.unlink() if content is None else file.write_bytes(content)
    for _ in range(2):  # the refusal leaves no lock behind
        with pytest.raises(UserError, match=r"cannot be (resumed|loaded)"):
            resume_run(tmp_path / "run", ["steps=2"])


def test_a_checkpoint_that_cannot_be_written_loses_nothing(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run_to_end(start_run(validate(settings(tmp_path, steps=1))))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"No space left on device.*step_000001 is as it was"):
        run_to_end(resume_run(tmp_path / "run", ["steps=2"]))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]


def test_a_model_with_an_invalid_generation_config_can_be_saved(tmp_path: Path, digits: None) -> None:
    changes = settings(tmp_path, steps=1)
    (tmp_path / "model" / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": [256, 10]})
    )
    run = start_run(validate(changes))
    assert run.policy.eos_ids == {256, 10}
    run_to_end(run)
    assert list((tmp_path / "run" / "checkpoints").glob("step_000001/model.safetensors"))


def test_the_checkpoint_is_a_transformers_model(tmp_path: Path, digits: None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = start_run(validate(settings(tmp_path, steps=1)))
    run_to_end(run)
    (folder,) = (run.folder / "checkpoints").glob("step_*")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, weights(run)[name]), name
    assert AutoTokenizer.from_pretrained(folder).decode([65]) == run.source.decode([65])


def spawn(recipe: Path, folder: Path) -> subprocess.Popen[str]:
    """A real training process, once it has written its first step."""
    command = [sys.executable, "-m", "grpo_trainer.cli", "train", str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    metrics = folder / "run" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.read_text().count("\n") >= 2:
            return process
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.1)
    raise AssertionError("no step within a minute")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_says_how_to_continue(tmp_path: Path, number: signal.Signals) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=100_000, save_every=0)))
    process = spawn(recipe, tmp_path)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert f"grpo train --resume {tmp_path / 'run'}" in text
    run = resume_run(tmp_path / "run", [])
    assert run.first_step == len(run.metrics.read()) >= 2


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=100_000, save_every=1)))
    process = spawn(recipe, tmp_path)
    process.kill()
    process.communicate()
    run = resume_run(tmp_path / "run", ["steps=100000"])
    assert run.first_step >= 1
    assert len(run.metrics.read()) == run.first_step
