from __future__ import annotations

import pytest
import torch

from grpo_kernels import group_advantages


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
    with pytest.raises(TypeError, match="rewards is a list"):
        group_advantages([1.0, 2.0], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="groups is a list"):
        group_advantages(torch.rand(2), [2])  # type: ignore[arg-type]


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
        ("rewards has shape", {"rewards": torch.zeros(2, 2), "groups": 2}),
        (r"rewards\[1\] is nan", {"rewards": torch.tensor([0.0, float("nan")]), "groups": 2}),
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
