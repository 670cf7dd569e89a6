"""The operators on logits and on log-probabilities, against float64 and against `linear_grpo_loss`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    GRPOLoss,
    LossCounts,
    Objective,
    TokenBatch,
    grpo_loss,
    grpo_loss_from_logprobs,
    linear_grpo_loss,
    linear_logprobs,
    selected_logprobs,
)
from problems import Problem, make, relative
from test_linear_loss import OBJECTIVES

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(shape: tuple[int, ...], vocabulary: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(logits, targets). Every other target is the row's likeliest token, as sampled ones tend to be."""
    g = generator(seed)
    logits = (torch.randn(*shape, vocabulary, generator=g) * 3).to(dtype)
    targets = torch.randint(0, vocabulary, shape, generator=g)
    likely = torch.arange(targets.numel()).view(shape) % 2 == 0
    return logits, torch.where(likely, logits.float().argmax(-1), targets)


def upstreams(shape: tuple[int, ...], seed: int = 9) -> tuple[Tensor, Tensor]:
    """Gradients of log-probabilities and entropies."""
    g = generator(seed)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


def torchs(logits: Tensor, targets: Tensor, slopes: tuple[Tensor, Tensor], dtype: torch.dtype, heat: Any = 1.0) -> tuple[Tensor, ...]:
    """(logprobs, entropy, gradient of the logits in their own dtype) with torch's own operations in `dtype`."""
    leaf = logits.detach().clone().requires_grad_()
    heats = heat[..., None].to(dtype) if isinstance(heat, Tensor) else heat
    distribution = torch.log_softmax(leaf.to(dtype) / heats, -1)
    logprobs = distribution.gather(-1, targets[..., None])[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    (logprobs * slopes[0].to(dtype) + entropy * slopes[1].to(dtype)).sum().backward()
    return logprobs.detach(), entropy.detach(), leaf.grad


def ours(logits: Tensor, targets: Tensor, slopes: tuple[Tensor, Tensor], **more: Any) -> tuple[Tensor, ...]:
    leaf = logits.detach().clone().requires_grad_()
    result = selected_logprobs(leaf, targets, **more)
    (result.logprobs * slopes[0] + result.entropy * slopes[1]).sum().backward()
    return result.logprobs.detach(), result.entropy.detach(), leaf.grad


@pytest.mark.parametrize("heat", [1.0, 0.6, "per row"])
@pytest.mark.parametrize("shape", [(1,), (40,), (4, 10)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_against_float64(dtype: torch.dtype, shape: tuple[int, ...], heat: Any) -> None:
    """Twice the error of torch's own operations in float32 on the same logits: better than what they do in bf16."""
    working = torch.promote_types(dtype, torch.float32)
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(4):  # pooled: torch's error in one draw of a single row is luck
        logits, targets = problem(shape, 1003, dtype=dtype, seed=seed)
        slopes = upstreams(shape)
        temperature = torch.rand(shape, generator=generator(3)) + 0.5 if heat == "per row" else heat
        exact = torchs(logits.double(), targets, slopes, torch.float64, temperature)
        for row, answer in enumerate(
            (ours(logits, targets, slopes, temperature=temperature), torchs(logits, targets, slopes, working, temperature))
        ):
            assert [t.dtype for t in answer] == [working, working, dtype]
            squares[row] += torch.tensor([relative(a, e) ** 2 for a, e in zip(answer, exact, strict=True)], dtype=torch.float64)
    errors = squares.div(4).sqrt()
    # Half a unit in the last place, the rounding of the result, is unavoidable; its root mean square is about a quarter of one.
    units = torch.tensor([torch.finfo(t).eps / 4 for t in (working, working, dtype)])
    # The reference itself is float64.
    allowed = 2 * torch.maximum(errors[1], units) if dtype != torch.float64 else torch.full((3,), 1e-14)
    assert (errors[0] <= allowed).all(), (errors, allowed)
    assert (errors[0] > 0).any()  # a comparison with itself would show nothing


def test_the_gradient_of_the_entropy_is_its_formula() -> None:
    """P32: d H / d z_j = -p_j (log p_j + H)."""
    logits, targets = problem((6, 5), 70, dtype=torch.float64)
    leaf = logits.requires_grad_()
    entropy = selected_logprobs(leaf, targets).entropy
    (gradient,) = torch.autograd.grad(entropy.sum(), leaf)
    log_p = torch.log_softmax(logits.detach(), -1)
    assert relative(gradient, -log_p.exp() * (log_p + entropy.detach()[..., None])) < 1e-13  # 70 sums of float64 roundings
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("which", ["logprobs", "entropy"])
def test_one_of_the_two_results_alone(which: str) -> None:
    logits, targets = problem((20,), 90, dtype=torch.float64)
    leaf = logits.requires_grad_()
    slope = upstreams((20,))[0].double()
    (gradient,) = torch.autograd.grad((getattr(selected_logprobs(leaf, targets), which) * slope).sum(), leaf)
    zero = torch.zeros(20, dtype=torch.float64)
    exact = torchs(logits, targets, (slope, zero) if which == "logprobs" else (zero, slope), torch.float64)[2]
    assert relative(gradient, exact) < 1e-13


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def every_second(t: Tensor) -> Tensor:
    """Its entries with one of NaN (or a huge number) after each along the last dimension."""
    wide = torch.full((*t.shape, 2), 0, dtype=t.dtype)
    wide[..., 0] = t
    wide[..., 1] = float("nan") if t.dtype.is_floating_point else 1
    return wide.flatten(-2)[..., ::2]


def longer(t: Tensor) -> Tensor:
    """A slice of a tensor with one position more along the second dimension: `logits[:, :-1]`."""
    return torch.cat([t, torch.full_like(t[:, :1], float("nan") if t.dtype.is_floating_point else 0)], 1)[:, :-1]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": every_second,
    "transposed": transposed,
    "one position more": longer,
    "reversed batch of a permuted copy": lambda t: t.flip(0).movedim(1, 0).contiguous().movedim(0, 1).flip(0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("what", ["logits", "targets", "mask", "temperature"])
def test_views_give_what_contiguous_tensors_give(what: str, view: str) -> None:
    """P30: each argument with strides of its own. Equal bit for bit, for the same numbers are read."""
    logits, targets = problem((4, 6), 33)
    arguments = {
        "logits": logits,
        "targets": targets,
        "mask": torch.rand(4, 6, generator=generator(5)) > 0.3,
        "temperature": torch.rand(4, 6, generator=generator(6)) + 0.5,
    }

    def run(changed: dict[str, Tensor]) -> list[Tensor]:
        leaf = changed["logits"].detach().requires_grad_()
        result = selected_logprobs(leaf, changed["targets"], mask=changed["mask"], temperature=changed["temperature"])
        (result.logprobs * 2.0 + result.entropy).sum().backward()
        return [result.logprobs.detach(), result.entropy.detach(), leaf.grad]

    strided = VIEWS[view](arguments[what])
    assert torch.equal(strided, arguments[what])
    assert strided.stride() != arguments[what].stride() or view.startswith("reversed")
    for got, expected in zip(run({**arguments, what: strided}), run(arguments), strict=True):
        assert torch.equal(got, expected)
        assert expected.any()


@pytest.mark.parametrize("what", ["logits", "targets", "mask", "advantages", "old_logprobs"])
def test_expanded_tensors_give_what_contiguous_ones_give(what: str) -> None:
    """P30, stride 0: one row, id, bit or number for all positions of a sequence."""
    logits, targets = problem((4, 6), 33)
    mask = torch.rand(4, 6, generator=generator(5)) > 0.3
    mask[0, 0] = True
    numbers = {name: torch.randn(4, 6, generator=generator(i)) for i, name in enumerate(("advantages", "old_logprobs"))}
    arguments = {"logits": logits, "targets": targets, "mask": mask, **numbers}
    expanded = arguments[what][:1, :1].expand_as(arguments[what])
    assert expanded.stride()[:2] == (0, 0)

    def run(changed: dict[str, Tensor]) -> list[Tensor]:
        leaf = changed["logits"].detach().requires_grad_()
        rest = {name: value for name, value in changed.items() if name != "logits"}
        result = grpo_loss(leaf, **rest, objective=Objective.grpo())
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        return [result.loss.detach(), result.logprobs, gradient]

    for got, expected in zip(run({**arguments, what: expanded}), run({**arguments, what: expanded.contiguous()}), strict=True):
        assert torch.equal(got, expected)
        assert expected.any()


def test_the_gradient_of_a_slice_reaches_the_whole() -> None:
    logits, targets = problem((3, 7), 40)
    whole = logits.requires_grad_()
    selected_logprobs(whole[:, :-1], targets[:, 1:]).logprobs.sum().backward()
    alone = ours(logits[:, :-1], targets[:, 1:], (torch.ones(3, 6), torch.zeros(3, 6)))[2]
    assert torch.equal(whole.grad[:, :-1], alone)
    assert not whole.grad[:, -1].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_rows_change_nothing_whatever_they_hold(dtype: torch.dtype, poison: float) -> None:
    logits, targets = problem((50,), 60, dtype=dtype)
    mask = (torch.arange(50) % 3 != 0).long()
    off = mask == 0
    heats = torch.rand(50, generator=generator(1)) + 0.5
    slopes = upstreams((50,))
    clean = ours(logits, targets, slopes, mask=mask, temperature=heats)
    logits, targets, heats = logits.clone(), targets.clone(), heats.clone()
    logits[off], targets[off], heats[off] = poison, -100, poison
    dirty = ours(logits, targets, slopes, mask=mask, temperature=heats)
    for got, expected in zip(dirty, clean, strict=True):
        assert torch.equal(got, expected)
        assert not got[off].any()
        assert got[~off].any()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["grpo_kl3", "gspo_entropy", "top_entropy", "tis"])
def test_masked_rows_change_no_loss(name: str, overwrite: bool) -> None:
    p = make(60, 16, 90, objective=OBJECTIVES[name])
    off = ~p.mask
    poison = float("nan")
    dirty = replace(p, hidden=p.hidden.clone(), targets=p.targets.clone(), advantages=p.advantages.clone())
    dirty = replace(dirty, **{n: None if getattr(p, n) is None else getattr(p, n).clone() for n in ("old", "ref", "rollout")})
    dirty.targets[off] = -100
    for tensor in (dirty.hidden, dirty.advantages, dirty.old, dirty.ref, dirty.rollout):
        if tensor is not None:
            tensor[off] = poison
    (clean_loss, clean_gradient), (loss, gradient) = (by_logits(q, overwrite=overwrite) for q in (p, dirty))
    assert torch.equal(loss.loss, clean_loss.loss)
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[off].any()
    assert gradient.any()

    logprobs, entropy = (t.detach().clone() for t in (clean_loss.logprobs, clean_loss.entropy))
    results = []
    for value in (0.0, poison):
        numbers = [t.clone().masked_fill_(off, value).requires_grad_() for t in (logprobs, entropy)]
        q = p if value == 0.0 else dirty
        result = grpo_loss_from_logprobs(numbers[0], q.advantages, entropy=numbers[1], **settings(q))
        results.append((result.loss.detach(), *torch.autograd.grad(result.loss, numbers, materialize_grads=True)))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)
    assert not results[1][1][off].any()


def settings(p: Problem) -> dict[str, Any]:
    """What every form of the loss takes."""
    return {
        "objective": p.objective, "cu_seqlens": p.cu_seqlens, "old_logprobs": p.old, "ref_logprobs": p.ref, "rollout_logprobs": p.rollout,
        "mask": p.mask,
    }  # fmt: skip


def by_logits(p: Problem, *, overwrite: bool = False) -> tuple[GRPOLoss, Tensor]:
    logits = (p.hidden @ p.weight.t()).detach().requires_grad_()
    result = grpo_loss(logits, p.targets, p.advantages, temperature=p.temperature, overwrite_logits=overwrite, **settings(p))
    return result, torch.autograd.grad(result.loss, logits)[0]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_that_of_the_fused_loss(name: str, old: bool) -> None:
    """In float64, where the ways differ by 1e-15 or so; old log-probabilities and the like are float32 for all three."""
    p = make(70, 24, 203, dtype=torch.float64, objective=OBJECTIVES[name], old=old)
    compare_with_the_fused_loss(p)


def compare_with_the_fused_loss(p: Problem) -> None:
    leaves = [t.detach().clone().requires_grad_() for t in (p.hidden, p.weight)]
    fused = linear_grpo_loss(*leaves, p.targets, p.advantages, temperature=p.temperature, **settings(p))
    expected = torch.autograd.grad(fused.loss, leaves)

    logits = leaves[0] @ leaves[1].t()
    by_logits = grpo_loss(logits, p.targets, p.advantages, temperature=p.temperature, **settings(p))
    selected = linear_logprobs(*leaves, p.targets, temperature=p.temperature)
    by_logprobs = grpo_loss_from_logprobs(selected.logprobs, p.advantages, entropy=selected.entropy, **settings(p))
    for result in (by_logits, by_logprobs):
        for field in fields(GRPOLoss):
            got, wanted = getattr(result, field.name), getattr(fused, field.name)
            assert got.dtype == wanted.dtype, field.name
            assert got.shape == wanted.shape, field.name
            assert torch.allclose(got.double(), wanted.double(), rtol=1e-9, atol=1e-11), field.name
            assert not got.requires_grad or field.name == "loss", field.name
        for gradient, wanted in zip(torch.autograd.grad(result.loss, leaves), expected, strict=True):
            # The objective's slopes pass through float32 shares and advantages in the same way for all three.
            assert relative(gradient, wanted) < 1e-9
    assert expected[1].abs().max() > 0


def test_padded_rows_give_what_packed_ones_give() -> None:
    p = replace(make(60, 16, 90, objective=Objective.gspo(clip_low=0.1, clip_high=0.1, entropy_coef=0.1)), lengths=[12] * 5)
    packed, gradient = by_logits(p)
    logits = (p.hidden @ p.weight.t()).view(5, 12, -1).detach().requires_grad_()
    per_row = {"old_logprobs": p.old.view(5, 12), "mask": p.mask.view(5, 12)}
    result = grpo_loss(logits, p.targets.view(5, 12), p.advantages.view(5, 12), objective=p.objective, **per_row)
    result.loss.backward()
    assert torch.equal(result.loss, packed.loss)
    assert torch.equal(logits.grad.view(60, -1), gradient)
    again = grpo_loss_from_logprobs(
        packed.logprobs.view(5, 12), p.advantages.view(5, 12), entropy=packed.entropy.view(5, 12), objective=p.objective, **per_row
    )
    assert torch.equal(again.loss, packed.loss)
    assert again.ratio.shape == (5, 12)


def test_counts_and_sequence_lengths_reach_the_loss() -> None:
    p = replace(make(24, 16, 90, objective=Objective.grpo(), masked=0.0), lengths=[24])
    lengths = torch.tensor([48])
    more: dict[str, Any] = {"counts": LossCounts(tokens=48, sequences=3), "sequence_lengths": lengths}
    logits = (p.hidden @ p.weight.t()).detach()
    result = grpo_loss(logits, p.targets, p.advantages, **settings(p), **more)
    plain = grpo_loss(logits, p.targets, p.advantages, **settings(p))
    assert float(result.loss) == pytest.approx(float(plain.loss) / 6, rel=1e-5)  # half the share of a token, a third of a sequence's
    other = grpo_loss_from_logprobs(plain.logprobs, p.advantages, **settings(p), **more)
    assert torch.equal(other.loss, result.loss)


def test_a_row_that_cannot_move_is_not_looked_at() -> None:
    logits, targets = problem((12,), 30)
    advantages = torch.randn(12, generator=generator())
    advantages[::2] = 0.0
    logits[::2] = float("nan")
    leaf = logits.requires_grad_()
    result = grpo_loss(leaf, targets, advantages, objective=Objective.dapo())
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert result.computed.tolist() == (advantages != 0).tolist()
    assert not leaf.grad[::2].any()
    assert leaf.grad[1::2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", ["whole", "logits[:, :-1]"])
def test_overwriting_writes_the_gradient_into_the_logits(dtype: torch.dtype, view: str) -> None:
    """Logits as a model makes them: a product that another tensor's gradient comes from."""
    g = generator()
    hidden = torch.randn(3, 8, 16, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(70, 16, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, 70, (3, 8), generator=g)
    mask = torch.rand(3, 8, generator=g) > 0.4
    at = slice(None, -1) if view == "logits[:, :-1]" else slice(None)
    answers = []
    for overwrite in (False, True):
        whole = hidden @ weight.t()
        before = whole.detach().clone()
        logits = whole[:, at]
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        result = selected_logprobs(logits, targets[:, at], mask=mask[:, at], overwrite_logits=overwrite)
        gradients = torch.autograd.grad((result.logprobs - 0.1 * result.entropy).sum(), (hidden, weight))
        answers.append((seen[0].clone(), *gradients))
        assert (seen[0].data_ptr() == logits.data_ptr()) == overwrite
        assert torch.equal(whole.detach(), before) != overwrite
        if overwrite:
            assert torch.equal(logits.detach(), answers[0][0])
            assert not logits.detach()[~mask[:, at]].any()
            assert torch.equal(whole[:, logits.shape[1] :].detach(), before[:, logits.shape[1] :])  # beyond the slice nothing is written
    for plain, overwritten in zip(*answers, strict=True):
        assert torch.equal(plain, overwritten)
        assert plain.any()


def test_overwriting_in_the_loss() -> None:
    p = make(60, 16, 90, objective=OBJECTIVES["grpo_kl3"])
    (plain, gradient), (result, overwritten) = by_logits(p), by_logits(p, overwrite=True)
    assert torch.equal(plain.loss, result.loss)
    assert torch.equal(gradient, overwritten)


@pytest.mark.parametrize(
    "consumer",
    [
        lambda logits, targets: (logits * logits).sum(),
        lambda logits, targets: selected_logprobs(logits, targets).logprobs.sum(),
        lambda logits, targets: selected_logprobs(logits, targets, overwrite_logits=True).entropy.sum(),
    ],
)
def test_who_else_needs_the_overwritten_logits_fails(consumer: Callable[[Tensor, Tensor], Tensor]) -> None:
    logits, targets = problem((10,), 20)
    leaf = logits.requires_grad_()
    other = consumer(leaf, targets)
    mine = selected_logprobs(leaf, targets, overwrite_logits=True).logprobs.sum()  # made last, so its backward runs first
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + mine).backward()


def test_a_producer_that_saved_the_overwritten_logits_fails() -> None:
    logits, targets = problem((10,), 20)
    made = logits.requires_grad_().tanh()  # whose backward needs its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        selected_logprobs(made, targets, overwrite_logits=True).logprobs.sum().backward()


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_overwriting_expanded_logits_is_refused(dimension: int) -> None:
    shape = [3, 4, 5]
    shape[dimension] = 1
    logits = torch.randn(shape).expand(3, 4, 5)
    with pytest.raises(ValueError, match="overwrite_logits is True, but entries of logits share their memory"):
        selected_logprobs(logits, torch.zeros(3, 4, dtype=torch.long), overwrite_logits=True)
    with pytest.raises(ValueError, match="overwrite_logits is True, but entries of logits share their memory"):
        grpo_loss(logits, torch.zeros(3, 4, dtype=torch.long), torch.ones(3), objective=Objective.dapo(), overwrite_logits=True)


def test_two_backwards() -> None:
    logits, targets = problem((10,), 20)
    leaf = logits.requires_grad_()
    total = selected_logprobs(leaf, targets).logprobs.sum()
    total.backward(retain_graph=True)
    first = leaf.grad.clone()
    total.backward()
    assert torch.equal(leaf.grad, 2 * first)
    overwritten = selected_logprobs(logits.detach().clone().requires_grad_(), targets, overwrite_logits=True).logprobs.sum()
    overwritten.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwritten.backward()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_derivative_is_refused(overwrite: bool) -> None:
    logits, targets = problem((10,), 20)
    leaf = logits.requires_grad_()
    for result in (
        selected_logprobs(leaf, targets, overwrite_logits=overwrite).logprobs.sum(),
        grpo_loss(leaf, targets, torch.ones(10), objective=Objective.dapo(), overwrite_logits=overwrite).loss,
    ):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(result, leaf, create_graph=True)


def test_without_gradients() -> None:
    logits, targets = problem((4, 5), 30)
    expected = selected_logprobs(logits.clone().requires_grad_(), targets)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            result = selected_logprobs(logits.clone().requires_grad_(), targets)
            loss = grpo_loss(logits.clone(), targets, torch.ones(4), objective=Objective.grpo(entropy_coef=0.1))
            same = grpo_loss_from_logprobs(
                result.logprobs, torch.ones(4), entropy=result.entropy, objective=Objective.grpo(entropy_coef=0.1)
            )
        assert torch.equal(result.logprobs, expected.logprobs)
        assert torch.equal(result.entropy, expected.entropy)
        assert not result.logprobs.requires_grad
        assert torch.equal(loss.loss, same.loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("gap", [40.0, 69.0, 100.0, 500.0])
def test_target_with_tiny_probability(gap: float, dtype: torch.dtype) -> None:
    """p = e^-gap, 1e-30 at 69: from 88 on exp overflows where the target's logit is the offset, and the row's maximum takes over."""
    logits, targets = problem((24,), 300, dtype=dtype)
    targets = targets.clamp(min=1)
    logits[4:20, 0] = gap
    working = torch.promote_types(dtype, torch.float32)
    slope, zero = upstreams((24,))[0], torch.zeros(24)
    exact = torchs(logits.double(), targets, (slope, zero), torch.float64)
    assert float(exact[0].min()) < -gap + 15
    got, theirs = ours(logits, targets, (slope, zero)), torchs(logits, targets, (slope, zero), working)
    for i in (0, 2):
        # The reference itself is float64; eps / 4 is the rounding of the result.
        floor = 1e-14 if dtype == torch.float64 else torch.finfo(got[i].dtype).eps / 4
        assert relative(got[i], exact[i]) <= 2 * max(relative(theirs[i], exact[i]), floor)
    # The entropy, here close to 0, is a difference of numbers as large as the log-probability, whose rounding it has: half a unit of it in
    # float32, where the sums are float64 and 0.34 was the most seen; some units in float64, where 2.5 was. Its gradient holds it.
    largest = float(exact[0].abs().max()) * torch.finfo(working).eps * (8 if working == torch.float64 else 0.6)
    assert float((got[1] - exact[1]).abs().max()) <= largest
    if dtype == working:
        exact_gradient = torchs(logits.double(), targets, (zero, slope), torch.float64)[2]
        assert float((ours(logits, targets, (zero, slope))[2] - exact_gradient).abs().max()) <= largest
        assert exact_gradient.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_target_with_probability_near_one(dtype: torch.dtype) -> None:
    """1 - p from 1e-7 down to 1e-11, below float32's resolution of p: all three results must still have their digits."""
    logits, targets = problem((16,), 50, dtype=dtype)
    logits = (logits / 3).clamp(-2, 2)
    logits[torch.arange(16), targets] = torch.linspace(20.0, 30.0, 16).to(dtype)
    slopes = (torch.ones(16), torch.full((16,), 0.5))
    exact = torchs(logits.double(), targets, slopes, torch.float64)
    got = ours(logits, targets, slopes)
    assert 0 < float(-exact[0].max()) < 1e-10
    assert relative(got[0], exact[0]) < 1e-6
    # H = -logp + others' share of the distances: two sums of about 1e-9 and 25e-9 with float32 roundings of the distances.
    assert relative(got[1], exact[1]) < 1e-6
    if dtype == torch.float32:  # float16 has no numbers of that size
        at = torch.arange(16), targets
        assert relative(got[2], exact[2]) < 1e-5
        assert relative(got[2][at], exact[2][at]) < 1e-5
        theirs = torchs(logits, targets, slopes, dtype)
        assert relative(theirs[2][at], exact[2][at]) > 1e-3, "torch keeps its digits too: the test is too easy"


def test_logits_of_minus_infinity_are_no_probability() -> None:
    logits, targets = problem((20,), 60)
    slopes = upstreams((20,))
    ruled_out = torch.cat([logits, torch.full((20, 9), float("-inf"))], 1)
    got, expected = ours(ruled_out, targets, slopes), ours(logits, targets, slopes)
    assert relative(got[0], expected[0]) < 1e-6  # the same sums in another order
    assert relative(got[1], expected[1]) < 1e-6
    assert relative(got[2][:, :60], expected[2]) < 1e-6
    assert not got[2][:, 60:].any()


def test_a_target_of_probability_zero() -> None:
    """log p = -inf, and d log p / d z = onehot - p is finite all the same."""
    logits, targets = problem((6,), 20, dtype=torch.float64)
    logits[2, targets[2]] = float("-inf")
    logprobs, entropy, gradient = ours(logits, targets, (torch.ones(6), torch.full((6,), 0.25)))
    assert torch.isneginf(logprobs).tolist() == [False, False, True, False, False, False]
    p = torch.softmax(logits[2], 0)
    log_p = torch.log_softmax(logits[2], 0).clamp(min=-1e30)
    assert float(entropy[2]) == pytest.approx(float(-(p * log_p).sum()), rel=1e-12)
    expected = torch.nn.functional.one_hot(targets[2], 20) - p - 0.25 * p * (log_p + entropy[2])
    assert relative(gradient[2], expected) < 1e-12


def test_a_certain_row() -> None:
    """Only the target is possible: log p = 0, entropy 0, gradient 0, all exactly."""
    logits = torch.full((3, 8), float("-inf"))
    logits[:, 4] = torch.tensor([-50.0, 0.0, 1e4])
    for answer in ours(logits, torch.full((3,), 4), (torch.ones(3), torch.ones(3))):
        assert not answer.any()


def test_nan_in_an_unmasked_row_shows_in_the_loss() -> None:
    logits, targets = problem((5,), 20)
    logits[3, 7] = float("nan")
    result = grpo_loss(logits, targets, torch.ones(5), objective=Objective.dapo())
    assert torch.isnan(result.loss)
    assert torch.isnan(result.logprobs).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    leaf = torch.randn(*shape, 20).requires_grad_()
    targets = torch.zeros(shape, dtype=torch.long)
    result = grpo_loss(leaf, targets, torch.ones(shape), objective=Objective.dapo())
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert leaf.grad.shape == leaf.shape
    assert selected_logprobs(leaf, targets).logprobs.shape == shape
    logprobs = torch.randn(shape).requires_grad_()
    grpo_loss_from_logprobs(logprobs, torch.ones(shape), objective=Objective.dapo()).loss.backward()
    assert logprobs.grad.shape == shape


@pytest.mark.parametrize("shape", [(70_000,), (131_072,), (2, 65_536), (1, 131_072)])
def test_more_rows_than_65536(shape: tuple[int, ...]) -> None:
    """P26: the length of a grid's second dimension, which a kernel with a row per block must not run into."""
    logits, targets = problem(shape, 5)
    slopes = upstreams(shape)
    exact = torchs(logits.double(), targets, slopes, torch.float64)
    theirs = torchs(logits, targets, slopes, torch.float32)
    for got, wanted, other in zip(ours(logits, targets, slopes), exact, theirs, strict=True):
        assert relative(got, wanted) <= 2 * relative(other, wanted)
        last = slice(-100, None)  # the end, which is what such a kernel leaves out
        assert relative(got.flatten(0, len(shape) - 1)[last], wanted.flatten(0, len(shape) - 1)[last]) < 1e-6
    leaf = logits.requires_grad_()
    result = grpo_loss(leaf, targets, torch.ones(shape), objective=Objective.dapo())
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1.0, abs=1e-6)  # on policy a token's loss is -A
    assert bool((leaf.grad != 0).any(-1).all())


@pytest.fixture
def vast(tmp_path: Path) -> Tensor:
    """3 * 2^30 + 2,000 bf16 numbers, 6.4 GB, in a sparse file: only pages that are written or read take memory."""
    return torch.from_file(str(tmp_path / "logits"), shared=True, size=3 * 2**30 + 2000, dtype=torch.bfloat16)


def test_memory_offsets_beyond_two_to_the_31(vast: Tensor) -> None:
    """P27: four rows 2^30 elements apart. In 32 bits the offsets of rows 2 and 3 would be negative, those of 4 bytes each wrong earlier."""
    logits, targets = problem((4,), 1000, dtype=torch.bfloat16)
    far = vast.as_strided((4, 1000), (2**30, 1))
    far.copy_(logits)
    slopes = upstreams((4,))
    expected = ours(logits, targets, slopes)
    leaf = far.detach().requires_grad_()
    result = selected_logprobs(leaf, targets, overwrite_logits=True)
    assert torch.equal(result.logprobs, expected[0])
    assert torch.equal(result.entropy, expected[1])
    (gradient,) = torch.autograd.grad((result.logprobs * slopes[0] + result.entropy * slopes[1]).sum(), leaf)
    assert torch.equal(gradient, expected[2])
    assert torch.equal(far, expected[2])


def test_contiguous_rows_beyond_two_to_the_31(vast: Tensor) -> None:
    rows, vocabulary = 70_000, 40_000
    logits, targets = problem((3,), vocabulary, dtype=torch.bfloat16)
    whole = vast[: rows * vocabulary].view(rows, vocabulary)
    whole[-3:] = logits
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[-3:] = True
    every = torch.zeros(rows, dtype=torch.long)
    every[-3:] = targets
    expected = selected_logprobs(logits, targets)
    for shape in ((rows, vocabulary), (7, rows // 7, vocabulary)):
        result = selected_logprobs(whole.view(shape), every.view(shape[:-1]), mask=mask.view(shape[:-1]))
        assert torch.equal(result.logprobs.view(-1)[-3:], expected.logprobs)
        assert torch.equal(result.entropy.view(-1)[-3:], expected.entropy)


def test_bf16_is_not_read_row_by_row() -> None:
    """P29: with the entropy, half the time of torch's own log-softmax of a float32 copy on a quiet machine; by CPU time."""
    logits, targets = problem((512,), 32_000, dtype=torch.bfloat16)

    def seconds(call: Callable[[], object]) -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    mine, theirs = [], []
    for _ in range(8):  # in turns, and the fastest of each, for others use the machine
        mine.append(seconds(lambda: selected_logprobs(logits, targets)))
        theirs.append(seconds(lambda: torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])))
        if min(mine) <= min(theirs):
            return
    pytest.fail(f"{min(mine):.3f} s against torch's {min(theirs):.3f} s")


def test_autocast_changes_nothing() -> None:
    logits, targets = problem((20,), 60)
    slopes = upstreams((20,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ours(logits, targets, slopes)
    for got, expected in zip(cast, ours(logits, targets, slopes), strict=True):
        assert torch.equal(got, expected)


def test_half_precision_logprobs_keep_float32_numbers() -> None:
    """The loss of bf16 log-probabilities is computed from them in float32."""
    p = make(40, 16, 90, objective=OBJECTIVES["grpo_kl3"])
    now = by_logits(p)[0].logprobs.bfloat16()
    leaf = now.clone().requires_grad_()
    result = grpo_loss_from_logprobs(leaf, p.advantages, **settings(p))
    result.loss.backward()
    wide = now.float().requires_grad_()
    same = grpo_loss_from_logprobs(wide, p.advantages, **settings(p))
    same.loss.backward()
    assert result.loss.dtype == torch.float32
    assert torch.equal(result.loss, same.loss)
    assert torch.equal(leaf.grad, wide.grad.bfloat16())
    assert leaf.grad.any()


def test_losses_of_ones_own_have_the_same_gradient_everywhere() -> None:
    def own(batch: TokenBatch) -> Tensor:
        return -batch.advantages * torch.tanh(batch.logprobs - batch.old_logprobs) + 0.1 * batch.logprobs.square()

    compare_with_the_fused_loss(make(50, 16, 90, dtype=torch.float64, objective=Objective(policy_loss=own, aggregation="token")))


GOOD: dict[str, Any] = {
    "logits": torch.zeros(5, 7),
    "targets": torch.arange(5),
    "advantages": torch.ones(5),
    "objective": Objective.dapo(),
}
BAD: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "logits has shape \\(7,\\)": (ValueError, {"logits": torch.zeros(7)}),
    "logits has shape .* dtype torch.int64": (ValueError, {"logits": torch.zeros(5, 7, dtype=torch.long)}),
    "logits has shape .* dtype torch.float8": (ValueError, {"logits": torch.zeros(5, 7).to(torch.float8_e5m2)}),
    "logits has shape \\(5, 0\\)": (ValueError, {"logits": torch.zeros(5, 0)}),
    "logits is a list": (TypeError, {"logits": [[0.0]]}),
    "targets a int": (TypeError, {"targets": 3}),
    "targets has shape \\(4,\\)": (ValueError, {"targets": torch.arange(4)}),
    "targets has shape .* dtype torch.float32": (ValueError, {"targets": torch.zeros(5)}),
    "targets has shape .* dtype torch.bool": (ValueError, {"targets": torch.ones(5, dtype=torch.bool)}),
    "targets has shape .* dtype torch.complex64": (ValueError, {"targets": torch.zeros(5, dtype=torch.complex64)}),
    "targets holds 7 at row 2": (ValueError, {"targets": torch.tensor([0, 1, 7, 2, 3])}),
    "targets holds -1 at row 0": (ValueError, {"targets": torch.tensor([-1, 1, 6, 2, 3])}),
    "mask has shape \\(4,\\)": (ValueError, {"mask": torch.ones(4, dtype=torch.bool)}),
    "mask has shape .* dtype torch.float32": (ValueError, {"mask": torch.ones(5)}),
    "temperature is 0": (ValueError, {"temperature": 0.0}),
    "temperature is nan": (ValueError, {"temperature": float("nan")}),
    "temperature has shape \\(4,\\)": (ValueError, {"temperature": torch.ones(4)}),
    "temperature holds -1.0 at row 1": (ValueError, {"temperature": torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])}),
}  # fmt: skip
BAD_LOSS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "advantages has shape": (ValueError, {"advantages": torch.ones(2)}),
    "advantages has dtype": (ValueError, {"advantages": torch.ones(5, dtype=torch.long)}),
    "advantages is a list": (TypeError, {"advantages": [1.0]}),
    "objective is 'grpo'": (TypeError, {"objective": "grpo"}),
    "old_logprobs has shape": (ValueError, {"old_logprobs": torch.zeros(4)}),
    "counts is \\(5, 1\\)": (TypeError, {"counts": (5, 1)}),
    "cu_seqlens is": (ValueError, {"cu_seqlens": torch.tensor([0, 3])}),
    "needs the boundaries": (ValueError, {"objective": Objective.grpo()}),
    "ref_logprobs is None": (ValueError, {"objective": Objective(kl_coef=0.1, aggregation="token")}),
    "mask has shape \\(3,\\)": (ValueError, {"mask": torch.ones(3, dtype=torch.bool)}),
    "entropy_threshold is 1.0": (ValueError, {"entropy_threshold": 1.0}),
}
BAD_LOGPROBS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "logprobs has shape \\(\\)": (ValueError, {"logprobs": torch.tensor(1.0)}),
    "logprobs has shape .* dtype torch.int64": (ValueError, {"logprobs": torch.zeros(5, dtype=torch.long)}),
    "logprobs is a list": (TypeError, {"logprobs": [0.0]}),
    "entropy has shape \\(4,\\)": (ValueError, {"entropy": torch.zeros(4)}),
    "entropy is a list": (TypeError, {"entropy": [0.0]}),
    "entropy is None, but objective.entropy_coef": (ValueError, {"objective": Objective.dapo(entropy_coef=0.1)}),
    "entropy is None, but .*top_entropy needs it": (ValueError, {"objective": Objective.dapo(top_entropy=0.5)}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    kind, changes = BAD[message]
    with pytest.raises(kind, match=message):
        selected_logprobs(**{**{name: GOOD[name] for name in ("logits", "targets")}, **changes})
    with pytest.raises(kind, match=message):
        grpo_loss(**{**GOOD, **changes})


@pytest.mark.parametrize("message", {**BAD_LOSS, **BAD_LOGPROBS})
def test_bad_arguments_of_the_losses_are_named(message: str) -> None:
    kind, changes = {**BAD_LOSS, **BAD_LOGPROBS}[message]
    good = {"logprobs": torch.zeros(5), "advantages": GOOD["advantages"], "objective": GOOD["objective"]}
    with pytest.raises(kind, match=message):
        grpo_loss_from_logprobs(**{**good, **changes})
    if message in BAD_LOSS:
        with pytest.raises(kind, match=message):
            grpo_loss(**{**GOOD, **changes})


def test_overwriting_an_overlapping_view_is_refused_and_a_transposed_one_is_not() -> None:
    with pytest.raises(ValueError, match="entries of logits share their memory"):
        selected_logprobs(torch.randn(8).unfold(0, 4, 1), torch.zeros(5, dtype=torch.long), overwrite_logits=True)
    logits, targets = problem((12,), 20)
    turned = logits.t().contiguous().t().requires_grad_()
    selected_logprobs(turned, targets, overwrite_logits=True).logprobs.sum().backward()
    assert relative(turned.grad, torchs(logits, targets, torch.stack([torch.ones(12), torch.zeros(12)]), torch.float64)[2]) < 1e-6
