"""The operators on the Triton backend: in Triton's interpreter, or on an NVIDIA GPU where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import (
    LossCounts,
    Objective,
    backends,
    group_advantages,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    selected_logprobs,
    tune,
)
from grpo_kernels.backends import select_backend
from grpo_kernels.backends.triton import TritonBackend
from grpo_kernels.head import Head, VocabularySlice
from problems import DEVICE, Problem, check_against_float64, fused, leaves, make, reference, relative
from test_linear_loss import OBJECTIVES

pytest.importorskip("triton", reason="triton is for Linux only")
from grpo_kernels.triton_kernels import selection

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # of the interpreter's NumPy, where kernels mask later

STRATEGIES = ("library", "anchored")
HALF = {"dtype": torch.bfloat16}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(selection.OVERRIDE, request.param)
    return request.param


def here(p: Problem) -> Problem:
    tensors = {field.name: getattr(p, field.name) for field in fields(p)}
    return replace(p, **{name: value.to(DEVICE) for name, value in tensors.items() if isinstance(value, Tensor)})


def make_here(*shape: int, **settings: Any) -> Problem:
    return here(make(*shape, **settings))


@pytest.mark.parametrize("shape", [(30, 48, 301), (1, 16, 1000), (37, 7, 64), (9, 64, 2053)])
def test_both_strategies_are_within_twice_torchs_error(strategy: str, shape: tuple[int, int, int]) -> None:
    alone = {"masked": 0.0, "old": False} if shape[0] == 1 else {}
    problems = [make_here(*shape, **HALF, objective=OBJECTIVES["grpo_kl3"], seed=seed, **alone) for seed in range(3)]
    check_against_float64(*problems, backend="triton")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name: str) -> None:
    check_against_float64(*(make_here(20, 16, 130, objective=OBJECTIVES[name], seed=seed) for seed in (1, 2)), backend="triton")


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, None), (torch.float16, None), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_other_dtypes_are_multiplied_in_float32(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    check_against_float64(
        *(make_here(30, 24, 300, dtype=dtype, weight_dtype=weight_dtype, old=False, seed=s) for s in range(2)), backend="triton"
    )


def test_float64_is_torchs() -> None:
    p = make_here(20, 16, 130, dtype=torch.float64)
    ours, torchs = fused(p, backend="triton")[0], fused(p, backend="torch")[0]
    assert torch.equal(ours.weight_gradient, torchs.weight_gradient)
    assert torch.equal(ours.logprobs, torchs.logprobs)


HEADS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "soft cap": {"softcap": 5.0},
    "both": {"bias": True, "softcap": 5.0},
    "row temperatures": {"temperature": torch.linspace(0.5, 1.5, 24)},
}


@pytest.mark.parametrize(
    ("dtype", "way", "name", "head"),
    [(torch.bfloat16, "library", name, head) for name in ("dapo", "entropy") for head in HEADS]
    + [(torch.bfloat16, "anchored", "dapo", head) for head in ("bias", "row temperatures")]  # with a soft cap or a bonus it is the library
    + [(torch.float32, "library", name, "both") for name in ("dapo", "entropy")],
)
def test_heads(dtype: torch.dtype, way: str, name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.OVERRIDE, way)
    problems = [make_here(24, 16, 130, dtype=dtype, objective=OBJECTIVES[name], seed=seed, **HEADS[head]) for seed in range(3)]
    check_against_float64(*problems, backend="triton")


def test_a_transposed_weight_and_a_strided_bias(strategy: str) -> None:
    p = make_here(24, 16, 130, **HALF, bias=True)
    tied = p.weight.t().contiguous().t()
    spread = p.bias.repeat_interleave(2)[::2]
    assert tied.stride(1) != 1
    assert spread.stride(0) == 2
    check_against_float64(replace(p, weight=tied, bias=spread), backend="triton")


@pytest.mark.parametrize(("strategy", "vocabulary"), [("library", 129920), ("library", 151936), ("anchored", 50257)])
def test_no_phantom_columns(strategy: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies that no block divides, all logits about -15: a column that is not there would take all the probability."""
    monkeypatch.setenv(selection.OVERRIDE, strategy)
    p = make(3, 8, vocabulary, **HALF, masked=0.0, old=False, logit_scale=0.5)
    hidden = torch.cat([p.hidden, torch.ones(3, 1, **HALF)], 1)
    weight = torch.cat([p.weight, torch.full((vocabulary, 1), -15.0, **HALF)], 1)
    p = here(replace(p, hidden=hidden, weight=weight))
    assert float(reference(p, torch.float64).logprobs.max()) < 0
    check_against_float64(p, backend="triton")


