"""The whole trainer on a tiny model: it learns, resumes exactly, survives kills, and says what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import grpo_trainer.learner as learner_module
import grpo_trainer.run as run_module
from grpo_trainer.cli import main
from grpo_trainer.config import validate
from grpo_trainer.errors import UserError
from grpo_trainer.groups import Group, loss_counts, micro_batches
from grpo_trainer.learner import Learner
from grpo_trainer.loop import train
from grpo_trainer.monitor.advice import advice
from grpo_trainer.monitor.display import Display
from grpo_trainer.monitor.metrics import JsonLines
from grpo_trainer.rollout.engine import Completion
from grpo_trainer.run import Run, resume_run, start_run
from grpo_trainer.tasks import Example, Score
from tiny import write_model


class Digits:
    """Reward: the share of a completion's characters that are digits. Learnable by a random model in seconds."""

    def __init__(self) -> None:
        examples = [Example(f"say {word}: ", None) for word in (*"abcdefgh", "the end", "nothing")]
        self.train, self.held_out = examples[:8], examples[8:]

    def score(self, example: Example, prompt: str, completion: str) -> Score:
        share = sum(character.isdigit() for character in completion) / max(len(completion), 1)
        return Score(share, {"digits": share}, share > 0.9)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "build_task", lambda config, seed: Digits())


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    model = folder / "model"
    if not model.exists():
        write_model(model, scale=1.0)
    return {
        "model": str(model),
        "task": {"name": "arithmetic"},
        "steps": 4,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_new_tokens": 8},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"samples": 2},
        "run_dir": str(folder / "run"),
        "threads": 1,
    } | changes


def quiet(run: Run) -> Display:
    return Display(Console(file=open(os.devnull, "w")), run.first_step, run.config.steps)


def run_to_end(run: Run) -> list[dict[str, Any]]:
    try:
        assert train(run, quiet(run))
    finally:
        run.close()
    return run.metrics.read()


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = ("time/", "tokens_per_second/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(measured)} for row in rows]


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo"])
def test_a_small_model_learns(tmp_path: Path, digits: None, preset: str) -> None:
    run = start_run(validate(settings(tmp_path, steps=50, prompts_per_step=8, group_size=8, objective={"preset": preset})))
    rows = run_to_end(run)
    assert len(rows) == 50
    before, after = run.evaluations.read()
    assert rows[0]["reward/mean"] < 0.15
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.6
    assert rows[0]["reward/digits"] == rows[0]["reward/mean"]
    assert before["step"] == 0
    assert after["step"] == 50
    assert after["sampled_accuracy"] > before["sampled_accuracy"]
    assert all(row["ratio/mean"] == pytest.approx(1.0) and row["clip/low"] == row["clip/high"] == 0 for row in rows)


def test_several_updates_and_a_kl_penalty(tmp_path: Path, digits: None) -> None:
    run = start_run(validate(settings(tmp_path, steps=3, updates_per_step=3, objective={"kl_coef": 0.1})))
    rows = run_to_end(run)
    assert all(row["updates"] == 3 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # the policy is the reference before its first update
    assert rows[-1]["kl"] > 1e-4
    assert any(row["ratio/mean"] != pytest.approx(1.0, abs=1e-4) for row in rows)
    assert any(row["clip/low"] or row["clip/high"] for row in rows)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.policy.model.named_parameters()}


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


def test_metric_names_are_documented(tmp_path: Path, digits: None) -> None:
    (row,) = run_to_end(start_run(validate(settings(tmp_path, steps=1))))
    table = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([a-z_/]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
    assert set(row) - {"reward/digits"} == documented


def test_bfloat16_parameters(tmp_path: Path, digits: None) -> None:
    run = start_run(validate(settings(tmp_path, steps=2, dtype="bfloat16", objective={"kl_coef": 0.01})))
    assert {p.dtype for p in run.policy.model.parameters()} == {torch.bfloat16}
    rows = run_to_end(run)
    assert all(row["updates"] == 1 and row["grad_norm"] > 0 for row in rows)


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


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x1c", "\r", "\n"])
def test_any_character_in_a_sample_survives_in_the_files(tmp_path: Path, separator: str) -> None:
    lines = JsonLines(tmp_path / "s.jsonl")
    rows = [{"step": step, "text": f"a{separator}b"} for step in (1, 2, 3)]
    for row in rows:
        lines.write(row)
    assert lines.read() == rows
    lines.keep(2)
    assert lines.read() == rows[:2]


@pytest.mark.parametrize("damage", [b'{"no": "step"}\n', b"[1]\n", b"\xff\xfe\n", b'{"step": "x"}\n', b"\n"])
def test_a_damaged_row_ends_a_file(tmp_path: Path, damage: bytes) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    with lines.path.open("ab") as file:
        file.write(damage)
    assert lines.read() == [{"step": 1}]


def test_the_first_update_counts_when_the_second_is_not_finite(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(validate(settings(tmp_path, steps=1, updates_per_step=3)))
    real, calls = Learner._loss, []

    def second_poisoned(self: Learner, *arguments: Any) -> Any:
        result = real(self, *arguments)
        calls.append(1)
        return replace(result, loss=result.loss * float("nan")) if len(calls) > 1 else result

    monkeypatch.setattr(Learner, "_loss", second_poisoned)
    (row,) = run_to_end(run)
    assert (row["updates"], row["updates_nonfinite"], len(calls)) == (1, 1, 2)
    assert all(torch.isfinite(value).all() for value in weights(run).values())


def test_a_run_goes_on_when_its_reader_has_gone(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=3)))
    command = f"{sys.executable} -m grpo_trainer.cli train {recipe} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert len(JsonLines(tmp_path / "run" / "metrics.jsonl").read()) == 3
    assert (tmp_path / "run" / "checkpoints" / "step_000003").is_dir()


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_progress_on_a_terminal(tmp_path: Path, term: str) -> None:
    """Under a pseudo-terminal: a live table where it can be redrawn, lines where it cannot. Odd names are shown as they are."""
    script = shutil.which("script")
    if script is None:
        pytest.skip("no `script` (util-linux) to make a pseudo-terminal with")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=2, run_dir=str(tmp_path / "mk[/x]1"))))
    command = f"stty cols 200; {sys.executable} -m grpo_trainer.cli train {recipe}"
    arguments = [script, "-qec", command, "/dev/null"]
    done = subprocess.run(arguments, env=os.environ | {"TERM": term}, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout
    assert ("step 2  reward" in done.stdout) == (term == "dumb")
    assert ("2/2 steps" in done.stdout) == (term != "dumb")
    assert "mk[/x]1/curves.png" in done.stdout


def test_an_ascii_terminal(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=1)))
    command = [sys.executable, "-m", "grpo_trainer.cli", "train", str(recipe)]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"curves.png" in done.stdout


