"""The operators under torch.compile: one graph, and the numbers of the eager calls bit for bit."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import grpo_kernels.compiled
from grpo_kernels import (
    GRPOLoss,
    LossCounts,
    Objective,
    TokenBatch,
    TokenLogprobs,
    grpo_loss,
    grpo_loss_from_logprobs,
    linear_grpo_loss,
    linear_logprobs,
    selected_logprobs,
)
from problems import Problem, leaves, make
from test_linear_loss import OBJECTIVES

ops = torch.ops.grpo_kernels
assert grpo_kernels.compiled  # imported for its ops


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


@dataclass(frozen=True)
class Given:
    """A problem with its settings as tensors, made outside of what is compiled."""

    problem: Problem
    rows: dict[str, Any]


def given(p: Problem) -> Given:
    return Given(p, settings(p))


def settings(p: Problem) -> dict[str, Any]:
    return {
        "objective": p.objective, "cu_seqlens": p.cu_seqlens, "old_logprobs": p.old, "ref_logprobs": p.ref, "rollout_logprobs": p.rollout,
        "mask": p.mask,
    }  # fmt: skip


def call_linear_loss(g: Given, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> GRPOLoss:
    p = g.problem
    heads = {"bias": bias, "softcap": p.softcap, "temperature": p.temperature}
    return linear_grpo_loss(hidden, weight, p.targets, p.advantages, **heads, **g.rows)


def call_linear_logprobs(g: Given, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> TokenLogprobs:
    p = g.problem
    return linear_logprobs(hidden, weight, p.targets, mask=p.mask, bias=bias, softcap=p.softcap, temperature=p.temperature)


def call_selected(g: Given, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> TokenLogprobs:
    return selected_logprobs(hidden @ weight.t(), g.problem.targets, mask=g.problem.mask, temperature=g.problem.temperature)


def call_loss(g: Given, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> GRPOLoss:
    p = g.problem
    return grpo_loss(hidden @ weight.t(), p.targets, p.advantages, temperature=p.temperature, **g.rows)


def call_from_logprobs(g: Given, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> GRPOLoss:
    selected = linear_logprobs(hidden, weight, g.problem.targets, bias=bias)
    return grpo_loss_from_logprobs(selected.logprobs, g.problem.advantages, entropy=selected.entropy, **g.rows)


CALLS = [call_linear_loss, call_linear_logprobs, call_selected, call_loss, call_from_logprobs]
KINDS: dict[str, Callable[[], Problem]] = {
    "plain": lambda: make(40, 16, 90),
    "on policy": lambda: make(40, 16, 90, old=False),
    "float temperature": lambda: make(40, 16, 90, temperature=0.7),
    "temperatures": lambda: make(40, 16, 90, temperature=torch.rand(40, generator=torch.Generator().manual_seed(1)) + 0.5),
    "bias": lambda: make(40, 16, 90, bias=True),
    "bfloat16 hidden, float32 weight": lambda: make(40, 16, 90, dtype=torch.bfloat16, weight_dtype=torch.float32),
    "bfloat16": lambda: make(40, 16, 90, dtype=torch.bfloat16),
    "float64": lambda: make(40, 16, 90, dtype=torch.float64),
    "softcap": lambda: make(40, 16, 90, softcap=4.0),
    "entropy bonus": lambda: make(40, 16, 90, objective=OBJECTIVES["gspo_entropy"]),
    "top entropy": lambda: make(40, 16, 90, objective=OBJECTIVES["top_entropy_kl"]),
    "correction": lambda: make(40, 16, 90, objective=OBJECTIVES["off_policy_kl"]),
}


CASES = [
    *((call_linear_loss, kind) for kind in KINDS),
    *((call_linear_logprobs, kind) for kind in ("plain", "temperatures", "bias", "softcap", "bfloat16 hidden, float32 weight", "float64")),
    *((call_selected, kind) for kind in ("plain", "temperatures", "bfloat16")),
    *((call_loss, kind) for kind in ("plain", "bfloat16", "top entropy", "correction")),
    *((call_from_logprobs, kind) for kind in ("plain", "on policy", "entropy bonus", "correction")),
]


@dataclass
class Outcome:
    results: dict[str, Tensor]
    gradients: list[Tensor | None]

    @classmethod
    def of(cls, result: GRPOLoss | TokenLogprobs, tensors: list[Tensor | None]) -> Outcome:
        """With the gradients of the loss, or of sums of log-probabilities and entropies with random factors."""
        if isinstance(result, GRPOLoss):
            total = result.loss
        else:
            a, b = torch.randn(2, *result.logprobs.shape, generator=torch.Generator().manual_seed(4))
            total = (result.logprobs * a + result.entropy * b).sum()
        total.backward()
        values = {field.name: getattr(result, field.name).detach() for field in fields(result)}
        return cls(values, [None if t is None else t.grad for t in tensors])

    def assert_equal(self, other: Outcome) -> None:
        for name, value in self.results.items():
            assert value.dtype == other.results[name].dtype, name
            assert torch.equal(value, other.results[name]), name
        for mine, its in zip(self.gradients, other.gradients, strict=True):
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                assert mine.dtype == its.dtype
                assert torch.equal(mine, its)
        assert any(g is not None and g.abs().max() > 0 for g in self.gradients)


def compare(function: Callable[..., Any], p: Problem, *, frozen: tuple[int, ...] = (), backend: Any = "aot_eager") -> Outcome:
    """Compiled against eager. `frozen`: which of hidden, weight and bias need no gradient."""
    outcomes = []
    for run in (compiled(function, backend), function):
        tensors = [t if t is None or i not in frozen else t.detach() for i, t in enumerate(leaves(p))]
        outcomes.append(Outcome.of(run(given(p), *tensors), tensors))
    outcomes[0].assert_equal(outcomes[1])
    return outcomes[0]


@pytest.mark.parametrize(("function", "kind"), CASES)
def test_compiled_is_eager_bit_for_bit(function: Callable[..., Any], kind: str) -> None:
    compare(function, KINDS[kind]())


@pytest.mark.parametrize("frozen", [(1,), (0, 2)])
@pytest.mark.parametrize("function", [call_linear_loss, call_linear_logprobs])
def test_frozen_tensors(function: Callable[..., Any], frozen: tuple[int, ...]) -> None:
    outcome = compare(function, make(40, 16, 90, bias=True), frozen=frozen)
    assert [g is None for g in outcome.gradients] == [i in frozen for i in range(3)]


@pytest.mark.parametrize(("frozen", "enabled"), [((1,), True), ((0, 2), True), ((), False)])
def test_only_gradients_that_are_needed_are_computed(monkeypatch: pytest.MonkeyPatch, frozen: tuple[int, ...], enabled: bool) -> None:
    seen: list[list[bool]] = []
    real = grpo_kernels.compiled.compute

    def spy(hidden: Tensor, job: Any, wanted: Any) -> Any:
        seen.append([wanted.hidden, wanted.weight, wanted.bias])
        return real(hidden, job, wanted)

    monkeypatch.setattr(grpo_kernels.compiled, "compute", spy)
    p = make(40, 16, 90, bias=True)
    with torch.set_grad_enabled(enabled):
        compiled(call_linear_loss)(given(p), *(t.detach() if i in frozen else t for i, t in enumerate(leaves(p)) if t is not None))
    assert seen == [[enabled and i not in frozen for i in range(3)]]


def in_order(op: Any, **values: Any) -> tuple[Any, ...]:
    """The arguments of an op by name, those that are not given None."""
    names = [argument.name for argument in op.default._schema.arguments]
    assert set(values) <= set(names)
    return tuple(values.get(name) for name in names)


HEAT, HEATS = torch.tensor(0.7, dtype=torch.float64), torch.linspace(0.5, 1.5, 12)
PLACE = {"group": "", "backend": "auto"}


def of_rows(p: Problem) -> dict[str, Any]:
    """What the ops that compute a loss take of a problem."""
    return {
        "advantages": p.advantages, "cu_seqlens": p.cu_seqlens, "old": p.old, "ref": p.ref, "rollout": p.rollout, "mask": p.mask,
        "objective": p.objective.key,
    }  # fmt: skip


def of_head(p: Problem) -> dict[str, Any]:
    return {**dict(zip(("hidden", "weight", "bias"), leaves(p), strict=True)), "targets": p.targets, "mask": p.mask, **PLACE}


def arguments_of_loss(p: Problem, wanted: list[bool]) -> tuple[Any, ...]:
    return in_order(ops.linear_grpo_loss, **of_head(p) | of_rows(p), temperature=HEAT, wanted=wanted)


@pytest.mark.parametrize("wanted", [[True, False, False], [False, True, False], [False, False, False]])
def test_gradients_that_nobody_wants_are_empty(wanted: list[bool]) -> None:
    """No [V, H] output for a frozen weight."""
    p = make(20, 8, 40, bias=True)
    made = [tuple(t.shape) for t in ops.linear_grpo_loss(*arguments_of_loss(p, wanted))[10:]]
    shapes = [(20, 8), (40, 8), (40,)]
    assert made == [shape if wants else (0,) for wants, shape in zip(wanted, shapes, strict=True)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [call_linear_loss, call_linear_logprobs, call_loss])
def test_without_gradients(function: Callable[..., Any], context: Callable[[], Any]) -> None:
    p = make(40, 16, 90)
    with context():
        # Under inference_mode every input is made there, as a rollout's results are.
        rows = Given(replace(p, advantages=p.advantages * 1), {n: v * 1 if isinstance(v, Tensor) else v for n, v in settings(p).items()})
        got, expected = compiled(function)(rows, p.hidden * 1, p.weight * 1, None), function(given(p), p.hidden, p.weight, None)
    for field in fields(expected):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name
        assert not getattr(got, field.name).requires_grad


@pytest.mark.parametrize("function", [call_linear_loss, call_linear_logprobs])
def test_no_grad_inside_of_the_compiled_function(function: Callable[..., Any]) -> None:
    """A reference pass: parameters that require gradients, and none wanted."""
    p = make(40, 16, 90)

    def reference_pass(*arguments: Any) -> Any:
        with torch.no_grad():
            return function(*arguments)

    result = compiled(reference_pass)(given(p), *leaves(p))
    expected = function(given(p), *leaves(p))
    for field in fields(expected):
        assert torch.equal(getattr(result, field.name), getattr(expected, field.name).detach()), field.name
        assert not getattr(result, field.name).requires_grad


@pytest.mark.parametrize("function", [call_linear_loss, call_from_logprobs])
def test_a_loss_of_ones_own(function: Callable[..., Any]) -> None:
    for strength in (1.0, 3.0):  # two functions of one name

        def own(batch: TokenBatch, strength: float = strength) -> Tensor:
            return -batch.advantages * torch.tanh(batch.logprobs - batch.old_logprobs) * strength

        compare(function, make(30, 8, 40, objective=Objective(policy_loss=own, aggregation="token")))


class Scaled(torch.nn.Module):
    """Prints as "Scaled()", whatever its scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, batch: TokenBatch) -> Tensor:
        return -self.scale * batch.advantages * batch.logprobs