@pytest.mark.parametrize("name", ["dapo", "gspo", "entropy", "gspo_entropy"])
@pytest.mark.parametrize("old", [True, False])
def test_extreme_rows_are_redone(monkeypatch: pytest.MonkeyPatch, strategy: str, name: str, old: bool) -> None:
    """Targets 100 nats below the maximum in some rows of several chunks, for objectives whose slopes need them and others."""
    monkeypatch.setattr(TritonBackend, "rows_per_chunk", lambda *_, **__: 12)
    p = make(30, 16, 130, **HALF, objective=OBJECTIVES[name], masked=0.0, old=False)
    hidden = torch.cat([p.hidden, torch.zeros(30, 1, **HALF)], 1)
    hidden[[3, 4, 20], -1] = 1.0
    weight = torch.cat([p.weight, torch.zeros(130, 1, **HALF)], 1)
    weight[5, -1] = 100.0
    p = here(replace(p, hidden=hidden, weight=weight, targets=torch.where(p.targets == 5, 6, p.targets)))
    exact = reference(p, torch.float64)
    if old:
        p = replace(p, old=exact.logprobs.float() + 0.1)
        exact = reference(p, torch.float64)
    assert int((exact.logprobs < -80).sum()) == 3
    ours, _ = fused(p, backend="triton")
    torchs = reference(p)
    assert relative(ours.logprobs, exact.logprobs) < 1e-6
    for part in ("hidden_gradient", "weight_gradient"):
        allowed = 2 * max(relative(getattr(torchs, part), getattr(exact, part)), torch.finfo(torch.bfloat16).eps / 4)
        assert relative(getattr(ours, part), getattr(exact, part)) <= allowed, part


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_rows_change_nothing_whatever_they_hold(strategy: str, poison: float) -> None:
    p = make_here(30, 16, 130, **HALF)
    clean, _ = fused(p, backend="triton")
    hidden, targets = p.hidden.clone(), p.targets.clone()
    hidden[~p.mask], targets[~p.mask] = poison, -100
    dirty, _ = fused(replace(p, hidden=hidden, targets=targets), backend="triton")
    for name in ("loss", "hidden_gradient", "weight_gradient", "logprobs", "entropy"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
    assert float(clean.weight_gradient.float().norm()) > 0


def test_nan_in_a_row_that_counts_is_not_hidden(strategy: str) -> None:
    p = make_here(20, 16, 130, **HALF, masked=0.0)
    hidden = p.hidden.clone()
    hidden[7] = float("nan")
    ours, result = fused(replace(p, hidden=hidden), backend="triton")
    assert torch.equal(result.logprobs.isnan(), torch.arange(20, device=DEVICE) == 7)
    assert ours.weight_gradient.isnan().any()


def test_no_rows() -> None:
    p = make_here(0, 8, 50, **HALF)
    ours, _ = fused(p, backend="triton")
    assert float(ours.loss) == 0.0
    assert torch.equal(ours.weight_gradient, torch.zeros_like(p.weight))


def test_the_cut_does_not_matter(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """One chunk writes the weight's gradient as bfloat16, several sum it in float32: the same up to its rounding."""
    p = make_here(30, 16, 130, **HALF)
    whole, _ = fused(p, backend="triton")
    monkeypatch.setattr(TritonBackend, "rows_per_chunk", lambda *_, **__: 7)
    cut, _ = fused(p, backend="triton")
    exact = reference(p, torch.float64)
    assert relative(cut.weight_gradient, exact.weight_gradient) < 1.5 * relative(whole.weight_gradient, exact.weight_gradient)
    assert torch.allclose(cut.logprobs, whole.logprobs, atol=1e-6)


@pytest.mark.parametrize(("rows", "dtype"), [(20, torch.bfloat16), (20, torch.float32)])
def test_upstream_factor_and_a_second_backward(rows: int, dtype: torch.dtype) -> None:
    p = make_here(rows, 16, 130, dtype=dtype)
    hidden, weight, _ = leaves(p)
    loss = linear_grpo_loss(hidden, weight, p.targets, p.advantages, objective=p.objective, mask=p.mask, backend="triton").loss
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.3, device=DEVICE), retain_graph=True)
    last = torch.autograd.grad(loss * 0.3, (hidden, weight))
    for one, some, end in zip(once, scaled, last, strict=True):
        assert relative(some, 0.3 * one.double()) < torch.finfo(dtype).eps
        assert torch.equal(some, end)
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, hidden)


