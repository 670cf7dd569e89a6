"""`linear_grpo_loss` against its float64 specification, and the invariances that must hold exactly or nearly so."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from grpo_kernels import (
    LossCounts,
    Objective,
    RolloutCorrection,
    TokenBatch,
    backends,
    grpo_loss_from_logprobs,
    linear_grpo_loss,
    top_entropy_threshold,
)
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.head_pass import HeadPass
from problems import Problem, check_against_float64, fused, leaves, make, reference, relative, rows_per_chunk, take

AVAILABLE = [status.name for status in backends() if status.available]
TIS = RolloutCorrection("token", "truncate", low=0.8, high=1.2)
MIS = RolloutCorrection("sequence", "mask", low=0.5, high=2.0)
OBJECTIVES = {
    "grpo": Objective.grpo(),
    "grpo_kl3": Objective.grpo(kl_coef=0.04),
    "dr_grpo": Objective.dr_grpo(constant_length=16),
    "dapo": Objective.dapo(),
    "dual_clip": Objective.dapo(max_ratio=1.5),
    "k1": Objective(kl="k1", kl_coef=0.1, aggregation="token"),
    "k2": Objective(kl="k2", kl_coef=0.1, aggregation="token"),
    "corrected_k3": Objective(kl_coef=0.1, kl_ratio_corrected=True),
    "gspo": Objective.gspo(clip_low=0.1, clip_high=0.1),
    "gspo_kl": Objective.gspo(clip_low=0.1, clip_high=0.1, kl_coef=0.1, kl_ratio_corrected=True),
    "luspo": Objective.luspo(),
    "gmpo": Objective.gmpo(),
    "cispo": Objective.cispo(max_weight=1.2),
    "sapo": Objective.sapo(),
    "sequence_sapo": Objective.sapo(ratio_level="sequence"),
    "vespo": Objective.vespo(),
    "vespo_tis": Objective.vespo(rollout_correction=TIS),
    "reinforce": Objective.reinforce(),
    "rloo": Objective.rloo(),
    "entropy": Objective.dapo(entropy_coef=0.05),
    "gspo_entropy": Objective.gspo(clip_low=0.1, clip_high=0.1, entropy_coef=0.05),
    "top_entropy": Objective.dapo(top_entropy=0.4),
    "top_entropy_kl": Objective.grpo(top_entropy=0.4, kl_coef=0.1),
    "gspo_top_entropy": Objective.gspo(clip_low=0.1, clip_high=0.1, top_entropy=0.4),
    "tis": Objective.dapo(rollout_correction=TIS),
    "mis": Objective.grpo(rollout_correction=MIS),
    "geometric": Objective.gspo(rollout_correction=RolloutCorrection("geometric", "mask", low=0.9, high=1.1)),
    "off_policy": Objective.dapo(off_policy_threshold=0.1),
    "off_policy_kl": Objective.dapo(off_policy_threshold=0.1, kl_coef=0.1, rollout_correction=TIS),
}


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(backend: str, name: str, old: bool) -> None:
    check_against_float64(*(make(70, 33, 1003, objective=OBJECTIVES[name], old=old, seed=seed) for seed in range(3)), backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("rows", [1, 7, 256, 321])
@pytest.mark.parametrize(("width", "vocabulary"), [(1, 2), (48, 1000), (65, 2053), (64, 1024)])
def test_shapes(backend: str, rows: int, width: int, vocabulary: int) -> None:
    alone = {"masked": 0.0, "old": False} if rows == 1 else {}  # a single row must not be masked or clipped away
    check_against_float64(*(make(rows, width, vocabulary, seed=seed, **alone) for seed in range(4)), backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_one_row_more_than_a_chunk(backend: str) -> None:
    chunk = rows_per_chunk(517)
    check_against_float64(make(chunk + 1, 24, 517, masked=0.0), backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_half_precision_and_mixed(backend: str, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    # On policy, where the ratio is exactly 1: off policy, torch's bf16 logits push tokens across the clip edge and prove nothing.
    check_against_float64(make(90, 64, 1003, dtype=dtype, weight_dtype=weight_dtype, old=False), backend=backend)


def test_float64_is_exact() -> None:
    p = make(40, 16, 301, dtype=torch.float64, objective=OBJECTIVES["grpo_kl3"])
    ours, _ = fused(p)
    exact = reference(p, torch.float64)
    assert relative(ours.weight_gradient, exact.weight_gradient) < 1e-6
    assert relative(ours.logprobs[ours.logprobs != 0], exact.logprobs[ours.logprobs != 0]) < 1e-12


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_temperature(backend: str, temperature: float) -> None:
    check_against_float64(make(60, 32, 700, temperature=temperature), backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_all_logits_far_below_zero(backend: str) -> None:
    """Phantom vocabulary columns (logit 0) would take all the probability here."""
    p = make(50, 32, 1023)
    hidden = torch.cat([p.hidden, torch.ones(50, 1)], 1)
    weight = torch.cat([p.weight, torch.full((1023, 1), -25.0)], 1)
    check_against_float64(replace(p, hidden=hidden, weight=weight), backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_target_with_probability_near_one(backend: str) -> None:
    """1 - p is 1e-9 and less, below float32's resolution of p: the gradient must still have its digits."""
    p = make(32, 16, 400, objective=Objective(aggregation="token"), masked=0.0, old=False, logit_scale=0.5)
    hidden = p.hidden.clone()
    weight = p.weight.clone()
    hidden[:, 0] = torch.linspace(4.0, 5.0, 32)
    weight[:, 0] = 0.0
    weight[7, 0] = 6.5
    p = replace(p, hidden=hidden, weight=weight, targets=torch.full((32,), 7))
    ours, _ = fused(p, backend=backend)
    exact = reference(p, torch.float64)
    assert float(-exact.logprobs.max()) < 1e-8
    assert relative(ours.logprobs, exact.logprobs) < 1e-5
    assert relative(ours.hidden_gradient, exact.hidden_gradient) < 1e-5
    assert relative(ours.weight_gradient, exact.weight_gradient) < 1e-5
    assert relative(reference(p).hidden_gradient, exact.hidden_gradient) > 1e-3, "torch keeps its digits too: the test is too easy"


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("gap", [40.0, 69.0, 100.0, 500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_target_with_tiny_probability(backend: str, gap: float, dtype: torch.dtype) -> None:
    """p = e^-gap, 1e-30 at 69: the anchored sum overflows from 88 on and the row's maximum takes over."""
    p = make(20, 16, 1100, objective=Objective(aggregation="token"), masked=0.0, old=False, dtype=dtype)
    hidden = torch.cat([p.hidden, torch.zeros(20, 1)], 1)
    hidden[3:9, -1] = 1.0
    weight = torch.cat([p.weight, torch.zeros(1100, 1)], 1)
    weight[5, -1] = gap
    targets = torch.where(p.targets == 5, 6, p.targets)
    p = replace(p, hidden=hidden, weight=weight, targets=targets)
    assert float(reference(p, torch.float64).logprobs.min()) < -gap + 15
    ours, _ = fused(p, backend=backend)
    exact = reference(p, torch.float64)
    assert relative(ours.logprobs, exact.logprobs) < 1e-6
    assert float((ours.entropy - exact.entropy).abs().max()) < 2e-5
    torchs = reference(p)
    for name in ("hidden_gradient", "weight_gradient"):
        floor = torch.finfo(dtype).eps / 4 if dtype == torch.float32 else 1e-7  # advantages are float32 always
        allowed = 2 * max(relative(getattr(torchs, name), getattr(exact, name)), floor)
        assert relative(getattr(ours, name), getattr(exact, name)) <= allowed, name


@pytest.mark.parametrize("backend", AVAILABLE)
def test_no_rows(backend: str) -> None:
    p = make(0, 8, 50)
    ours, _ = fused(p, backend=backend)
    assert float(ours.loss) == 0.0
    assert ours.hidden_gradient.shape == (0, 8)
    assert torch.equal(ours.weight_gradient, torch.zeros(50, 8))


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_rows_change_nothing_whatever_they_hold(backend: str, poison: float) -> None:
    p = make(80, 24, 333, objective=OBJECTIVES["grpo_kl3"])
    clean, _ = fused(p, backend=backend)
    hidden, targets, advantages = p.hidden.clone(), p.targets.clone(), p.advantages.clone()
    old, ref = p.old.clone(), p.ref.clone()
    off = ~p.mask
    assert off.any()
    hidden[off], targets[off], advantages[off], old[off], ref[off] = poison, -100, poison, poison, poison
    dirty, result = fused(replace(p, hidden=hidden, targets=targets, advantages=advantages, old=old, ref=ref), backend=backend)
    for name in ("loss", "hidden_gradient", "weight_gradient", "logprobs", "entropy"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
    assert not result.computed[off].any()
    assert torch.equal(dirty.hidden_gradient[off], torch.zeros_like(dirty.hidden_gradient[off]))


def test_everything_masked() -> None:
    p = make(30, 8, 60)
    ours, _ = fused(replace(p, mask=torch.zeros(30, dtype=torch.bool), hidden=torch.full((30, 8), float("nan"))))
    assert float(ours.loss) == 0.0
    assert not ours.hidden_gradient.any()
    assert not ours.weight_gradient.any()


@pytest.mark.parametrize("backend", AVAILABLE)
def test_nan_in_an_unmasked_row_is_not_hidden(backend: str) -> None:
    p = make(30, 8, 60, masked=0.0)
    hidden = p.hidden.clone()
    hidden[4] = float("nan")
    ours, _ = fused(replace(p, hidden=hidden), backend=backend)
    assert torch.isnan(ours.loss)
    assert torch.isnan(ours.weight_gradient).any()


def test_a_masked_log_ratio_of_100_and_an_unmasked_kl_of_90_stay_finite() -> None:
    p = make(40, 16, 90, objective=OBJECTIVES["grpo_kl3"])
    old, ref = p.old.clone(), p.ref.clone()
    old[~p.mask] -= 100.0
    ref[p.mask] += 90.0
    ours, _ = fused(replace(p, old=old, ref=ref))
    assert torch.isfinite(ours.loss)
    assert torch.isfinite(ours.hidden_gradient).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_pieces_of_a_batch_add_up(name: str) -> None:
    """Micro-batches with the batch's global counts: loss and gradients are those of the whole."""
    p = make(120, 24, 333, objective=OBJECTIVES[name])
    whole, _ = fused(p)
    cuts = [0, 1, 5, 6, len(p.lengths)]
    parts = [(take(p, slice(a, b))) for a, b in pairwise(cuts)]
    fraction = p.objective.top_entropy
    step = {} if fraction == 1.0 else {"entropy_threshold": top_entropy_threshold(reference(p).entropy, p.mask, fraction=fraction)}
    answers = [fused(part, counts=p.counts(), **step)[0] for part in parts]
    assert sum(float(a.loss) for a in answers) == pytest.approx(float(whole.loss), rel=1e-5, abs=1e-7)
    assert relative(sum(a.weight_gradient for a in answers), whole.weight_gradient) < 1e-6
    assert relative(torch.cat([a.hidden_gradient for a in answers]), whole.hidden_gradient) < 1e-6


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_chunk_size_does_not_matter(monkeypatch: pytest.MonkeyPatch, name: str, old: bool) -> None:
    """5 rows: less than some sequences have, so that a ratio of a whole sequence is known only after a pass of its own."""
    p = make(120, 24, 333, objective=OBJECTIVES[name], old=old)
    whole, results = fused(p)
    for rows in (5, 32):
        monkeypatch.setattr(TorchBackend, "rows_per_chunk", lambda *_, rows=rows, **__: rows)
        cut, cut_results = fused(p)
        assert relative(cut.weight_gradient, whole.weight_gradient) < 3e-6
        assert relative(cut.hidden_gradient, whole.hidden_gradient) < 3e-6
        assert float(cut.loss) == pytest.approx(float(whole.loss), rel=1e-5, abs=1e-7)
        assert torch.equal(cut_results.policy_weight != 0, results.policy_weight != 0)


def test_sequences_cut_between_calls_keep_their_mean() -> None:
    """Aggregation "sequence" with a cut through a sequence: its whole length has to be given."""
    p = replace(make(12, 16, 90, objective=Objective.grpo(), masked=0.0), lengths=[12])
    whole, _ = fused(p)
    pieces = [
        fused(replace(take(replace(p, lengths=[5, 7]), slice(i, i + 1))), counts=LossCounts(12, 1), sequence_lengths=torch.tensor([12]))
        for i in (0, 1)
    ]
    assert sum(float(a.loss) for a, _ in pieces) == pytest.approx(float(whole.loss), rel=1e-5)
    assert relative(sum(a.weight_gradient for a, _ in pieces), whole.weight_gradient) < 1e-6


def test_weight_gradient_in_bf16_does_not_degrade_with_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 running sum over 64 chunks is several times worse than one chunk; a float32 one is not."""
    p = make(512, 32, 300, dtype=torch.bfloat16, old=False, masked=0.0)
    exact = reference(p, torch.float64).weight_gradient
    errors = []
    for rows in (512, 8):
        monkeypatch.setattr(TorchBackend, "rows_per_chunk", lambda *_, rows=rows, **__: rows)
        errors.append(relative(fused(p)[0].weight_gradient, exact))
    assert errors[1] <= 1.1 * errors[0]


def test_the_order_of_sequences_does_not_matter() -> None:
    p = make(90, 16, 200, objective=OBJECTIVES["grpo"])
    bounds = p.cu_seqlens.tolist()
    order = torch.randperm(len(p.lengths)).tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    shuffled = replace(
        p,
        hidden=p.hidden[rows],
        targets=p.targets[rows],
        advantages=p.advantages[rows],
        mask=p.mask[rows],
        old=p.old[rows],
        lengths=[p.lengths[i] for i in order],
    )
    first, second = fused(p)[0], fused(shuffled)[0]
    assert relative(second.weight_gradient, first.weight_gradient) < 1e-6
    assert float(first.loss) == pytest.approx(float(second.loss), rel=1e-5)


def test_half_the_upstream_gradient_halves_the_gradients() -> None:
    p = make(50, 16, 200)
    one, half = fused(p)[0], fused(p, upstream=0.5)[0]
    assert torch.equal(half.hidden_gradient, one.hidden_gradient * 0.5)
    assert torch.equal(half.weight_gradient, one.weight_gradient * 0.5)
    assert one.weight_gradient.abs().max() > 0


def test_doubling_the_counts_halves_the_loss() -> None:
    p = make(50, 16, 200)
    counts = p.counts()
    one, two = fused(p, counts=counts)[0], fused(p, counts=counts + counts)[0]
    assert float(two.loss) == pytest.approx(float(one.loss) / 2, rel=1e-6)
    assert torch.allclose(two.weight_gradient * 2, one.weight_gradient, rtol=1e-5, atol=0)


def test_padded_and_packed_give_the_same() -> None:
    p = make(60, 16, 120, objective=OBJECTIVES["grpo"])
    bounds, longest = p.cu_seqlens.tolist(), max(p.lengths)
    batch = len(p.lengths)
    padded = {
        "hidden": torch.full((batch, longest, 16), float("nan")),
        "targets": torch.full((batch, longest), -100),
        "mask": torch.zeros(batch, longest, dtype=torch.long),
        "old": torch.full((batch, longest), float("nan")),
        "advantages": torch.zeros(batch, longest),
    }
    for i, length in enumerate(p.lengths):
        rows = slice(bounds[i], bounds[i + 1])
        for name, source in (("hidden", p.hidden), ("targets", p.targets), ("mask", p.mask), ("old", p.old), ("advantages", p.advantages)):
            padded[name][i, :length] = source[rows].to(padded[name].dtype)
    hidden, weight = padded["hidden"].requires_grad_(), p.weight.detach().requires_grad_()
    result = linear_grpo_loss(
        hidden,
        weight,
        padded["targets"],
        padded["advantages"],
        objective=p.objective,
        old_logprobs=padded["old"],
        mask=padded["mask"],
    )
    result.loss.backward()
    packed = fused(p)[0]
    assert result.loss.item() == pytest.approx(float(packed.loss), rel=1e-6)
    assert torch.equal(weight.grad, packed.weight_gradient)
    assert torch.equal(hidden.grad[padded["mask"] != 0], packed.hidden_gradient[p.mask])
    assert result.logprobs.shape == (batch, longest)


def test_one_advantage_per_sequence() -> None:
    p = make(40, 16, 90)
    per_sequence = torch.randn(len(p.lengths))
    row = replace(p, advantages=per_sequence[p.sequence_of_row])
    hidden = p.hidden.detach().requires_grad_()
    result = linear_grpo_loss(
        hidden, p.weight, p.targets, per_sequence, objective=p.objective, cu_seqlens=p.cu_seqlens, old_logprobs=p.old, mask=p.mask
    )
    result.loss.backward()
    assert torch.equal(hidden.grad, fused(row)[0].hidden_gradient)


def test_rows_without_advantage_are_left_out_only_when_nothing_else_moves_them() -> None:
    p = make(40, 16, 90, masked=0.0)
    advantages = p.advantages.clone()
    advantages[::2] = 0.0
    exact = reference(replace(p, advantages=advantages), torch.float64)
    ours, result = fused(replace(p, advantages=advantages))
    assert result.computed.tolist() == (advantages != 0).tolist()
    assert relative(ours.weight_gradient, exact.weight_gradient) < 1e-5  # the normaliser still counts them
    with_kl = make(40, 16, 90, masked=0.0, objective=OBJECTIVES["grpo_kl3"])
    _, result = fused(replace(with_kl, advantages=advantages))
    assert result.computed.all()


def test_any_stride() -> None:
    p = make(40, 16, 90)
    plain = fused(p)[0]
    wide = torch.randn(40, 32)
    wide[:, ::2] = p.hidden
    tall = p.weight.t().contiguous().t()
    strided = fused(replace(p, hidden=wide[:, ::2], weight=tall, advantages=p.advantages.repeat_interleave(3)[::3]))[0]
    assert relative(strided.weight_gradient, plain.weight_gradient) < 1e-6
    assert relative(strided.hidden_gradient, plain.hidden_gradient) < 1e-6


def test_expanded_inputs() -> None:
    """Stride 0: one hidden row for all tokens, and one advantage for all."""
    p = make(24, 16, 90, masked=0.0)
    hidden = p.hidden[:1].expand(24, 16)
    spread = replace(p, hidden=hidden, advantages=torch.tensor(0.7).expand(24), old=None)
    assert relative(fused(spread)[0].weight_gradient, reference(spread, torch.float64).weight_gradient) < 1e-6


@dataclass
class Work:
    """Which products a call asked for, and which gradient buffers it made."""

    sweeps: list[tuple[str, bool]] = field(default_factory=list)  # (what was kept, whether GEMM 2 ran)
    weight_products: int = 0
    weight_buffers: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    seen = Work()
    sweep, add, init = TorchBackend.sweep, TorchBackend.add_exponentials, HeadPass.__init__

    def spy_sweep(*arguments: Any, keep: str, weighted_rows: bool) -> Any:
        seen.sweeps.append((keep, weighted_rows))
        return sweep(*arguments, keep=keep, weighted_rows=weighted_rows)

    def spy_add(*arguments: Any, **flags: bool) -> None:
        seen.weight_products += 1
        add(*arguments, **flags)

    def spy_init(self: HeadPass, *arguments: Any) -> None:
        init(self, *arguments)
        seen.weight_buffers += self.parameter_gradients()[0] is not None

    monkeypatch.setattr(TorchBackend, "sweep", spy_sweep)
    monkeypatch.setattr(TorchBackend, "add_exponentials", spy_add)
    monkeypatch.setattr(HeadPass, "__init__", spy_init)
    return seen


def test_frozen_weight_costs_no_product_and_no_buffer(work: Work) -> None:
    p = make(40, 16, 90)
    hidden = p.hidden.detach().requires_grad_()
    result = linear_grpo_loss(hidden, p.weight, p.targets, p.advantages, objective=p.objective, old_logprobs=p.old, mask=p.mask)
    result.loss.backward()
    assert work == Work([("nothing", True)], 0, 0)
    assert torch.equal(hidden.grad, fused(p)[0].hidden_gradient)


def test_without_gradients_only_the_loss_is_computed(work: Work) -> None:
    p = make(40, 16, 90)
    with torch.no_grad():
        hidden, weight = p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()
        result = linear_grpo_loss(
            hidden, weight, p.targets, p.advantages, objective=p.objective, cu_seqlens=p.cu_seqlens, old_logprobs=p.old, mask=p.mask
        )
    assert not result.loss.requires_grad
    assert work == Work([("nothing", False)], 0, 0)
    assert float(result.loss) == float(fused(p)[0].loss)


def test_logits_of_minus_infinity_are_no_probability() -> None:
    """A vocabulary entry ruled out by -inf weights: entropy and gradients as if it were not there."""
    p = make(30, 8, 60, masked=0.0)
    hidden = torch.cat([p.hidden, torch.ones(30, 1)], 1)
    weight = torch.cat([p.weight, torch.zeros(60, 1)], 1)
    ruled_out = torch.cat([weight, torch.full((1, 9), 0.0)])
    ruled_out[-1, -1] = float("-inf")
    for backend in AVAILABLE:
        with torch.no_grad():
            plain = linear_grpo_loss(hidden, weight, p.targets, p.advantages, objective=p.objective, backend=backend)
            result = linear_grpo_loss(hidden, ruled_out, p.targets, p.advantages, objective=p.objective, backend=backend)
        assert torch.allclose(result.logprobs, plain.logprobs, atol=1e-6)
        assert torch.allclose(result.entropy, plain.entropy, atol=1e-5)


PRECISIONS = {
    "default": "pass",
    "set_float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "high": "torch.set_float32_matmul_precision('high')",
    "allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "mkldnn": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "cuda": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "all": "torch.backends.fp32_precision = 'bf16'",
}


@pytest.mark.parametrize("setting", PRECISIONS)
def test_matmul_precision_settings_do_not_matter(setting: str) -> None:
    """Old and new ways to set them, which torch does not let a process mix: one process each. They are as before afterwards."""
    code = f"""
import torch
from grpo_kernels import linear_logprobs
from grpo_kernels.backends.torch import TorchBackend
def read(what):
    try:
        return what()
    except RuntimeError:
        return "mixed"  # as torch refuses to say when only the new settings were used
def precisions():
    # The third is what every cuBLAS product asks; it raises when the old and the new settings contradict each other.
    settings = torch.backends.cuda.matmul
    return (settings.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision, read(torch._C._get_cublas_allow_tf32),
            read(torch.get_float32_matmul_precision), settings.allow_bf16_reduced_precision_reduction)
seen, real = [], TorchBackend.sweep
TorchBackend.sweep = lambda *a, **k: (seen.append(precisions()), real(*a, **k))[1]
{PRECISIONS[setting]}
before = precisions()
full = ("ieee", "ieee", False, "highest", False)
assert before != full
linear_logprobs(torch.randn(3, 4), torch.randn(5, 4), torch.arange(3))
assert seen == [full], seen
assert precisions() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_backwards() -> None:
    p = make(30, 16, 90)
    hidden = p.hidden.detach().requires_grad_()
    result = linear_grpo_loss(hidden, p.weight, p.targets, p.advantages, objective=p.objective, old_logprobs=p.old, mask=p.mask)
    result.loss.backward(retain_graph=True)
    first = hidden.grad.clone()
    result.loss.backward()
    assert torch.equal(hidden.grad, first * 2)
    with pytest.raises(RuntimeError, match="retain_graph"):
        result.loss.backward()


def test_a_second_derivative_is_refused() -> None:
    p = make(30, 16, 90)
    hidden = p.hidden.detach().requires_grad_()
    result = linear_grpo_loss(hidden, p.weight, p.targets, p.advantages, objective=p.objective, old_logprobs=p.old, mask=p.mask)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(result.loss, hidden, create_graph=True)


def test_inference_mode() -> None:
    p = make(40, 16, 90, objective=OBJECTIVES["grpo_kl3"])
    with torch.inference_mode():
        tensors = [t.clone() for t in (p.hidden, p.weight, p.targets, p.advantages)]
        result = linear_grpo_loss(
            *tensors, objective=p.objective, cu_seqlens=p.cu_seqlens, old_logprobs=p.old.clone(), ref_logprobs=p.ref.clone(), mask=p.mask
        )
    assert float(result.loss) == float(fused(p)[0].loss)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_default_dtype_does_not_matter(name: str) -> None:
    p = make(40, 16, 90, objective=OBJECTIVES[name])
    counts = LossCounts(tokens=3_000_001, sequences=40_001)
    plain = fused(p, counts=counts)[0]
    torch.set_default_dtype(torch.float16)
    try:
        other = fused(p, counts=counts)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other.weight_gradient, plain.weight_gradient)
    assert plain.weight_gradient.any()


def test_autocast_does_not_round_the_products() -> None:
    p = make(30, 64, 900)
    plain = fused(p)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fused(p)[0]
    assert torch.equal(plain.logprobs, cast.logprobs)
    assert torch.equal(plain.weight_gradient, cast.weight_gradient)


def test_clipping_statistics_and_gradients_have_their_textbook_values() -> None:
    """One token each: ratio 1.3 with A = 1 (clipped high), 1.3 with A = -1, 0.7 with A = -1 (clipped low), 0.7 with A = 1."""
    weight = torch.eye(4)
    hidden = torch.tensor([[1.0, 0.5, 0.0, -0.5]]).repeat(4, 1)
    targets = torch.tensor([1, 1, 1, 1])
    now = torch.log_softmax(hidden @ weight.t(), -1)[:, 1]
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    objective = Objective(aggregation="token")
    probability = torch.softmax(hidden[0], 0)
    onehot = torch.eye(4)[1]
    for i, (loss, coefficient) in enumerate([(-1.2, 0.0), (1.3, 1.3), (0.8, 0.0), (-0.7, -0.7)]):
        h = hidden[i : i + 1].clone().requires_grad_()
        result = linear_grpo_loss(
            h, weight, targets[:1], advantages[i : i + 1], objective=objective, old_logprobs=(now - ratio.log())[i : i + 1]
        )
        result.loss.backward()
        assert result.loss.item() == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(h.grad[0], coefficient * (onehot - probability), atol=1e-6)
        assert bool(result.clipped_high) == (i == 0)
        assert bool(result.clipped_low) == (i == 2)
        assert float(result.ratio) == pytest.approx(float(ratio[i]), rel=1e-5)


@pytest.mark.parametrize(("objective", "expected"), [("grpo", 0.0), ("dapo", -0.6), ("dr_grpo", -0.1875)])
def test_aggregations_have_their_textbook_values(objective: str, expected: float) -> None:
    """First update (loss per token is -A), advantages +1 and -1, lengths 4 and 1: as measured on TRL."""
    chosen = {"grpo": Objective.grpo(), "dapo": Objective.dapo(), "dr_grpo": Objective.dr_grpo(constant_length=8)}[objective]
    hidden = torch.randn(5, 3)
    result = linear_grpo_loss(
        hidden, torch.randn(7, 3), torch.arange(5), torch.tensor([1.0, -1.0]), objective=chosen, cu_seqlens=torch.tensor([0, 4, 5])
    )
    assert float(result.loss) == pytest.approx(expected, abs=1e-7)


def test_an_unmasked_sequence_that_is_all_masked_does_not_count() -> None:
    p: Problem = make(30, 8, 40, objective=OBJECTIVES["grpo"], masked=0.0)
    mask = p.mask.clone()
    mask[p.sequence_of_row == 0] = False
    assert replace(p, mask=mask).counts() == LossCounts(int(mask.sum()), len(p.lengths) - 1)
    check_against_float64(replace(p, mask=mask))


@pytest.mark.parametrize("old", [True, False])
def test_a_policy_loss_of_ones_own(old: bool) -> None:
    """PPO's clip written by a user: bit for bit the built-in one, with KL, averages and the rest as configured."""

    def clip(batch: TokenBatch) -> torch.Tensor:
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        return -torch.minimum(ratio * batch.advantages, ratio.clamp(1.0 - 0.2, 1.0 + 0.2) * batch.advantages)

    p = make(60, 16, 90, objective=Objective.grpo(kl_coef=0.1), old=old)
    mine, _ = fused(replace(p, objective=Objective(policy_loss=clip, kl_coef=0.1)))
    theirs, _ = fused(p)
    assert torch.equal(mine.loss, theirs.loss)
    assert torch.equal(mine.weight_gradient, theirs.weight_gradient)


def test_a_policy_loss_of_ones_own_may_look_at_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """GSPO's ratio by a user, who says with ratio_level that tokens are coupled; chunks are smaller than the sequences."""

    def gspo(batch: TokenBatch) -> torch.Tensor:
        ratio = batch.sequence_mean(batch.logprobs - batch.old_logprobs).exp()
        return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.9, 1.1) * batch.advantages)

    monkeypatch.setattr(TorchBackend, "rows_per_chunk", lambda *_, **__: 5)
    p = make(60, 16, 90, objective=Objective.gspo(clip_low=0.1, clip_high=0.1))
    mine, _ = fused(replace(p, objective=Objective(policy_loss=gspo, ratio_level="sequence")))
    theirs, _ = fused(p)
    assert relative(mine.weight_gradient, theirs.weight_gradient) < 1e-6
    assert relative(mine.hidden_gradient, theirs.hidden_gradient) < 1e-6


