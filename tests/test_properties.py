"""Property tests: any shape, stride, dtype, mask and objective that the fuzzer finds, against the specification in float64."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_kernels import (
    LossCounts,
    Objective,
    RolloutCorrection,
    backends,
    group_advantages,
    grpo_loss,
    grpo_loss_from_logprobs,
    linear_grpo_loss,
    linear_logprobs,
    selected_logprobs,
)
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.reference import reference_grpo_loss, reference_logprobs

# The same examples in every run: a red CI must mean a changed program. GRPO_FUZZ=1 looks for new ones.
settings.register_profile(
    "grpo",
    deadline=None,
    derandomize=os.environ.get("GRPO_FUZZ") != "1",
    max_examples=int(os.environ.get("GRPO_EXAMPLES", "1500")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("grpo")

AVAILABLE = [status.name for status in backends() if status.available]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
seeds = st.integers(0, 2**31 - 1)


@st.composite
def corrections(draw: st.DrawFn) -> RolloutCorrection:
    low = draw(st.sampled_from([None, 0.5, 0.9]))
    return RolloutCorrection(
        level=draw(st.sampled_from(["token", "sequence", "geometric"])),
        mode=draw(st.sampled_from(["truncate", "mask"])),
        low=low,
        high=draw(st.sampled_from([1.1, 2.0] if low is None else [None, 1.1, 2.0])),
    )


@st.composite
def objectives(draw: st.DrawFn) -> Objective:
    policy = draw(st.sampled_from(["clip", "cispo", "sapo", "gmpo", "vespo", "reinforce"]))
    aggregation = draw(st.sampled_from(["token", "sequence", "constant"]))
    correction = draw(st.none() | corrections())
    if policy == "vespo" and correction is not None and correction.level != "token":
        correction = None
    return Objective(
        policy_loss=policy,
        ratio_level=draw(st.sampled_from(["token", "sequence"])),
        clip_low=draw(st.sampled_from([0.0, 0.1, 0.3])),
        clip_high=draw(st.sampled_from([0.05, 0.3, 1.0])),
        max_ratio=draw(st.sampled_from([None, 2.5])) if policy == "clip" else None,
        kl=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        kl_ratio_corrected=draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.0, 0.05])),
        top_entropy=draw(st.sampled_from([1.0, 1.0, 0.5])),
        rollout_correction=correction,
        off_policy_threshold=draw(st.sampled_from([None, None, 0.05])),
        aggregation=aggregation,
        constant_length=7 if aggregation == "constant" else None,
    )


def strided(values: Tensor, how: str) -> Tensor:
    """The same values in another memory layout."""
    if how == "transposed":
        return values.t().contiguous().t() if values.dim() == 2 else values
    if how == "sliced":
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), 7.0).to(values.dtype)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    if how == "offset":
        return torch.cat([values[:1], values])[1:] if values.shape[0] else values
    return values


strides = st.sampled_from(["plain", "transposed", "sliced", "offset"])


@st.composite
def problems(draw: st.DrawFn, dtypes: list[torch.dtype]) -> dict[str, Any]:
    """Arguments of `linear_grpo_loss`; log-ratios stay within +-20, which is where the specification holds."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=0, max_size=6))
    assume(not (0 in lengths and sum(lengths) == len(lengths)))  # refused: advantages per row or per sequence?
    rows, width, vocabulary = sum(lengths), draw(st.integers(1, 9)), draw(st.integers(1, 40))
    g = torch.Generator().manual_seed(draw(seeds))
    objective = draw(objectives())
    hidden_dtype, weight_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(dtypes))
    near = torch.randn(3, rows, generator=g) * 0.2
    hidden = (torch.randn(rows, width, generator=g) * 2).to(hidden_dtype)
    weight = torch.randn(vocabulary, width, generator=g).to(weight_dtype)
    bias = torch.randn(vocabulary, generator=g).to(draw(st.sampled_from(dtypes))) if draw(st.booleans()) else None
    softcap = draw(st.sampled_from([None, None, 3.0]))
    temperature = draw(st.sampled_from([1.0, 0.6])) if draw(st.booleans()) else torch.rand(rows, generator=g) + 0.5
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    exact = [None if t is None else t.double() for t in (hidden, weight, bias)]
    heat = temperature.double() if isinstance(temperature, Tensor) else temperature
    now, _ = reference_logprobs(exact[0], exact[1], targets, bias=exact[2], softcap=softcap, temperature=heat)
    advantages = torch.randn(rows, generator=g) * (torch.rand(rows, generator=g) < 0.7)
    return {
        "hidden": strided(hidden, draw(strides)),
        "weight": strided(weight, draw(strides)),
        "targets": strided(targets, draw(strides)),
        "advantages": strided(advantages, draw(strides)),
        "objective": objective,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "mask": strided((torch.rand(rows, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0]))).long(), draw(strides)),
        "old_logprobs": (now + near[0]).float() if draw(st.booleans()) else None,
        "ref_logprobs": (now + near[1]).float() if objective.kl_coef or draw(st.booleans()) else None,
        "rollout_logprobs": (now + near[2]).float() if objective.rollout_correction or draw(st.booleans()) else None,
        "bias": bias,
        "softcap": softcap,
        "temperature": temperature,
        "backend": draw(st.sampled_from(AVAILABLE)),
    }