def test_frozen_weight_or_hidden(strategy: str) -> None:
    p = make_here(20, 16, 130, **HALF)
    both, _ = fused(p, backend="triton")
    for frozen in ("hidden", "weight"):
        tensors = {name: getattr(p, name).detach().requires_grad_(name != frozen) for name in ("hidden", "weight")}
        linear_grpo_loss(
            **tensors, targets=p.targets, advantages=p.advantages, objective=p.objective, old_logprobs=p.old, mask=p.mask, backend="triton"
        ).loss.backward()
        moving = "weight" if frozen == "hidden" else "hidden"
        assert tensors[frozen].grad is None
        assert torch.equal(tensors[moving].grad, getattr(both, f"{moving}_gradient"))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_logprobs(strategy: str, dtype: torch.dtype, entropy: bool) -> None:
    p = make_here(25, 16, 130, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(25, generator=generator).to(DEVICE) for _ in range(2)]

    def gradients(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        hidden, weight, _ = leaves(p, dtype)
        result = linear_logprobs(hidden, weight, p.targets, mask=p.mask, backend=backend)
        value = (result.logprobs * slopes[0]).sum() + ((result.entropy * slopes[1]).sum() if entropy else 0)
        return (*torch.autograd.grad(value, (hidden, weight)), result.logprobs.detach(), result.entropy.detach())

    ours, exact = gradients("triton", dtype), gradients("torch", torch.float64)
    bound = 5e-3 if dtype == torch.bfloat16 else 1e-6
    assert relative(ours[0], exact[0]) < bound
    assert relative(ours[1], exact[1]) < bound
    assert float((ours[2] - exact[2]).abs().max()) < 1e-5
    assert float((ours[3] - exact[3]).abs().max()) < 1e-5


class Launches(TorchDispatchMode):
    """The names of what is launched, in order; "wait" for what makes the host wait for a GPU: values read, shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        waits = by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "is_nonzero")
        self.names.append("wait" if waits else name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["dapo", "grpo_kl3", "entropy"])
def test_nothing_waits_for_the_device_between_products(monkeypatch: pytest.MonkeyPatch, strategy: str, name: str) -> None:
    """Six chunks are launched ahead of the device, one after another."""
    monkeypatch.setattr(TritonBackend, "rows_per_chunk", lambda *_, **__: 5)
    p = make_here(30, 16, 130, **HALF, objective=OBJECTIVES[name], masked=0.0)
    with Launches() as mode:
        fused(p, backend="triton")
    products = [at for at, launched in enumerate(mode.names) if launched in ("mm", "addmm", "addmm_")]
    assert len(products) >= 12
    assert "wait" in mode.names, "the check sees nothing"
    assert "wait" not in mode.names[products[0] : products[-1]]


def test_rows_per_chunk(strategy: str) -> None:
    """All at once where that takes no more than float32 sums of the weight's gradient would, else what fits the workspace."""
    backend = TritonBackend(torch.device(DEVICE))
    wide, narrow = (Head(torch.empty(151936, width, dtype=torch.bfloat16, device="meta")) for width in (4096, 64))

    def rows(head: Head, count: int, keep: Any = "exponentials", weight_gradient: bool = True) -> int:
        return backend.rows_per_chunk(head, count, keep, weight_gradient=weight_gradient)

    assert rows(wide, 4000) == 4000
    assert rows(wide, 5000) == {"library": 2048, "anchored": 4096}[strategy]
    assert rows(narrow, 4000) == {"library": 2048, "anchored": 4000}[strategy]
    assert rows(narrow, 4000, "distances") == 2048
    assert rows(wide, 4000, "distances") == 4000
    assert rows(wide, 4000, "distances", weight_gradient=False) == 2048, "nothing is saved"
    huge = Head(torch.empty(2_000_000, 1, dtype=torch.bfloat16, device="meta"))
    assert rows(huge, 10**6, "distances") == 1024
    assert rows(huge, 0) == 1
    # Of a split vocabulary all processes take the same chunks, whatever their way.
    part = VocabularySlice(group=None, first=0, total=303872, largest=151936)
    assert rows(replace(wide, slice=part), 5000) == 2048


def test_no_workspace_is_kept_until_backward(strategy: str) -> None:
    """It is as large as the gradients, and the model's own backward comes before it would go."""
    p = make_here(20, 16, 130, **HALF)
    made = []
    real = TritonBackend._buffer

    def spy(self: TritonBackend, *arguments: Any) -> Tensor:
        buffer = real(self, *arguments)
        made.append(weakref.ref(self._workspace))
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonBackend, "_buffer", spy)
        hidden, weight, _ = leaves(p)
        loss = linear_grpo_loss(hidden, weight, p.targets, p.advantages, objective=p.objective, softcap=9.0, backend="triton").loss
        logprobs = linear_logprobs(hidden, weight, p.targets, softcap=9.0, backend="triton").logprobs
        assert len(made) == 2
        assert [buffer() for buffer in made] == [None, None]
        (loss + logprobs.sum()).backward()
        assert len(made) == 3
        assert made[2]() is None


