"""Micro-batches: the gradients do not depend on how a step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_trainer.learner as learner_module
from grpo_trainer.config import validate
from grpo_trainer.groups import Group, loss_counts, micro_batches
from grpo_trainer.learner import Learner
from grpo_trainer.rollout.engine import Completion
from grpo_trainer.run import start_run
from grpo_trainer.tasks import Example, Score
from runs import settings


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
