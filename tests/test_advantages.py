from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

import pytest
import torch

from grpo_kernels.advantages import group_advantages, kl_penalized_rewards

RAGGED_SIZES = [4, 1, 3, 2, 2]
RAGGED: list[float | None] = [1.0, None, 0.25, -2.0, 3.0, 0.5, 0.5, 0.5, None, None, 7.0, None]
MODES = [(scale, baseline) for scale in ("group", "batch", "none") for baseline in ("mean", "leave_one_out")]


def split(values: Sequence, sizes: Sequence[int]) -> list[list]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [list(values[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def plain_advantages(rewards: Sequence[float | None], sizes: Sequence[int], scale: str, baseline: str, eps: float) -> list[float]:
    """The definition in plain Python, one completion after the other."""
    everything = [r for r in rewards if r is not None]
    advantages = []
    for group in split(rewards, sizes):
        there = [r for r in group if r is not None]
        for i, reward in enumerate(group):
            others = [r for j, r in enumerate(group) if r is not None and j != i]
            if reward is None or not others:
                advantages.append(0.0)
                continue
            difference = reward - mean(there if baseline == "mean" else others)
            divisor = {"group": stdev(there), "batch": stdev(everything), "none": 1.0 - eps}[scale] + eps
            advantages.append(difference / divisor)
    return advantages


def plain_gdpo(table: Sequence[Sequence[float | None]], sizes: Sequence[int], weights: Sequence[float], eps: float) -> list[float]:
    columns = [plain_advantages(column, sizes, "group", "mean", eps) for column in zip(*table, strict=True)]
    sums = [sum(w * c for w, c in zip(weights, row, strict=True)) for row in zip(*columns, strict=True)]
    there = [total for total, row in zip(sums, table, strict=True) if any(r is not None for r in row)]
    return [
        0.0 if all(r is None for r in row) else (total - mean(there)) / (stdev(there) + eps) for total, row in zip(sums, table, strict=True)
    ]


def test_textbook_values() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0])
    by_size = group_advantages(rewards, sizes=[4, 2])
    std = torch.tensor([1.0, 0.0, 0.0, 1.0]).std()
    assert torch.allclose(by_size[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6))
    assert torch.allclose(by_size[4:], torch.tensor([1.0, -1.0]) / (2**0.5 + 1e-6))
    assert torch.allclose(group_advantages(rewards, sizes=[4, 2], scale="none"), torch.tensor([0.5, -0.5, -0.5, 0.5, 1.0, -1.0]))
    batch = group_advantages(rewards, sizes=[4, 2], scale="batch")
    assert torch.allclose(batch, torch.tensor([0.5, -0.5, -0.5, 0.5, 1.0, -1.0]) / (rewards.std() + 1e-6))


def test_ids_in_any_order_equal_sizes() -> None:
    rewards, ids = torch.randn(30), torch.tensor([7] * 9 + [-2] * 1 + [5] * 20)
    order = torch.randperm(30)
    expected = torch.cat([group_advantages(rewards[a:b], b - a) for a, b in ((0, 9), (9, 10), (10, 30))])
    assert torch.allclose(group_advantages(rewards[order], ids[order]), expected[order])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [1e9, 1e9, 1e9], [0.0, 0.0, 0.0], [-0.7, -0.7, -0.7]])