def test_two_losses_that_print_alike() -> None:
    objectives = [Objective(policy_loss=Scaled(scale), aggregation="token") for scale in (1.0, 2.0)]
    for objective in objectives:
        compare(call_from_logprobs, make(30, 8, 40, objective=objective))


def test_an_objective_from_another_process(tmp_path: Path) -> None:
    (tmp_path / "objective").write_bytes(pickle.dumps(Objective.dapo(clip_high=0.27)))
    code = (
        "import pickle, sys, grpo_kernels.objective as o;"
        "objective = pickle.load(open(sys.argv[1], 'rb'));"
        "assert o.Objective.of_key(objective.key) == objective"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "objective")], check=True, capture_output=True)


@pytest.mark.parametrize("function", [call_linear_loss, call_linear_logprobs, call_loss])
def test_other_batch_sizes_compile_at_most_twice(function: Callable[..., Any]) -> None:
    """Once for the first size and once with the size as a symbol: a run has more sizes than torch.compile's limit of recompilations."""
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(function, counter)
    for rows in (40, 41, 57, 23, 64):
        p = make(rows, 16, 90, seed=rows)
        got, expected = leaves(p), leaves(p)
        Outcome.of(run(given(p), *got), list(got)).assert_equal(Outcome.of(function(given(p), *expected), list(expected)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("what", ["counts", "entropy_threshold", "temperature", "batch shape"])
def test_numbers_that_change_compile_at_most_twice(what: str) -> None:
    """P31: numbers that change every step, in a loop longer than torch.compile's limit of eight recompilations."""
    p = make(24, 16, 90, objective=OBJECTIVES["top_entropy"], masked=0.0)
    counter = CompileCounterWithBackend("aot_eager")

    def loss(hidden: Tensor, weight: Tensor, **more: Any) -> GRPOLoss:
        rows = {n: t.view(hidden.shape[:-1]) for n, t in (("targets", p.targets), ("advantages", p.advantages), ("old_logprobs", p.old))}
        return linear_grpo_loss(hidden, weight, **rows, objective=p.objective, **more)

    run = compiled(loss, counter)
    seen = set()
    for step in range(12):
        more: dict[str, Any] = {"counts": LossCounts(24, 4), "entropy_threshold": 2.0, "temperature": 1.0}
        changing = {"counts": LossCounts(24 + 5 * step, 4 + step), "entropy_threshold": 1.5 + step / 7, "temperature": 0.5 + step / 9}
        if what in changing:
            more[what] = changing[what]
        batch = (2, 3, 4, 6, 8)[step % 5] if what == "batch shape" else 2
        got, expected = leaves(p), leaves(p)
        result = Outcome.of(run(got[0].view(batch, -1, 16), got[1], **more), list(got))
        result.assert_equal(Outcome.of(loss(expected[0].view(batch, -1, 16), expected[1], **more), list(expected)))
        seen.add(float(result.results["loss"]))
    assert (len(seen) == 1) if what == "batch shape" else (len(seen) > 9), "the number has no effect: the test shows nothing"
    assert counter.frame_count <= 3


@pytest.mark.parametrize("function", [call_linear_logprobs, call_selected])
def test_temperatures_that_change_in_the_logprobs(function: Callable[..., Any]) -> None:
    p = make(24, 16, 90)
    counter = CompileCounterWithBackend("aot_eager")

    def at(temperature: float | Tensor, hidden: Tensor, weight: Tensor) -> TokenLogprobs:
        return selected_logprobs(hidden @ weight.t(), p.targets, temperature=temperature) if function is call_selected else (
            linear_logprobs(hidden, weight, p.targets, temperature=temperature)
        )  # fmt: skip

    run = compiled(at, counter)
    for step in range(12):
        got, expected = leaves(p)[:2], leaves(p)[:2]
        Outcome.of(run(0.4 + step / 11, *got), list(got)).assert_equal(Outcome.of(at(0.4 + step / 11, *expected), list(expected)))
    assert counter.frame_count <= 2
    got, expected = leaves(p)[:2], leaves(p)[:2]  # an integer and a tensor without dimensions
    for heat in (2, torch.tensor(0.3)):
        Outcome.of(run(heat, *got), list(got)).assert_equal(Outcome.of(at(heat, *expected), list(expected)))


@pytest.mark.parametrize("function", CALLS)
def test_no_rows_and_one_row(function: Callable[..., Any]) -> None:
    run = compiled(function)
    for rows in (0, 1):
        p = make(rows, 16, 90, masked=0.0, old=False)
        outcomes = []
        for either in (run, function):
            tensors = leaves(p)
            outcomes.append(Outcome.of(either(given(p), *tensors), list(tensors)))
        assert [g is None for g in outcomes[0].gradients] == [False, False, True]
        mine, its = ([*outcome.results.values(), *outcome.gradients[:2]] for outcome in outcomes)
        assert all(map(torch.equal, mine, its))


@pytest.mark.parametrize("function", [call_linear_loss, call_linear_logprobs])
def test_autocast_around_the_compiled_function(function: Callable[..., Any]) -> None:
    p = make(30, 64, 900)
    expected, got = leaves(p), leaves(p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = compiled(function)(given(p), *got)
    Outcome.of(cast, list(got)).assert_equal(Outcome.of(function(given(p), *expected), list(expected)))


def test_autocast_around_operators_on_logits() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))

    def loss(leaf: Tensor) -> GRPOLoss:
        return grpo_loss(leaf, torch.arange(20), torch.linspace(-1, 1, 20), objective=OBJECTIVES["entropy"])

    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = compiled(loss)(leaf)
    Outcome.of(cast, [leaf]).assert_equal(Outcome.of(loss(other), [other]))


def test_a_loss_scale_reaches_half_precision_logprobs() -> None:
    """Slopes of 1e-8 are below float16; times the scale they are not, if they are not rounded first."""
    logprobs = -torch.rand(64, generator=torch.Generator().manual_seed(0)).half()
    gradients = []
    for run in (compiled(grpo_loss_from_logprobs), grpo_loss_from_logprobs):
        leaf = logprobs.clone().requires_grad_()
        result = run(leaf, torch.linspace(0.5, 1.5, 64), objective=Objective.dapo(), counts=LossCounts(60_000_000, 10))
        (result.loss * 65536.0).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert gradients[1].unique().numel() > 30


def test_upstream_gradients_and_two_losses() -> None:
    """The model's loss is a sum of this one and others."""
    p = make(30, 8, 40)

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        normed = torch.nn.functional.layer_norm(hidden, (8,))
        first = call_linear_loss(given(p), normed, weight, None)
        second = call_from_logprobs(given(p), normed, weight, None)
        return 0.25 * first.loss + second.loss * 3.0 + (first.logprobs * first.entropy).sum() + weight.square().sum() * 1e-3

    outcomes = []
    for run in (compiled(total), total):
        tensors = leaves(p)[:2]
        loss = run(*tensors)
        loss.backward()
        outcomes.append((loss.detach(), tensors[0].grad, tensors[1].grad))
    for got, expected in zip(*outcomes, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-8)  # sums of gradients in another order
        assert got.any()


def test_what_strides_the_log_probabilities_have_does_not_matter() -> None:
    """A fake result with other strides than the real one is read wrongly by what inductor makes of it."""
    logprobs = -torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
    entropy = torch.rand(4, 1, generator=torch.Generator().manual_seed(1)).expand(4, 6).requires_grad_()
    objective = Objective.dapo(entropy_coef=0.1)
    gradients = []
    for run in (compiled(grpo_loss_from_logprobs), grpo_loss_from_logprobs):
        result = run(logprobs, torch.arange(4.0) - 1.5, objective=objective, entropy=entropy)
        gradients.append(torch.autograd.grad(result.loss, (logprobs, entropy)))
    for got, expected in zip(*gradients, strict=True):
        assert torch.equal(got, expected)
        assert got.any()


def test_views_of_logits() -> None:
    logits = torch.randn(3, 7, 20, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(1))

    objective, advantages = Objective.grpo(), torch.tensor([1.0, -1.0, 2.0])

    def loss(whole: Tensor) -> GRPOLoss:
        return grpo_loss(whole[:, :-1], targets[:, 1:], advantages, objective=objective)

    outcomes = []
    for run in (compiled(loss), loss):
        leaf = logits.clone().requires_grad_()
        outcomes.append(Outcome.of(run(leaf), [leaf]))
    outcomes[0].assert_equal(outcomes[1])


def sample_inputs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    p = make(12, 8, 40, bias=True, objective=OBJECTIVES["off_policy_kl"])
    half = make(12, 8, 40, bias=True, masked=0.0, dtype=torch.bfloat16)
    now = -torch.rand(12, generator=torch.Generator().manual_seed(3))
    upstream = torch.linspace(-1, 1, 12)
    logits = (p.hidden @ p.weight.t()).requires_grad_()
    padded = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(4))[:, :-1]
    batch = p.targets.view(3, 4)
    saved = ops.selected_logprobs(logits, p.targets, p.mask, HEAT, "auto")[2].detach()
    constant = {name: value.detach() if isinstance(value, Tensor) else value for name, value in of_head(p).items()}
    three = {**PLACE, "hidden": p.hidden.view(3, 4, 8).requires_grad_(), "weight": p.weight, "targets": batch, "temperature": HEAT}
    transposed = {"logprobs": now.view(4, 3).t().bfloat16().requires_grad_(), "entropy": now.view(3, 4).neg().requires_grad_()}
    bonus = Objective.dapo(entropy_coef=0.1).key
    return {
        "linear_grpo_loss": (ops.linear_grpo_loss, arguments_of_loss(p, [True, True, True])),
        "linear_grpo_loss, bf16, frozen weight": (ops.linear_grpo_loss, arguments_of_loss(half, [True, False, True])),
        "linear_logprobs": (ops.linear_logprobs, in_order(ops.linear_logprobs, **of_head(p), temperature=HEATS, softcap=3.0)),
        "linear_logprobs, padded": (ops.linear_logprobs, in_order(ops.linear_logprobs, **three)),
        "linear_logprobs_backward": (
            ops.linear_logprobs_backward,
            in_order(
                ops.linear_logprobs_backward, **constant, logprob_gradient=upstream, entropy_gradient=upstream.flip(0), temperature=HEATS,
                softcap=3.0, wanted=[True, False, True],
            ),
        ),
        "selected_logprobs": (ops.selected_logprobs, (logits, p.targets, p.mask, HEATS, "auto")),
        "selected_logprobs, a slice": (ops.selected_logprobs, (padded.requires_grad_(), batch, None, HEAT, "auto")),
        "selected_logprobs_backward": (
            ops.selected_logprobs_backward,
            (upstream, upstream.flip(0), logits.detach(), p.targets, p.mask, HEAT, saved, "auto"),
        ),
        "loss": (ops.loss, in_order(ops.loss, logprobs=now.clone().requires_grad_(), entropy=now.neg().requires_grad_(), **of_rows(p))),
        "loss, transposed, bf16": (
            ops.loss,
            in_order(ops.loss, **transposed, advantages=torch.ones(3), objective=bonus, tokens=12, sequences=3),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", sample_inputs())
def test_opcheck(name: str) -> None:
    """Schema, fake implementation, autograd registration, and the compiled gradients against the eager ones."""
    op, arguments = sample_inputs()[name]
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def _on_hidden(**changes: Any) -> Callable[[Problem], Any]:
    def call(p: Problem) -> Any:
        good = {"hidden": p.hidden, "weight": p.weight, "targets": p.targets, "advantages": p.advantages, "objective": p.objective}
        return linear_grpo_loss(**{**good, **changes})

    return call


BAD: list[tuple[str, Callable[[Problem], Any]]] = [
    ("targets holds 90 at row 0", _on_hidden(targets=torch.full((40,), 90))),
    ("targets has shape \\(4,\\)", _on_hidden(targets=torch.zeros(4, dtype=torch.long))),
    ("advantages has shape \\(3,\\)", _on_hidden(advantages=torch.ones(3))),
    ("ref_logprobs is None", _on_hidden(objective=OBJECTIVES["k1"])),
    ("entropy_threshold is nan", _on_hidden(objective=OBJECTIVES["top_entropy"], entropy_threshold=float("nan"))),
    ("weight has shape", lambda p: linear_logprobs(p.hidden, p.weight[:, :3], p.targets)),
    ("temperature is 0.0", lambda p: linear_logprobs(p.hidden, p.weight, p.targets, temperature=0.0)),
    ("backend is 'gpu'", lambda p: linear_logprobs(p.hidden, p.weight, p.targets, backend="gpu")),
    ("targets has shape \\(4,\\)", lambda p: selected_logprobs(p.hidden, p.targets[:4])),
    ("logits has shape \\(40,\\)", lambda p: selected_logprobs(p.hidden[:, 0], p.targets[0])),
    ("targets holds -", lambda p: selected_logprobs(p.hidden, p.targets - 1000)),
    ("targets has shape \\(4,\\)", lambda p: grpo_loss(p.hidden, p.targets[:4], p.advantages[:4], objective=p.objective)),
    ("mask has shape", lambda p: grpo_loss(p.hidden, p.targets % 16, p.advantages, objective=p.objective, mask=p.mask[:3])),
    ("entropy is None", lambda p: grpo_loss_from_logprobs(p.advantages, p.advantages, objective=OBJECTIVES["entropy"])),
    ("objective is 'grpo'", lambda p: grpo_loss_from_logprobs(p.advantages, p.advantages, objective="grpo")),
]


@pytest.mark.parametrize(("message", "call"), BAD)
def test_bad_arguments_are_named(message: str, call: Callable[[Problem], Any]) -> None:
    """By the operators' own errors, or as the text of torch.compile's where it is found while compiling."""
    with pytest.raises(Exception, match=message):
        compiled(call)(make(40, 16, 90))


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All five in one function, compiled once to C++: 15 s or more, of which the compiler takes most."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    p = make(40, 16, 90, objective=OBJECTIVES["gspo_entropy"])
    g = given(p)

    def everything(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        selected, linear = call_selected(g, hidden, weight, None), call_linear_logprobs(g, hidden, weight, None)
        losses = [function(g, hidden, weight, None) for function in (call_linear_loss, call_loss, call_from_logprobs)]
        spread = (selected.logprobs - 2 * linear.logprobs + selected.entropy * linear.entropy).mean()
        return losses[0].loss + 2 * losses[1].loss + 3 * losses[2].loss + spread, losses[0].ratio, linear.logprobs

    outcomes = []
    for run in (torch.compile(everything, fullgraph=True), everything):
        hidden, weight, _ = leaves(p)
        results = run(hidden, weight)
        results[0].backward()
        outcomes.append((*(r.detach() for r in results), hidden.grad, weight.grad))
    for got, expected in zip(*outcomes, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7)  # inductor adds up in another order
        assert got.any()