# The logits level


def logits_of(p: Problem, dtype: torch.dtype) -> Tensor:
    return (p.hidden.double() @ p.weight.double().t()).to(dtype)


def from_logits(p: Problem, logits: Tensor, backend: str, **more: Any) -> tuple[Any, Tensor]:
    logits = logits.detach().requires_grad_()
    result = grpo_loss(
        logits * 1.0 if more.get("overwrite_logits") else logits, p.targets, p.advantages, objective=p.objective,
        cu_seqlens=p.cu_seqlens.to(DEVICE), old_logprobs=p.old, ref_logprobs=p.ref, rollout_logprobs=p.rollout, mask=p.mask,
        backend=backend, **more,
    )  # fmt: skip
    result.loss.backward()
    return result, logits.grad


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["grpo_kl3", "dual_clip", "cispo", "sapo", "reinforce", "entropy", "gspo", "off_policy", "top_entropy"])
def test_the_loss_from_logits(name: str, overwrite: bool) -> None:
    """The fused kernel where the objective looks at one token at a time, two kernels and torch's objective between them elsewhere."""
    p = make_here(25, 16, 130, objective=OBJECTIVES[name])
    logits = logits_of(p, torch.float32)
    exact, gradient = from_logits(p, logits.double(), "torch")
    ours, mine = from_logits(p, logits, "triton", overwrite_logits=overwrite)
    _, torchs = from_logits(p, logits, "torch")
    assert relative(mine, gradient) <= 2 * max(relative(torchs, gradient), 1e-7)
    for field in fields(ours):
        a, b = getattr(ours, field.name).detach(), getattr(exact, field.name).detach()
        assert a.shape == b.shape
        assert a.dtype == (torch.bool if b.dtype == torch.bool else torch.float32)
        assert float((a.double() - b.double()).abs().max()) < 2e-5, field.name
    assert torch.equal(mine[~ours.computed], torch.zeros_like(mine[~ours.computed]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_a_slice_of_padded_logits_in_place(dtype: torch.dtype, objective: str) -> None:
    """logits[:, :-1], with an upstream factor: the gradient takes the logits' place, and the last position, which is no part, stays."""
    generator = torch.Generator().manual_seed(0)
    whole = (3 * torch.randn(3, 6, 70, generator=generator)).to(DEVICE, dtype)
    targets = torch.randint(70, (3, 5), generator=generator).to(DEVICE)
    advantages, mask = torch.randn(3, generator=generator).to(DEVICE), (torch.rand(3, 5, generator=generator) > 0.3).to(DEVICE)
    found = {}
    for backend in ("triton", "torch"):
        leaf = whole.clone().requires_grad_()
        mine = leaf * 1
        loss = grpo_loss(
            mine[:, :-1], targets, advantages, objective=OBJECTIVES[objective], mask=mask, overwrite_logits=True, backend=backend
        ).loss
        (0.3 * loss).backward()
        found[backend] = leaf.grad
        assert torch.equal(mine[:, -1], whole[:, -1])
        assert torch.equal(mine[:, :-1], leaf.grad[:, :-1])
        assert not leaf.grad[:, -1].any()
    assert relative(found["triton"], found["torch"]) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("call", ["loss", "logprobs"])
def test_who_saved_overwritten_logits_is_told(call: str) -> None:
    p = make_here(10, 16, 60, masked=0.0)
    logits = (leaves(p)[0] @ p.weight.t()) * 1.0
    other = logits.exp().sum() + logits.square().sum()  # square saves the logits
    if call == "loss":
        loss = grpo_loss(logits, p.targets, p.advantages, objective=p.objective, overwrite_logits=True, backend="triton").loss
    else:
        loss = selected_logprobs(logits, p.targets, overwrite_logits=True, backend="triton").logprobs.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_without_gradients_the_logits_stay() -> None:
    p = make_here(10, 16, 60, masked=0.0)
    for mode in (torch.no_grad, torch.inference_mode):
        logits = logits_of(p, torch.float32).requires_grad_()
        before = logits.detach().clone()
        with mode():
            result = grpo_loss(logits, p.targets, p.advantages, objective=p.objective, overwrite_logits=True, backend="triton")
        assert not result.loss.requires_grad
        assert torch.equal(logits, before)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_losses_of_the_same_logits(overwrite: bool) -> None:
    """And another use after the call: right, or an error, never a wrong gradient."""
    p = make_here(10, 16, 60, masked=0.0)
    leaf = logits_of(p, torch.float32).requires_grad_()

    def total(logits: Tensor, backend: str, **more: Any) -> Tensor:
        losses = [grpo_loss(logits, p.targets, p.advantages, objective=p.objective, backend=backend, **more).loss for _ in range(2)]
        return losses[0] + losses[1] + logits.square().mean()

    (expected,) = torch.autograd.grad(total(leaf * 1.0, "torch"), leaf)
    loss = total(leaf * 1.0, "triton", overwrite_logits=overwrite)
    if overwrite:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        assert relative(torch.autograd.grad(loss, leaf)[0], expected) < 1e-6


def test_a_loss_scale_reaches_float16_before_it_is_rounded() -> None:
    """4e-8 and less per entry vanishes in float16; times 65536 it does not."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(8, 500, generator=generator).half(), torch.randint(500, (8,), generator=generator)
    found = {}
    for backend in ("triton", "torch"):
        leaf = logits.to(DEVICE).requires_grad_()
        counts = LossCounts(tokens=8192, sequences=16)
        result = grpo_loss(
            leaf, targets.to(DEVICE), torch.ones(8, device=DEVICE), objective=Objective.dapo(), counts=counts, backend=backend
        )
        (result.loss * 65536).backward()
        found[backend] = leaf.grad
    assert bool((found["triton"] != 0).all())
    assert relative(found["triton"], found["torch"]) < torch.finfo(torch.float16).eps


def test_selected_logprobs_in_every_dtype() -> None:
    p = make_here(20, 16, 130)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        logits = logits_of(p, dtype)
        found = {}
        for backend, values in (("triton", logits), ("torch", logits.double())):
            leaf = values.detach().requires_grad_()
            result = selected_logprobs(leaf[None], p.targets[None], mask=p.mask[None], temperature=0.7, backend=backend)
            (result.logprobs.sum() + 0.1 * result.entropy.sum()).backward()
            found[backend] = (leaf.grad, result.logprobs.detach(), result.entropy.detach())
        assert relative(found["triton"][0], found["torch"][0]) < bound
        for mine, exact in zip(found["triton"][1:], found["torch"][1:], strict=True):
            assert float((mine - exact).abs().max()) < 1e-5
            assert not mine[0][~p.mask].any()


def test_logits_that_a_kernel_cannot_read() -> None:
    """A last stride that is not 1, and float64: torch, and the same result."""
    p = make_here(10, 16, 60)
    logits = logits_of(p, torch.float32)
    plain = from_logits(p, logits, "triton")[1]
    assert relative(from_logits(p, logits.t().contiguous().t(), "triton")[1], plain) < 1e-6
    assert relative(from_logits(p, logits.double(), "triton")[1], plain) < 1e-6


# Which backend, and which way


def test_backends_says_what_triton_would_be_used_for() -> None:
    status = {status.name: status for status in backends()}["triton"]
    assert status.available == torch.cuda.is_available()
    assert ("NVIDIA GPUs" if status.available else "interpreter") in status.reason


def test_triton_is_asked_for_in_vain() -> None:
    code = """
import os, torch
os.environ.pop("TRITON_INTERPRET", None)
from grpo_kernels import Objective, linear_grpo_loss
a = torch.zeros(2, 3)
linear_grpo_loss(a, a, torch.zeros(2, dtype=torch.long), torch.ones(2), objective=Objective.dapo(), backend="triton")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "ValueError: backend 'triton' is not available: the tensors are on the CPU" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ("import sys; sys.modules['triton'] = None", "triton cannot be imported"),
        ("import triton; del triton.knobs", "triton cannot be imported"),
        ("import grpo_kernels.triton_kernels", "TRITON_INTERPRET was off when triton was imported"),
    ],
)
def test_a_triton_that_does_not_work_is_no_triton(setup: str, reason: str) -> None:
    code = f"""
import os, torch
os.environ.pop("TRITON_INTERPRET", None)
{setup}
os.environ["TRITON_INTERPRET"] = "1"
from grpo_kernels import Objective, backends, linear_grpo_loss
a = torch.zeros(2, 3, requires_grad=True)
call = dict(targets=torch.zeros(2, dtype=torch.long), advantages=torch.ones(2), objective=Objective.dapo())
linear_grpo_loss(a, a, **call).loss.backward()
print(backends()[1].reason)
linear_grpo_loss(a, a, **call, backend="triton")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert reason in run.stdout
    assert run.stderr.splitlines()[-1].startswith("ValueError: backend 'triton' is not available: ")
    assert reason in run.stderr


def test_import_does_not_load_triton() -> None:
    """It takes most of a second, and need not be there."""
    code = """