def test_a_policy_loss_that_looks_at_parts_of_sequences_is_refused() -> None:
    p = make(60, 16, 90, objective=Objective(policy_loss=lambda batch: batch.sequence_mean(batch.logprobs)))
    with pytest.raises(ValueError, match="needs Objective\\(ratio_level='sequence'\\)"):
        fused(p)


def test_a_policy_loss_without_a_gradient_has_none() -> None:
    p = make(60, 16, 90, objective=Objective(policy_loss=lambda batch: torch.zeros_like(batch.logprobs), kl_coef=0.0))
    hidden, weight, _ = leaves(p)
    linear_grpo_loss(hidden, weight, p.targets, p.advantages, objective=p.objective, cu_seqlens=p.cu_seqlens).loss.backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_policy_loss_that_writes_to_its_batch_changes_no_result() -> None:
    def careless(batch: TokenBatch) -> torch.Tensor:
        loss = -batch.advantages * batch.logprobs
        batch.entropy.zero_()
        batch.old_logprobs.zero_()
        return loss

    p = make(60, 16, 90, objective=Objective.reinforce(entropy_coef=0.1), old=False)
    mine, result = fused(replace(p, objective=Objective(policy_loss=careless, aggregation="token", entropy_coef=0.1)))
    theirs, expected = fused(p)
    assert torch.equal(mine.loss, theirs.loss)
    assert torch.equal(mine.hidden_gradient, theirs.hidden_gradient)
    assert torch.equal(result.entropy, expected.entropy)
    assert torch.equal(result.logprobs, expected.logprobs)