def test_equal_rewards_give_exactly_zero(scale: str, rewards: list[float]) -> None:
    values = torch.tensor([*rewards, 0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(values, sizes=[3, 2], scale=scale)
    assert torch.equal(advantages[:3], torch.zeros(3))
    assert (advantages[3:] != 0).all()
    assert torch.equal(group_advantages(values[:3], 3, scale=scale), torch.zeros(3))


def test_a_small_spread_on_a_large_offset_is_signal() -> None:
    advantages = group_advantages(torch.tensor([1e6, 1e6 + 0.5], dtype=torch.float64), 2)
    assert torch.allclose(advantages, torch.tensor([-1.0, 1.0]) / 2**0.5, atol=1e-4)
    half = torch.tensor([0.9, 0.9039], dtype=torch.bfloat16)
    assert half[0] != half[1]
    assert group_advantages(half, 2).abs().min() > 0.1
    assert group_advantages(torch.tensor([3, 4, 5]), 3).tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def test_sizes_of_numpy_type() -> None:
    import numpy

    rewards = torch.rand(6)
    assert torch.equal(group_advantages(rewards, numpy.int64(3)), group_advantages(rewards, 3))


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="rewards is a dict"):
        group_advantages({0: 1.0}, 1)
    with pytest.raises(TypeError, match="rewards is a str"):
        group_advantages("12", 2)
    with pytest.raises(TypeError, match=r"rewards has dtype torch\.complex64"):
        group_advantages(torch.zeros(2, dtype=torch.complex64), 2)
    with pytest.raises(TypeError, match=r"rewards\[1\] is '2'"):
        group_advantages([1.0, "2"], 2)
    with pytest.raises(TypeError, match=r"rewards\[1\]\[0\] is '2'"):
        group_advantages([[1.0], ["2"]], 2)
    with pytest.raises(TypeError, match="groups is a list"):
        group_advantages(torch.rand(2), [2])
    with pytest.raises(TypeError, match=r"sizes is \[2.0\]"):
        group_advantages(torch.rand(2), sizes=[2.0])
    with pytest.raises(TypeError, match="weights is 'ab'"):
        group_advantages(torch.rand(2, 2), 2, weights="ab")


def test_a_group_of_one_has_no_advantage() -> None:
    assert torch.equal(group_advantages(torch.tensor([5.0, 1.0, 2.0]), sizes=[1, 2])[:1], torch.zeros(1))


def test_no_rewards() -> None:
    assert group_advantages(torch.zeros(0), sizes=[]).shape == (0,)


def test_affine_rewards_give_the_same_group_scaled_advantages() -> None:
    rewards = torch.rand(24)
    assert torch.allclose(group_advantages(rewards, 8), group_advantages(rewards * 40 + 7, 8), atol=1e-4)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"rewards has shape \(2, 2, 2\)", {"rewards": torch.zeros(2, 2, 2), "groups": 2}),
        (r"rewards has shape \(\)", {"rewards": torch.tensor(1.0), "groups": 1}),
        (r"rewards has shape \(2, 0\)", {"rewards": torch.zeros(2, 0), "groups": 2}),
        (r"rewards has shape \(2, 0\)", {"rewards": [[], []], "groups": 2}),
        (r"rewards\[1\] is \[0.0\]; .*as many rewards", {"rewards": [[0.0, 1.0], [0.0]], "groups": 2}),
        (r"rewards\[0\] is None; .*as many rewards", {"rewards": [None, [0.0]], "groups": 2}),
        (r"rewards\[1\] is nan; .*written as None, in a list", {"rewards": torch.tensor([0.0, math.nan]), "groups": 2}),
        (r"rewards\[1\] is inf", {"rewards": [0.0, math.inf], "groups": 2}),
        (r"rewards\[1, 0\] is nan", {"rewards": [[0.0, None], [math.nan, 1.0]], "groups": 2}),
        (r"weights is \[1.0\]; .*\(2,\)", {"rewards": torch.zeros(2, 2), "groups": 2, "weights": [1.0]}),
        (r"weights is \[1.0, 2.0\]; .*\(1,\)", {"rewards": torch.zeros(2), "groups": 2, "weights": [1.0, 2.0]}),
        (r"weights is \[1.0, nan\]", {"rewards": torch.zeros(2, 2), "groups": 2, "weights": torch.tensor([1.0, math.nan])}),
        ("baseline is 'median'; it must be one of 'mean', 'leave_one_out'", {"rewards": torch.zeros(2), "groups": 2, "baseline": "median"}),
        ("combine is 'sum'", {"rewards": torch.zeros(2), "groups": 2, "combine": "sum"}),
        ("needs scale 'group' .* 'none'", {"rewards": torch.zeros(2), "groups": 2, "combine": "normalize_then_sum", "scale": "none"}),
        (
            "needs scale 'group' and baseline 'mean'; .* 'leave_one_out'",
            {"rewards": torch.zeros(2), "groups": 2, "combine": "normalize_then_sum", "baseline": "leave_one_out"},
        ),
        ("exactly one of groups", {"rewards": torch.zeros(2)}),
        ("exactly one of groups", {"rewards": torch.zeros(2), "groups": 2, "sizes": [2]}),
        ("groups is 4", {"rewards": torch.zeros(6), "groups": 4}),
        ("groups is 0", {"rewards": torch.zeros(6), "groups": 0}),
        ("groups has shape", {"rewards": torch.zeros(6), "groups": torch.zeros(5, dtype=torch.long)}),
        ("groups has shape .* dtype torch.float32", {"rewards": torch.zeros(6), "groups": torch.zeros(6)}),
        (r"sizes is \[3, 2\]", {"rewards": torch.zeros(6), "sizes": [3, 2]}),
        ("eps is -1", {"rewards": torch.zeros(6), "groups": 2, "eps": -1.0}),
        ("eps is nan", {"rewards": torch.zeros(6), "groups": 2, "eps": float("nan")}),
        ("scale is 'sample'", {"rewards": torch.zeros(6), "groups": 2, "scale": "sample"}),
    ],
)
def test_bad_arguments_are_named(message: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(**arguments)


def test_a_missing_reward_is_not_a_reward_of_zero() -> None:
    siblings = [0.5, 0.1, -0.2, -0.3, -0.5, -0.6, -0.8]  # mean -9/35, unbiased variance 1.64 - 7 (9/35)^2 by 6
    advantages = group_advantages([*siblings[:3], None, *siblings[3:]], 8).tolist()
    std = ((1.64 - 7 * (9 / 35) ** 2) / 6) ** 0.5
    assert advantages[3] == 0.0
    assert advantages[:3] + advantages[4:] == pytest.approx([(r + 9 / 35) / (std + 1e-6) for r in siblings], rel=1e-6)
    assert group_advantages([*siblings[:3], 0.0, *siblings[3:]], 8)[3] > 0.1  # what a 0 in its place would have been given


@pytest.mark.parametrize(("scale", "baseline"), MODES)
def test_every_mode_by_its_definition(scale: str, baseline: str) -> None:
    advantages = group_advantages(RAGGED, sizes=RAGGED_SIZES, scale=scale, baseline=baseline, eps=0.01)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(plain_advantages(RAGGED, RAGGED_SIZES, scale, baseline, 0.01), rel=1e-6, abs=0.0)


@pytest.mark.parametrize(("scale", "baseline"), MODES)
def test_a_missing_completion_is_as_if_it_had_not_been_sampled(scale: str, baseline: str) -> None:
    kept = [i for i, reward in enumerate(RAGGED) if reward is not None]
    ids = torch.arange(5).repeat_interleave(torch.tensor(RAGGED_SIZES))
    advantages = group_advantages(RAGGED, ids, scale=scale, baseline=baseline)
    without = group_advantages(torch.tensor([RAGGED[i] for i in kept], dtype=torch.float64), ids[kept], scale=scale, baseline=baseline)
    assert torch.equal(advantages[kept], without)
    assert without.abs().max() > 0.5


@pytest.mark.parametrize("combine", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("missing", [[None] * 3, [[None, None]] * 3])
def test_a_group_without_any_reward_has_no_advantage(missing: list, combine: str) -> None:
    assert torch.equal(group_advantages(missing, 3, combine=combine), torch.zeros(3))
    scored = [1.0, 0.0] if missing[0] is None else [[1.0, 2.0], [0.0, None]]
    advantages = group_advantages([*missing, *scored], sizes=[3, 2], combine=combine)
    assert torch.equal(advantages[:3], torch.zeros(3))
    assert advantages[3] > 0.5 > -0.5 > advantages[4]


def test_leave_one_out_has_its_textbook_values() -> None:
    rewards = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])  # the other seven: 2 of 7 right, or 3 of 7
    advantages = group_advantages(rewards, 8, scale="none", baseline="leave_one_out")
    assert advantages.tolist() == pytest.approx([5 / 7] * 3 + [-3 / 7] * 5, rel=1e-6)
    assert torch.equal(group_advantages([2.0, None], 2, baseline="leave_one_out"), torch.zeros(2))