import sys, torch
from grpo_kernels import LossCounts, Objective, backends, linear_grpo_loss
a = torch.zeros(2, 3, requires_grad=True)
linear_grpo_loss(a, a, torch.zeros(2, dtype=torch.long), torch.ones(2), objective=Objective.dapo()).loss.backward()
print("grpo_kernels.triton_kernels" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.fixture
def tuned_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))
    monkeypatch.delenv(selection.OVERRIDE, raising=False)
    selection._tuned.cache_clear()
    yield tmp_path / "first_product.json"
    selection._tuned.cache_clear()


def chosen(width: int, vocabulary: int = 1000) -> str:
    return selection.first_product(torch.device(DEVICE), width, vocabulary)


def test_the_table_and_the_rule(tuned_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, turn in {**selection.LIBRARY_FROM, "some other card": selection.LIBRARY_FROM_ELSEWHERE}.items():
        monkeypatch.setattr(selection, "_name", lambda device, name=name: f"NVIDIA {name} 80GB")
        assert [chosen(width) for width in (64, turn - 1, turn, 16384)] == ["anchored", "anchored", "library", "library"], name
        assert selection.first_product(torch.device(DEVICE), 16384, 1000, stores=False) == "anchored"


def test_what_was_measured_comes_first_and_the_variable_before_it(tuned_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection.remember(torch.device(DEVICE), 576, 1000, "library")
    selection.remember(torch.device(DEVICE), 8192, 1000, "anchored")
    assert [chosen(576), chosen(8192), chosen(576, 1001)] == ["library", "anchored", "anchored"]
    monkeypatch.setenv(selection.OVERRIDE, "anchored")
    assert chosen(576) == "anchored"
    monkeypatch.setenv(selection.OVERRIDE, "")
    assert chosen(576) == "library"
    monkeypatch.setenv(selection.OVERRIDE, "fastest")
    with pytest.raises(ValueError, match="GRPO_KERNELS_GEMM1 is 'fastest'; it must be one of library, anchored"):
        chosen(576)


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": "neither"}', "", "[" * 200000])
def test_a_broken_file_is_as_good_as_none(tuned_file: Path, content: str) -> None:
    tuned_file.write_text(content)
    selection._tuned.cache_clear()
    assert chosen(576) == "anchored"
    selection.remember(torch.device(DEVICE), 576, 1000, "library")
    assert chosen(576) == "library"
    assert list(json.loads(tuned_file.read_text()).values()) == ["library"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tuned_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection.remember(torch.device(DEVICE), 576, 1000, "library")
    before = tuned_file.read_text()
    assert tuned_file.stat().st_mode & 0o044, "other users of the folder, other ranks perhaps, must read it too"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selection.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        selection.remember(torch.device(DEVICE), 576, 1000, "anchored")
    assert tuned_file.read_text() == before
    assert list(tuned_file.parent.iterdir()) == [tuned_file], "a temporary file is left"


def test_no_home_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRPO_CACHE", "XDG_CACHE_HOME", selection.OVERRIDE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    selection._tuned.cache_clear()
    assert chosen(576) == "anchored"
    selection._tuned.cache_clear()


def test_tune_measures_both_and_remembers_the_faster(tuned_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    real = tune.measure
    monkeypatch.setattr(tune, "measure", lambda width, vocabulary: real(width, vocabulary, rows=8, rounds=1))
    monkeypatch.setattr(sys, "argv", ["tune", "16", "200"])
    tune.main()
    first, second, last = capsys.readouterr().out.splitlines()
    assert {first.split()[0], second.split()[0]} == set(STRATEGIES)
    assert 0 < float(first.split()[1]) <= float(second.split()[1])
    assert last == f"head [200, 16]: {first.split()[0]} from now on"
    assert chosen(16, 200) == first.split()[0]


def test_tune_that_cannot_write_says_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tune, "measure", lambda width, vocabulary: {"library": 0.2, "anchored": 0.1})
    monkeypatch.setattr(sys, "argv", ["tune", "16", "200"])
    with pytest.raises(SystemExit):
        tune.main()
    output = capsys.readouterr()
    assert output.out.splitlines()[0].split() == ["anchored", "100.000", "ms"]
    assert "set GRPO_CACHE to a folder that can be written, or GRPO_KERNELS_GEMM1=anchored" in output.err


def test_the_strategies_take_the_way_they_name(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.backends import triton

    calls = []
    for name in ("anchored_products", "anchor_rows"):
        real = getattr(triton.kernels(), name)
        monkeypatch.setattr(triton.kernels(), name, lambda *a, name=name, real=real, **k: (calls.append(name), real(*a, **k))[1])
    p = make_here(10, 16, 60, **HALF)
    fused(p, backend="triton")
    assert calls == [{"library": "anchor_rows", "anchored": "anchored_products"}[strategy]]
    calls.clear()
    monkeypatch.delenv(selection.OVERRIDE)
    linear_logprobs(p.hidden, p.weight, p.targets, backend="triton")
    assert calls == ["anchored_products"], "where nothing is stored, the anchored GEMM"
    calls.clear()
    with torch.no_grad():
        linear_logprobs(p.hidden, p.weight, p.targets, softcap=5.0, backend="triton")
    assert calls == ["anchor_rows"]


def test_group_advantages_on_a_device() -> None:
    """On a GPU a kernel, elsewhere torch: the same numbers."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.1, 0.9])
    for settings in ({}, {"scale": "none"}, {"baseline": "leave_one_out"}, {"scale": "batch"}):
        assert torch.allclose(
            group_advantages(rewards.to(DEVICE), 4, **settings).cpu(), group_advantages(rewards, sizes=[4, 4], **settings)
        )


def test_select_backend_refuses_other_devices() -> None:
    with pytest.raises(ValueError, match="for NVIDIA GPUs, the tensors are on meta"):
        select_backend("triton", torch.device("meta"))
    assert select_backend("auto", torch.device("meta")).name == "torch"


def test_own_functions_are_evaluated_in_torch() -> None:
    objective = Objective(
        policy_loss=lambda batch: -batch.advantages * torch.tanh(batch.logprobs - batch.old_logprobs), aggregation="token"
    )
    p = make_here(20, 16, 130, objective=objective)
    assert relative(fused(p, backend="triton")[0].weight_gradient, fused(p, backend="torch")[0].weight_gradient) < 1e-5