@pytest.mark.parametrize("name", ["old", "ref"])
def test_a_nan_in_an_unmasked_log_probability_shows_in_the_gradients(name: str) -> None:
    """A clamp would give it the gradient 0, and a trainer that looks at the norm would step."""
    p = make(60, 16, 90, objective=Objective.dapo(kl_coef=0.1), masked=0.0)
    values = getattr(p, name).clone()
    values[7] = float("nan")
    answer, result = fused(replace(p, **{name: values}))
    assert answer.loss.isnan()
    assert answer.hidden_gradient[7].isnan().all()
    assert torch.isfinite(answer.hidden_gradient[:7]).all()
    leaf = result.logprobs.clone().requires_grad_()
    arguments = {"old_logprobs": p.old, "ref_logprobs": p.ref, f"{name}_logprobs": values}
    grpo_loss_from_logprobs(leaf, p.advantages, objective=p.objective, **arguments).loss.backward()
    assert leaf.grad[7].isnan()


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("bias", [torch.randn(90, 2)[:, 0], torch.ones(1).expand(90)])
def test_a_bias_of_any_stride(backend: str, bias: torch.Tensor) -> None:
    check_against_float64(replace(make(60, 16, 90, bias=True), bias=bias), backend=backend)


def test_the_default_device_does_not_matter() -> None:
    p = make(30, 8, 20, objective=Objective.grpo())
    expected, _ = fused(p)
    cu_seqlens = p.cu_seqlens
    with torch.device("meta"):
        hidden, weight, _ = leaves(p)
        result = linear_grpo_loss(
            hidden, weight, p.targets, p.advantages, objective=p.objective, cu_seqlens=cu_seqlens, old_logprobs=p.old, mask=p.mask
        )
        result.loss.backward()
    assert torch.equal(hidden.grad, expected.hidden_gradient)