def test_the_checkpoint_is_a_transformers_model(tmp_path: Path, digits: None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = start_run(validate(settings(tmp_path, steps=1)))
    run_to_end(run)
    (folder,) = (run.folder / "checkpoints").glob("step_*")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, weights(run)[name]), name
    assert AutoTokenizer.from_pretrained(folder).decode([65]) == run.source.decode([65])


def test_the_command_line_trains_evaluates_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=2)))
    assert main(["train", str(recipe)]) == 0
    text = capsys.readouterr().out
    for expected in ("step 2", "sampled accuracy", "before", "after", "curves.png", "step_000002"):
        assert expected in text, expected
    run = tmp_path / "run"
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((run / "samples.jsonl").read_text().splitlines()) == 2
    assert main(["eval", str(run / "config.yaml"), f"model={run / 'checkpoints' / 'step_000002'}"]) == 0
    assert "sampled accuracy" in capsys.readouterr().out
    assert main(["train", "--resume", str(run)]) == 0
    assert "after 2 of 2 steps" in capsys.readouterr().out


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


def test_a_step_without_signal_leaves_the_weights_alone(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "score", lambda self, example, prompt, completion: Score(0.0, {"digits": 0.0}, False))
    run = start_run(validate(settings(tmp_path, steps=2)))
    before = weights(run)
    rows = run_to_end(run)
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())
    assert [row["updates"] for row in rows] == [0, 0]
    assert rows[0]["groups/no_signal"] == rows[0]["groups/all_wrong"] == 1.0


def test_nonfinite_steps_are_skipped_counted_and_stop_the_run(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(validate(settings(tmp_path, steps=9, max_nonfinite_steps=2)))
    before = weights(run)
    real = Learner._loss

    def poisoned(self: Learner, *arguments: Any) -> Any:
        result = real(self, *arguments)
        return replace(result, loss=result.loss * float("nan"))

    monkeypatch.setattr(Learner, "_loss", poisoned)
    with pytest.raises(UserError, match="2 steps in a row were not finite"):
        run_to_end(run)
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())
    rows = run.metrics.read()
    assert [row["updates_nonfinite"] for row in rows] == [1, 1]
    assert rows[0]["loss"] is None
    assert rows[0]["grad_norm"] is None
    assert (run.folder / "checkpoints" / "step_000002").is_dir()


def test_a_nonfinite_gradient_is_skipped_too(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(validate(settings(tmp_path, steps=1)))
    before = weights(run)
    real = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: real(*a, **k) * float("inf"))
    rows = run_to_end(run)
    assert rows[0]["updates_nonfinite"] == 1
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def group(lengths: list[int], advantages: list[float], prompt: int = 5) -> Group:
    completions = [Completion(list(range(1, n + 1)), [-1.0] * n, "stop") for n in lengths]
    scores = [Score(a, {}, a > 0) for a in advantages]
    return Group(Example("", None), list(range(20, 20 + prompt)), completions, scores, torch.tensor(advantages))