def test_leave_one_out_keeps_the_std_of_all_completions() -> None:
    """NeMo-RL #1518: the others of the one success have std 0, and its advantage became 1e6."""
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], 4, baseline="leave_one_out")
    assert advantages.tolist() == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3], rel=1e-5)  # std 1/2
    uneven = group_advantages([0.35] * 7 + [0.95], 8, baseline="leave_one_out")  # 0.35 is no binary fraction
    assert uneven[7] == pytest.approx(0.6 / (0.6 / 8**0.5), rel=1e-5)


@pytest.mark.parametrize(("scale", "baseline"), MODES)
def test_a_constant_added_to_a_group_changes_nothing(scale: str, baseline: str) -> None:
    rewards = torch.rand(12, dtype=torch.float64)
    shift = torch.zeros(12, dtype=torch.float64) if scale == "batch" else torch.tensor([5.0, -2.0, 40.0]).repeat_interleave(4).double()
    shift = shift + 3.0  # of the whole batch, which every scale must bear
    advantages = group_advantages(rewards, 4, scale=scale, baseline=baseline)
    assert torch.allclose(group_advantages(rewards + shift, 4, scale=scale, baseline=baseline), advantages, atol=1e-6)
    assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("combine", ["sum_then_normalize", "normalize_then_sum"])