def test_threads_leave_the_precision_setting_as_it_was() -> None:
    p = make(300, 16, 2000)
    torch.set_float32_matmul_precision("medium")
    try:
        work = [threading.Thread(target=lambda: [fused(p) for _ in range(5)]) for _ in range(4)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_objectives_with_functions_are_forgotten() -> None:
    """A function may hold a batch's tensors."""

    def objective() -> weakref.ref[Objective]:
        tensor = torch.zeros(1)
        return weakref.ref(Objective(policy_loss=lambda batch: batch.logprobs + tensor))

    forgotten = objective()
    gc.collect()
    assert forgotten() is None


@pytest.mark.parametrize("policy_loss", ["reinforce", "cispo", "clip"])
def test_an_impossible_target_without_advantage_costs_only_its_kl(policy_loss: str) -> None:
    logprobs = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    objective = Objective(policy_loss=policy_loss, kl_coef=0.1, aggregation="token")
    ref, old = torch.tensor([-1.0, -3.0]), torch.tensor([-1.0, -3.0])
    result = grpo_loss_from_logprobs(logprobs, torch.tensor([1.0, 0.0]), objective=objective, ref_logprobs=ref, old_logprobs=old)
    assert torch.isfinite(result.loss)


@pytest.mark.parametrize("returned", [3.0, torch.zeros(()), torch.zeros(3)])
def test_a_policy_loss_of_the_wrong_shape_is_named(returned: Any) -> None:
    p = make(60, 16, 90, objective=Objective(policy_loss=lambda batch: returned))
    with pytest.raises(ValueError, match=r"policy_loss returned .*; it must return a tensor of one real loss per token"):
        fused(p)


def test_an_advantage_per_row_or_per_sequence_is_never_guessed() -> None:
    """Four rows and, one of them empty, four sequences."""
    arguments = (torch.randn(4, 3), torch.randn(7, 3), torch.arange(4), torch.tensor([1.0, 5.0, -1.0, 2.0]))
    with pytest.raises(ValueError, match="leave the empty sequences out of cu_seqlens"):
        linear_grpo_loss(*arguments, objective=Objective.dapo(), cu_seqlens=torch.tensor([0, 2, 2, 3, 4]))
    one_each = linear_grpo_loss(*arguments, objective=Objective.dapo(), cu_seqlens=torch.arange(5))
    assert float(one_each.loss) == pytest.approx(-1.75)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "grpo"),
        ("counts", (4, 1)),
        ("advantages", [1.0] * 5),
        ("mask", [1] * 5),
        ("bias", 0.0),
        ("weight", None),
        ("support", 3),
    ],
)
def test_wrong_types_are_named(name: str, value: object) -> None:
    good = {
        "hidden": torch.randn(5, 3),
        "weight": torch.randn(7, 3),
        "targets": torch.arange(5),
        "advantages": torch.randn(5),
        "objective": Objective.dapo(),
    }
    with pytest.raises(TypeError, match=f"{name} is "):
        linear_grpo_loss(**{**good, name: value})