GROUPS = [group([5, 2, 9], [1.0, -1.0, 0.5]), group([3, 3, 4], [0.0, 0.0, 0.0]), group([1, 30, 2], [1.0, -2.0, 1.0], prompt=11)]


def test_gradients_do_not_depend_on_the_micro_batches(tmp_path: Path, digits: None) -> None:
    collected = []
    for tokens in (1, 25, 60, 10_000):
        run = start_run(validate(settings(tmp_path, micro_batch_tokens=tokens, run_dir=str(tmp_path / f"run{tokens}"))))
        batches = micro_batches(GROUPS, tokens)
        for batch in batches:
            run.learner._loss(batch, loss_counts(GROUPS)).loss.backward()
        collected.append(({name: p.grad for name, p in run.policy.model.named_parameters()}, len(batches)))
    assert len({count for _, count in collected}) == 4
    for gradients, _ in collected[:-1]:
        for name, gradient in collected[-1][0].items():
            assert float((gradients[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_bfloat16_gradients_are_summed_in_float32(tmp_path: Path, digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 64 micro-batches a bfloat16 running sum is worse than the learner's, which rounds once more than a single pass does."""
    exact_run = start_run(validate(settings(tmp_path)))
    run = start_run(validate(settings(tmp_path, run_dir=str(tmp_path / "half"), dtype="bfloat16")))
    exact_run.policy.model.load_state_dict(run.policy.model.state_dict())
    groups = [group([4], [1.0], prompt=3) for _ in range(64)]
    for batch in micro_batches(groups, 10_000):
        exact_run.learner._loss(batch, loss_counts(groups)).loss.backward()
    exact = exact_run.policy.head_weight.grad.double()
    taken: list[torch.Tensor] = []

    def take(self: Learner, stats: Any, *, any_gradient: bool) -> None:
        taken.append(self._policy.head_weight.grad.double())
        self._policy.model.zero_grad()

    monkeypatch.setattr(Learner, "_step", take)
    run.learner._update_once(micro_batches(groups, 10_000), loss_counts(groups), 0)
    run.learner._update_once(micro_batches(groups, 1), loss_counts(groups), 0)
    monkeypatch.setattr(learner_module._Float32Gradients, "collect", lambda self: None)
    run.learner._update_once(micro_batches(groups, 1), loss_counts(groups), 0)
    once, summed, running = (float((gradient - exact).norm() / exact.norm()) for gradient in taken)
    assert summed <= 1.5 * once, (once, summed, running)
    assert running > 2 * summed, (once, summed, running)


def test_skipping_groups_without_signal_changes_nothing(tmp_path: Path, digits: None) -> None:
    run = start_run(validate(settings(tmp_path)))
    gradients = []
    for groups in (GROUPS, [g for g in GROUPS if g.has_signal]):
        run.policy.model.zero_grad()
        for batch in micro_batches(groups, 10_000):
            run.learner._loss(batch, loss_counts(GROUPS)).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in run.policy.model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert float((gradients[1][name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_micro_batches_hold_every_completion_once_within_the_budget() -> None:
    for tokens in (1, 14, 25, 60, 10_000):
        batches = micro_batches(GROUPS, tokens)
        found = sorted(tuple(ids) for batch in batches for group in batch.completions for ids in group)
        assert found == sorted(tuple(c.token_ids) for g in GROUPS for c in g.completions)
        for batch in batches:
            flat = [ids for group in batch.completions for ids in group]
            padded = len(batch.prompts) * max(map(len, batch.prompts)) + len(flat) * max(map(len, flat))
            assert padded <= tokens or len(flat) == 1
            assert batch.targets.tolist() == [token for ids in flat for token in ids]


METRICS = {"updates_nonfinite": 0, "groups/no_signal": 0.5, "groups/all_right": 0.2, "groups/all_wrong": 0.3, "completion/truncated": 0.1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"groups/no_signal": 1.0, "groups/all_right": 1.0}, "too easy"),
        ({"groups/no_signal": 1.0, "groups/all_wrong": 1.0}, "all were wrong"),
        ({"groups/no_signal": 1.0}, "either always or never solved"),
        ({"completion/truncated": 0.95}, "sampling.max_new_tokens = 8"),
        ({"updates_nonfinite": 1}, "not finite"),
    ],
)
def test_advice(change: dict[str, float], words: str | None) -> None:
    found = advice(METRICS | change, 8)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_json_lines_keep_complete_lines_up_to_a_step(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    assert lines.read() == []
    for step in (1, 2, 3):
        lines.write({"step": step, "x": math.pi})
    with lines.path.open("a") as file:
        file.write('{"step": 4')
    lines.keep(2)
    assert [json.loads(line)["step"] for line in lines.path.read_text().splitlines()] == [1, 2]