def test_permuted_completions_have_permuted_advantages(combine: str) -> None:
    table = [[r, None if i % 3 == 0 else float(i * i % 5)] for i, r in enumerate(RAGGED)]
    ids, order = torch.arange(5).repeat_interleave(torch.tensor(RAGGED_SIZES)), torch.randperm(12)
    advantages = group_advantages(table, ids, combine=combine)
    assert torch.allclose(group_advantages([table[i] for i in order], ids[order], combine=combine), advantages[order], atol=1e-6)
    assert (advantages != 0).sum() > 6


def test_several_rewards_are_summed_with_their_weights() -> None:
    table = [[1.0, 0.5], [0.0, None], [None, 2.0], [None, None]]
    sums = [1.0 * 2 - 0.5, 0.0, -2.0, None]
    for mode in ({"scale": "group"}, {"scale": "none", "baseline": "leave_one_out"}):
        assert torch.equal(group_advantages(table, 4, weights=[2.0, -1.0], **mode), group_advantages(sums, 4, **mode))
    by_hand = [1.5 + 0.5 / 3, 0.5 / 3, -2.0 + 0.5 / 3, 0.0]  # the mean of the three sums is -1/6
    assert group_advantages(table, 4, weights=[2.0, -1.0], scale="none").tolist() == pytest.approx(by_hand, rel=1e-6)
    assert torch.equal(group_advantages(table, 4), group_advantages([1.5, 0.0, 2.0, None], 4))  # by default, each counts 1


@pytest.mark.parametrize(("scale", "baseline"), MODES)
def test_one_reward_in_a_column_is_the_plain_call(scale: str, baseline: str) -> None:
    rewards = torch.rand(8)
    plain = group_advantages(rewards, 4, scale=scale, baseline=baseline)
    assert torch.equal(group_advantages(rewards[:, None], 4, scale=scale, baseline=baseline), plain)
    assert torch.equal(group_advantages([[r] for r in rewards.tolist()], 4, scale=scale, baseline=baseline), plain)
    assert torch.equal(
        group_advantages(rewards[:, None], 4, combine="normalize_then_sum"), group_advantages(rewards, 4, combine="normalize_then_sum")
    )
    assert plain.abs().max() > 0.01


def test_rewards_normalised_apart_weigh_alike_whatever_their_scale() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1000.0], [1.0, 1000.0]])
    apart = group_advantages(table, 4, combine="normalize_then_sum")
    # Each reward becomes +-s; the sums 0, -2s, 0, 2s have mean 0 and std s sqrt(8/3).
    assert apart.tolist() == pytest.approx([0.0, -(1.5**0.5), 0.0, 1.5**0.5], abs=1e-5)
    assert group_advantages(table, 4)[0] < -0.8  # summed first, the large reward alone decides


def test_normalize_then_sum_by_its_definition() -> None:
    second: list[float | None] = [None, None, 3.0, 1.0, 2.0, -1.0, None, 4.0, None, 0.0, 0.25, 1.5]
    table = list(zip(RAGGED, second, strict=True))
    advantages = group_advantages(table, sizes=RAGGED_SIZES, combine="normalize_then_sum", weights=[0.5, 2.0], eps=0.01)
    assert advantages.tolist() == pytest.approx(plain_gdpo(table, RAGGED_SIZES, [0.5, 2.0], 0.01), rel=1e-6, abs=1e-7)
    assert advantages[1] == advantages[8] == 0.0