def test_masked_rows_may_hold_any_temperature() -> None:
    p = make(6, 8, 20, masked=0.0)
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    heat = torch.tensor([1.0, 1.0, float("nan"), 1.0, 1.0, 1.0])
    arguments = {"objective": Objective.dapo(), "mask": mask}
    with_nan = linear_grpo_loss(p.hidden, p.weight, p.targets, p.advantages, temperature=heat, **arguments)
    assert torch.equal(with_nan.loss, linear_grpo_loss(p.hidden, p.weight, p.targets, p.advantages, **arguments).loss)


@pytest.mark.parametrize("counts", [(-1, 1), (1, -1), (float("nan"), 2), (1.5, 2)])
def test_bad_counts_are_named(counts: tuple) -> None:
    with pytest.raises(ValueError, match="counts are integers"):
        LossCounts(*counts)


BAD = {
    "hidden has shape": {"hidden": torch.zeros(4)},
    "weight has shape": {"weight": torch.zeros(7, 4)},
    "targets has shape": {"targets": torch.zeros(4, dtype=torch.long)},
    "targets holds 7 at row 2": {"targets": torch.tensor([0, 1, 7, 2, 3])},
    "targets holds -1 at row 0": {"targets": torch.tensor([-1, 1, 6, 2, 3])},
    "hidden has dtype": {"hidden": torch.zeros(5, 3, dtype=torch.int32)},
    "advantages has shape": {"advantages": torch.zeros(2)},
    "advantages has dtype": {"advantages": torch.ones(5, dtype=torch.long)},
    "old_logprobs has shape": {"old_logprobs": torch.zeros(4)},
    "mask has shape": {"mask": torch.ones(4, dtype=torch.bool)},
    "mask has shape .* dtype torch.float32": {"mask": torch.ones(5)},
    "temperature is 0": {"temperature": 0.0},
    "temperature is nan": {"temperature": float("nan")},
    "temperature is 1e-39": {"temperature": 1e-39},
    "temperature is 1e\\+300": {"temperature": 1e300},
    "targets has shape .* dtype torch.complex64": {"targets": torch.zeros(5, dtype=torch.complex64)},
    "mask has shape .* dtype torch.complex64": {"mask": torch.ones(5, dtype=torch.complex64)},
    "backend is 'gpu'": {"backend": "gpu"},
    "cu_seqlens is": {"cu_seqlens": torch.tensor([0, 3])},
    "cu_seqlens has shape": {"cu_seqlens": torch.tensor([0.0, 5.0])},
    "needs the boundaries": {"objective": Objective.grpo()},
    "ref_logprobs is None": {"objective": Objective(kl_coef=0.1, aggregation="token")},
    "rollout_logprobs is None": {"objective": Objective.dapo(rollout_correction=TIS)},
    "ratio_level 'sequence' needs the boundaries": {"objective": Objective(ratio_level="sequence", aggregation="token")},
    "policy_loss 'gmpo' needs the boundaries": {"objective": Objective(policy_loss="gmpo", aggregation="token")},
    "off_policy_threshold needs the boundaries": {"objective": Objective.dapo(off_policy_threshold=0.1)},
    "rollout_correction.level needs the boundaries": {
        "objective": Objective.dapo(rollout_correction=MIS),
        "rollout_logprobs": torch.zeros(5),
    },
    "sequence_lengths has shape": {"sequence_lengths": torch.tensor([5, 5]), "cu_seqlens": torch.tensor([0, 5])},
    "sequence_lengths\\[0\\] is 4, but 5 of": {"sequence_lengths": torch.tensor([4]), "cu_seqlens": torch.tensor([0, 5])},
    "sequence_lengths is given, but ratio_level": {
        "objective": Objective.gspo(),
        "sequence_lengths": torch.tensor([9]),
        "cu_seqlens": torch.tensor([0, 5]),
    },
    "entropy_threshold is 1.0, but objective.top_entropy is 1": {"entropy_threshold": 1.0},
    "entropy_threshold is nan": {"objective": Objective.dapo(top_entropy=0.5), "entropy_threshold": float("nan")},
    "bias has shape": {"bias": torch.zeros(6)},
    "bias has dtype": {"bias": torch.zeros(7, dtype=torch.int32)},
    "softcap is 0.0": {"softcap": 0.0},
    "softcap is '3'": {"softcap": "3"},
    "softcap is inf": {"softcap": float("inf")},
    "temperature has shape": {"temperature": torch.ones(4)},
    "temperature holds 0.0 at row 1": {"temperature": torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    good = {
        "hidden": torch.randn(5, 3),
        "weight": torch.randn(7, 3),
        "targets": torch.arange(5),
        "advantages": torch.randn(5),
        "objective": Objective.dapo(),
    }
    with pytest.raises(ValueError, match=message):
        linear_grpo_loss(**{**good, **BAD[message]})