def with_leaves(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    leaves = {name: arguments[name].detach().requires_grad_() for name in ("hidden", "weight", "bias") if arguments[name] is not None}
    return {**arguments, **leaves}, leaves


def specification(arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in float64."""
    leaves = {
        name: arguments[name].detach().double().requires_grad_() for name in ("hidden", "weight", "bias") if arguments[name] is not None
    }
    heat, rows = arguments["temperature"], arguments["targets"].numel()
    logprobs, entropy = reference_logprobs(
        leaves["hidden"], leaves["weight"], arguments["targets"], bias=leaves.get("bias"), softcap=arguments["softcap"],
        temperature=heat.double() if isinstance(heat, Tensor) else heat,
    )  # fmt: skip
    mask = arguments["mask"] != 0
    lengths = arguments["cu_seqlens"].diff()
    sequence = torch.arange(lengths.numel()).repeat_interleave(lengths)
    counts = LossCounts.of(mask, sequence)
    others = {
        name: None if arguments[name] is None else arguments[name].double() for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    loss = reference_grpo_loss(
        logprobs, entropy, arguments["advantages"].double(), objective=arguments["objective"], sequence_of_row=sequence, mask=mask,
        tokens=max(counts.tokens, 1), sequences=max(counts.sequences, 1), **others,
    )  # fmt: skip
    if loss.requires_grad:
        loss.backward()
    zero = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    assert rows == logprobs.numel()
    return loss.detach(), zero


@given(problems([torch.float64]))
def test_the_loss_and_its_gradients_are_those_of_the_specification(arguments: dict[str, Any]) -> None:
    """In float64, where only advantages, weights and given log-probabilities are rounded to float32: any fault of logic shows."""
    call, leaves = with_leaves(arguments)
    result = linear_grpo_loss(**call)
    result.loss.backward()
    loss, gradients = specification(arguments)
    scale = 1 + float(loss.abs())
    assert abs(float(result.loss.detach()) - float(loss)) < 2e-6 * scale
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert float((leaf.grad - gradients[name]).norm()) < 3e-6 * (float(gradients[name].norm()) + 0.1), name


def smooth(arguments: dict[str, Any]) -> bool:
    """Whether no bound is near, over which a rounding could put a ratio, a drift or an entropy."""
    objective = arguments["objective"]
    return arguments["old_logprobs"] is None and not (
        objective.rollout_correction or objective.off_policy_threshold is not None or objective.top_entropy < 1.0
    )


@given(problems(DTYPES))
def test_any_dtypes_and_strides_come_out_finite_and_in_their_own_dtype(arguments: dict[str, Any]) -> None:
    call, leaves = with_leaves(arguments)
    result = linear_grpo_loss(**call)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    if smooth(arguments):
        for name, exact in specification(arguments)[1].items():
            # The gradients' own rounding, and that of log-probabilities of up to 30, which a ratio of a whole sequence sums.
            tolerance = torch.finfo(leaves[name].dtype).eps + 1e-4
            assert float((leaves[name].grad.double() - exact).norm()) < tolerance * (float(exact.norm()) + 0.1), name
    for leaf in leaves.values():
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert torch.isfinite(leaf.grad).all()
    contiguous = {name: v.clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    call, again = with_leaves(contiguous)
    linear_grpo_loss(**call).loss.backward()
    for name, leaf in leaves.items():
        # A transposed weight takes another path through the GEMM library; a bf16 gradient may then round to its neighbour.
        tolerance = 2 * torch.finfo(leaf.dtype).eps + 3e-5
        assert float((leaf.grad.double() - again[name].grad.double()).norm()) <= tolerance * (float(leaf.grad.double().norm()) + 0.1)


@given(problems([torch.float64]), st.integers(1, 9))
def test_the_chunk_size_does_not_matter(arguments: dict[str, Any], rows: int) -> None:
    call, leaves = with_leaves(arguments)
    whole = linear_grpo_loss(**call)
    whole.loss.backward()
    real = TorchBackend.rows_per_chunk
    TorchBackend.rows_per_chunk = lambda *_, **__: rows
    try:
        call, again = with_leaves(arguments)
        cut = linear_grpo_loss(**call)
        cut.loss.backward()
    finally:
        TorchBackend.rows_per_chunk = real
    assert abs(float(cut.loss.detach()) - float(whole.loss.detach())) < 1e-9 * (1 + abs(float(whole.loss.detach())))
    for name, leaf in leaves.items():
        assert float((leaf.grad - again[name].grad).norm()) < 1e-9 * (float(leaf.grad.norm()) + 1)


@given(problems([torch.float64]), st.sampled_from([float("nan"), float("inf"), 1e30]))
def test_masked_rows_change_nothing_whatever_they_hold(arguments: dict[str, Any], poison: float) -> None:
    call, leaves = with_leaves(arguments)
    clean = linear_grpo_loss(**call)
    clean.loss.backward()
    masked = arguments["mask"] == 0
    poisoned = dict(arguments)
    for name in ("hidden", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs"):
        if poisoned[name] is not None:
            poisoned[name] = poisoned[name].clone()
            poisoned[name][masked] = poison
    poisoned["targets"] = torch.where(masked, 10**6, arguments["targets"])
    call, again = with_leaves(poisoned)
    dirty = linear_grpo_loss(**call)
    dirty.loss.backward()
    assert torch.equal(clean.loss, dirty.loss)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, again[name].grad), name


@given(problems([torch.float64]))
def test_logits_and_log_probabilities_give_the_same_loss_as_hidden_states(arguments: dict[str, Any]) -> None:
    if arguments["softcap"] is not None or arguments["bias"] is not None:
        arguments = {**arguments, "softcap": None, "bias": None}
    call, leaves = with_leaves(arguments)
    whole = linear_grpo_loss(**call)
    whole.loss.backward()
    rows = {
        name: arguments[name]
        for name in ("advantages", "objective", "cu_seqlens", "mask", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    hidden = arguments["hidden"].detach().requires_grad_()
    logits = hidden @ arguments["weight"].t()
    grpo_loss(logits, arguments["targets"], temperature=arguments["temperature"], **rows).loss.backward()
    assert float((hidden.grad - leaves["hidden"].grad).norm()) < 1e-6 * (float(hidden.grad.norm()) + 0.1)
    again = arguments["hidden"].detach().requires_grad_()
    tokens = linear_logprobs(again, arguments["weight"], arguments["targets"], temperature=arguments["temperature"])
    grpo_loss_from_logprobs(tokens.logprobs, entropy=tokens.entropy, **rows).loss.backward()
    assert float((again.grad - leaves["hidden"].grad).norm()) < 1e-6 * (float(hidden.grad.norm()) + 0.1)


@given(st.data())
def test_selected_logprobs_of_any_layout(data: st.DataObject) -> None:
    batch, length, vocabulary = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5)), data.draw(st.integers(1, 30))
    g = torch.Generator().manual_seed(data.draw(seeds))
    logits = torch.randn(batch, length + 1, vocabulary, generator=g) * data.draw(st.sampled_from([1.0, 30.0]))
    logits.requires_grad_()
    targets = torch.randint(0, vocabulary, (batch, length), generator=g)
    result = selected_logprobs(logits[:, :-1], targets)
    upstream = torch.randn(2, batch, length, generator=g)
    (result.logprobs * upstream[0] + result.entropy * upstream[1]).sum().backward()
    exact = logits.detach().double().requires_grad_()
    distribution = torch.log_softmax(exact[:, :-1], -1)
    logprobs = distribution.gather(2, targets[..., None])[..., 0]
    (logprobs * upstream[0] - (distribution.exp() * distribution).sum(-1) * upstream[1]).sum().backward()
    assert float((result.logprobs - logprobs).detach().abs().max() if logprobs.numel() else 0.0) < 2e-5
    assert float((logits.grad - exact.grad).norm()) < 2e-5 * (float(exact.grad.norm()) + 0.1)


@given(st.lists(st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5))
def test_advantages_of_a_group_add_up_to_0(groups: list[list[float | None]]) -> None:
    rewards = [reward for group in groups for reward in group]
    sizes = [len(group) for group in groups]
    for settings_ in ({"scale": "group"}, {"scale": "none"}, {"scale": "batch"}, {"scale": "none", "baseline": "leave_one_out"}):
        advantages = group_advantages(rewards, sizes=sizes, **settings_)
        assert torch.isfinite(advantages).all()
        for part, group in zip(advantages.split(sizes), groups, strict=True):
            assert abs(float(part.double().sum())) < 1e-4 * (1 + float(part.abs().max()))
            assert all(float(a) == 0.0 for a, reward in zip(part, group, strict=True) if reward is None)
            if len({reward for reward in group if reward is not None}) <= 1:
                assert torch.equal(part, torch.zeros(len(group)))