def test_flat_rewards_give_exactly_zero_apart_and_in_sum() -> None:
    rewards = torch.tensor([[0.1 + 0.2, 1.0], [0.3, 0.0], [0.3, 0.3], [0.1 + 0.2, 0.3]], dtype=torch.float64)
    apart = group_advantages(rewards, 2, combine="normalize_then_sum", eps=0.0)
    assert apart[:2].tolist() == pytest.approx([3**0.5 / 2**0.5, -(3**0.5) / 2**0.5], rel=1e-6)  # sums s, -s, 0, 0: std s sqrt(2/3)
    assert torch.equal(apart[2:], torch.zeros(2))
    # The second reward is 1 minus the first: what is left of the sum is rounding, to be judged by the size of what was summed.
    opposed = torch.rand(64, 1) / 3
    opposed = torch.cat([opposed, 1 - opposed], dim=1)
    assert not torch.equal(opposed.double().sum(1), torch.ones(64, dtype=torch.float64))
    for combine in ("sum_then_normalize", "normalize_then_sum"):
        assert torch.equal(group_advantages(opposed, 8, combine=combine, eps=0.0), torch.zeros(64))
    assert torch.equal(group_advantages([0.1 + 0.2, 0.3, None], 3, eps=0.0), torch.zeros(3))  # flat among those that are there
    cancelled = torch.tensor([[0.1 + 0.2, -0.3], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(group_advantages(cancelled, 2, eps=0.0), torch.zeros(2))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_without_eps_a_flat_group_is_still_zero(scale: str) -> None:
    assert torch.equal(group_advantages([1.0, 1.0, 5.0], sizes=[2, 1], scale=scale, eps=0.0)[:2], torch.zeros(2))
    assert torch.equal(group_advantages([2.0, 2.0], 2, scale=scale, eps=0.0), torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_any_dtype_is_computed_in_float64(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [1, 0]]).to(dtype)
    for arguments in ({}, {"combine": "normalize_then_sum"}, {"scale": "batch", "baseline": "leave_one_out", "weights": [0.3, 0.1]}):
        advantages = group_advantages(rewards, sizes=[4, 2], **arguments)
        assert advantages.dtype == torch.float32
        assert torch.equal(advantages, group_advantages(rewards.double(), sizes=[4, 2], **arguments))
        assert (advantages[:4] != 0).any()


def test_no_completions_in_every_form() -> None:
    for rewards in ([], torch.zeros(0, 2)):
        for combine in ("sum_then_normalize", "normalize_then_sum"):
            assert group_advantages(rewards, sizes=[], combine=combine).shape == (0,)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_parity_with_trl(scale: str) -> None:
    """The formulas of TRL 1.16 for complete rewards and equal groups."""
    table, weights = torch.rand(12, 3, dtype=torch.float64), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    rewards = (table * weights).sum(1)
    grouped = rewards.view(3, 4)
    divisor = {"group": grouped.std(1, keepdim=True) + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
    expected = ((grouped - grouped.mean(1, keepdim=True)) / divisor).view(-1)
    assert torch.allclose(group_advantages(table, 4, scale=scale, weights=weights, eps=1e-4).double(), expected, atol=1e-6)


def test_parity_with_trl_normalised_apart() -> None:
    table, weights = torch.rand(12, 3, dtype=torch.float64), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    grouped = table.view(3, 4, 3)
    apart = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    sums = (apart.view(12, 3) * weights).sum(1)
    expected = (sums - sums.mean()) / (sums.std() + 1e-4)
    advantages = group_advantages(table, 4, weights=weights, combine="normalize_then_sum", eps=1e-4)
    assert torch.allclose(advantages.double(), expected, atol=1e-6)


LOGPROBS, REFERENCE = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5]), torch.tensor([-1.5, -1.0, -0.5, -3.25, -2.5])


@pytest.mark.parametrize(
    ("kl", "of_first", "of_last"),
    [
        ("k1", 0.5 - 1.0, 0.0 + 0.25 + 1.0),
        ("k2", (0.25 + 1.0) / 2, (0.0625 + 1.0) / 2),
        ("k3", (math.exp(-0.5) - 0.5) + (math.e - 2), (math.exp(-0.25) - 0.75) + math.exp(-1.0)),
    ],
)
def test_kl_in_the_reward(kl: str, of_first: float, of_last: float) -> None:
    expected = [1.0 - 0.1 * of_first, 2.0, 3.0 - 0.1 * of_last]
    bounds = torch.tensor([0, 2, 2, 5])
    packed = kl_penalized_rewards(torch.tensor([1, 2, 3]), LOGPROBS, REFERENCE, coef=0.1, kl=kl, cu_seqlens=bounds)
    assert packed.dtype == torch.float32
    assert packed.tolist() == pytest.approx(expected, rel=1e-6)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    for hole in (math.nan, math.inf, -math.inf, 1e30):
        padded, reference = torch.full((3, 3), hole), torch.full((3, 3), -hole)
        padded[mask == 1], reference[mask == 1] = LOGPROBS, REFERENCE
        rewards = kl_penalized_rewards(torch.tensor([1.0, 2.0, 3.0]), padded, reference, coef=0.1, kl=kl, mask=mask)
        assert torch.equal(rewards, packed)


def test_kl_in_the_reward_is_k1_and_constant_by_default() -> None:
    rewards = torch.zeros(1, dtype=torch.float64)
    logprobs = LOGPROBS.clone().requires_grad_()
    penalized = kl_penalized_rewards(rewards, logprobs, REFERENCE, coef=2.0, cu_seqlens=torch.tensor([0, 5]))
    assert penalized.tolist() == [-2.0 * 0.75]
    assert not penalized.requires_grad
    assert torch.equal(rewards, torch.zeros(1, dtype=torch.float64))
    far = kl_penalized_rewards(rewards, torch.tensor([-1.0]), torch.tensor([-500.0]), coef=1.0, cu_seqlens=torch.tensor([0, 1]))
    assert far.tolist() == [-20.0]  # the bound of the loss


def test_kl_in_the_reward_of_no_completions() -> None:
    none = torch.zeros(0)
    assert kl_penalized_rewards(none, none, none, coef=1.0, cu_seqlens=torch.tensor([0])).shape == (0,)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("rewards has shape .*one reward per completion, \\(2,\\)", {"rewards": torch.zeros(3)}),
        (r"rewards\[1\] is nan", {"rewards": torch.tensor([0.0, math.nan])}),
        ("coef is -1", {"coef": -1.0}),
        ("coef is inf", {"coef": math.inf}),
        ("kl is 'k4'; it must be one of 'k1', 'k2', 'k3'", {"kl": "k4"}),
        ("logprobs has shape .*must be .rows. or", {"logprobs": torch.zeros(1, 1, 5)}),
        ("cu_seqlens is None", {"cu_seqlens": None}),
        ("cu_seqlens is .* it must rise from 0 to the 5 rows", {"cu_seqlens": torch.tensor([0, 2, 4])}),
        ("mask has shape", {"mask": torch.ones(4, dtype=torch.bool)}),
        ("ref_logprobs has shape", {"ref_logprobs": torch.zeros(4)}),
        ("ref_logprobs has dtype torch.int64", {"ref_logprobs": torch.zeros(5, dtype=torch.int64)}),
        ("^logprobs is not finite at a token that counts", {"logprobs": torch.full((5,), -math.inf)}),
        ("^ref_logprobs is not finite at a token that counts", {"ref_logprobs": torch.full((5,), math.nan)}),
    ],
)
def test_bad_arguments_of_the_kl_penalty_are_named(message: str, changed: dict) -> None:
    arguments = {"rewards": torch.zeros(2), "logprobs": torch.zeros(5), "ref_logprobs": torch.zeros(5), "coef": 0.1}
    arguments["cu_seqlens"] = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=message):
        kl_penalized_rewards(**(arguments | changed))


@pytest.mark.parametrize("name", ["rewards", "logprobs", "ref_logprobs"])
def test_the_kl_penalty_wants_tensors(name: str) -> None:
    arguments = {"rewards": torch.zeros(1), "logprobs": torch.zeros(1), "ref_logprobs": torch.zeros(1), name: [0.0]}
    with pytest.raises(TypeError, match=f"^{name} is a list"):
        kl_penalized_rewards(**arguments, coef=0.1, cu_seqlens=torch.tensor([0, 1]))
