"""The whole trainer on a tiny model: it learns, and a step that teaches nothing or goes wrong leaves the weights alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from grpo_trainer.config import Preset, validate
from grpo_trainer.errors import UserError
from grpo_trainer.learner import Learner
from grpo_trainer.run import start_run
from grpo_trainer.tasks import Score
from runs import Digits, run_to_end, settings, weights


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
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


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_trains_with_several_updates(tmp_path: Path, digits: None, preset: str) -> None:
    changes = {"preset": preset, "kl_coef": 0.1, "entropy_coef": 0.01}
    rows = run_to_end(start_run(validate(settings(tmp_path, steps=2, updates_per_step=2, objective=changes))))
    assert all(row["updates"] == 2 and row["grad_norm"] > 0 and math.isfinite(row["loss"]) for row in rows)


def test_several_updates_and_a_kl_penalty(tmp_path: Path, digits: None) -> None:
    run = start_run(validate(settings(tmp_path, steps=3, updates_per_step=3, objective={"kl_coef": 0.1})))
    rows = run_to_end(run)
    assert all(row["updates"] == 3 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # the policy is the reference before its first update
    assert rows[-1]["kl"] > 1e-4
    assert any(row["ratio/mean"] != pytest.approx(1.0, abs=1e-4) for row in rows)
    assert any(row["clip/low"] or row["clip/high"] for row in rows)


def test_bfloat16_parameters(tmp_path: Path, digits: None) -> None:
    run = start_run(validate(settings(tmp_path, steps=2, dtype="bfloat16", objective={"kl_coef": 0.01})))
    assert {p.dtype for p in run.policy.model.parameters()} == {torch.bfloat16}
    rows = run_to_end(run)
    assert all(row["updates"] == 1 and row["grad_norm"] > 0 for row in rows)


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
