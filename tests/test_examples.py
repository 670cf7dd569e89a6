"""The worked examples: their losses against full logits in float64, and their scripts from end to end."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from problems import Problem, make, relative
from tiny import write_model

EXAMPLES = Path(__file__).parent.parent / "examples"
BETA = 0.3


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks its annotations up
    spec.loader.exec_module(module)
    return module


sft, dpo = load("sft"), load("dpo")


def leaves(p: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return p.hidden.to(dtype, copy=True).requires_grad_(), p.weight.to(dtype, copy=True).requires_grad_()


def plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(-1, targets[..., None])[..., 0]


def plain_dpo(
    logprobs: Tensor, mask: Tensor, lengths: list[int], reference: Tensor, pairs: int
) -> tuple[Tensor, list[tuple[float, float]]]:
    """One pair after the other, as in the paper: sigma written out."""
    sums = [part[counts].sum() for part, counts in zip(logprobs.split(lengths), mask.split(lengths), strict=True)]
    loss, rewards = logprobs.new_zeros(()), []
    for i in range(0, len(lengths), 2):
        chosen, rejected = BETA * (sums[i] - reference[i]), BETA * (sums[i + 1] - reference[i + 1])
        loss = loss - torch.log(1 / (1 + torch.exp(-(chosen - rejected)))) / pairs
        rewards.append((chosen.item(), rejected.item()))
    return loss, rewards


LENGTHS = [3, 7, 5, 5, 1, 9]  # three pairs of sequences


def preferences() -> tuple[Problem, Tensor]:
    """A problem of LENGTHS, and reference log-probabilities of its sequences, near the current ones."""
    p = make(sum(LENGTHS), 16, 83)
    now = torch.where(p.mask, plain_logprobs(p.hidden.double(), p.weight.double(), p.targets), 0.0)
    sums = torch.stack([part.sum() for part in now.split(LENGTHS)])
    return p, sums + torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same_gradients(ours: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert relative(mine.grad, theirs.grad) < tolerance


def test_sft_loss_is_the_mean_over_all_tokens_that_count() -> None:
    p = make(24, 16, 83)
    hidden, weight = leaves(p)
    loss = sft.sft_loss(hidden.view(3, 8, 16), weight, p.targets.view(3, 8), p.mask.view(3, 8), 50)
    loss.backward()
    exact = leaves(p, torch.float64)
    expected = -plain_logprobs(*exact, p.targets)[p.mask].sum() / 50
    expected.backward()
    assert relative(loss.detach(), expected.detach()) < 1e-5
    same_gradients((hidden, weight), exact)


def test_sft_loss_of_packed_micro_batches_adds_up() -> None:
    p = make(24, 16, 83)
    whole, pieces = leaves(p), leaves(p)
    tokens = int(p.mask.sum())
    loss = sft.sft_loss(*whole, p.targets, p.mask, tokens)
    loss.backward()
    total = 0.0
    for piece in (slice(0, 5), slice(5, 24)):
        part = sft.sft_loss(pieces[0][piece], pieces[1], p.targets[piece], p.mask[piece], tokens)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-6)
    same_gradients(pieces, whole)


def test_dpo_loss_is_equation_7() -> None:
    p, reference = preferences()
    hidden, weight = leaves(p)
    loss, rewards = dpo.dpo_loss(hidden, weight, p.targets, LENGTHS, reference.float(), 4, mask=p.mask, beta=BETA)
    loss.backward()
    exact = leaves(p, torch.float64)
    expected, expected_rewards = plain_dpo(plain_logprobs(*exact, p.targets), p.mask, LENGTHS, reference, 4)
    expected.backward()
    assert relative(loss.detach(), expected.detach()) < 1e-5
    assert relative(rewards, torch.tensor(expected_rewards)) < 1e-5
    assert not rewards.requires_grad
    same_gradients((hidden, weight), exact)


def test_dpo_loss_of_micro_batches_adds_up() -> None:
    p, reference = preferences()
    whole, pieces = leaves(p), leaves(p)
    loss, _ = dpo.dpo_loss(*whole, p.targets, LENGTHS, reference.float(), 3, mask=p.mask)
    loss.backward()
    total = 0.0
    for piece, sequences in ((slice(0, 10), slice(0, 2)), (slice(10, 30), slice(2, 6))):
        part, _ = dpo.dpo_loss(
            pieces[0][piece], pieces[1], p.targets[piece], LENGTHS[sequences], reference[sequences].float(), 3, mask=p.mask[piece]
        )
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-6)
    same_gradients(pieces, whole)


def test_dpo_reference_pass_gives_what_the_policy_starts_from() -> None:
    p, _ = preferences()
    with torch.no_grad():
        reference = dpo.sequence_logprobs(p.hidden, p.weight, p.targets, LENGTHS, p.mask)
    loss, rewards = dpo.dpo_loss(*leaves(p), p.targets, LENGTHS, reference, 3, mask=p.mask)
    assert not reference.requires_grad
    assert loss.item() == pytest.approx(0.6931471805599453)  # log 2
    assert not rewards.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_masked_rows_change_nothing_whatever_they_hold(bad: float) -> None:
    p, reference = preferences()
    dirty_hidden = torch.where(p.mask[:, None], p.hidden, bad)
    dirty_targets = torch.where(p.mask, p.targets, -100)
    gradients = []
    for rows, targets in ((p.hidden, p.targets), (dirty_hidden, dirty_targets)):
        results = []
        for name in ("sft", "dpo"):
            hidden, weight = rows.clone().requires_grad_(), p.weight.clone().requires_grad_()
            if name == "sft":
                loss = sft.sft_loss(hidden, weight, targets, p.mask, 20)
            else:
                loss, _ = dpo.dpo_loss(hidden, weight, targets, LENGTHS, reference.float(), 3, mask=p.mask)
            loss.backward()
            assert hidden.grad is not None
            assert not hidden.grad[~p.mask].any()
            assert hidden.grad[p.mask].any()
            results += [loss.detach(), hidden.grad, weight.grad]
        gradients.append(results)
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*gradients, strict=True))


def test_sft_batch_predicts_each_completion_token_and_no_other() -> None:
    inputs, targets, mask = sft.padded([([1, 2, 3], [4, 5]), ([6], [7])], torch.device("cpu"))
    assert inputs.tolist() == [[1, 2, 3, 4], [6, 0, 0, 0]]
    assert targets[mask].tolist() == [4, 5, 7]
    assert mask.tolist() == [[False, False, True, True], [True, False, False, False]]


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_script_trains_from_any_folder(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama_tied")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--model", str(model), "--steps", "3", "--learning-rate", "1e-3"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ +loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert "\nbefore: " in done.stdout
    assert "\nafter: " in done.stdout
    if name == "dpo":
        assert losses[0] == pytest.approx(0.6931, abs=1e-4)
        accuracies = re.findall(r"margin (-?[\d.]+)  accuracy ([\d.]+)$", done.stdout, re.MULTILINE)
        assert float(accuracies[0][0]) == 0.0
        assert float(accuracies[-1][0]) > 0.0
        assert float(accuracies[-1][1]) > 0.5


@pytest.mark.parametrize("module", [sft, dpo])
def test_script_names_a_model_that_is_not_there(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--model", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2
    assert "there is no such folder" in capsys.readouterr().err
