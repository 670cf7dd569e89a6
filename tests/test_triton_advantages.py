"""Group advantages in Triton against `group_advantages` in PyTorch on the CPU: the same float64 numbers, up to the order of the sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import group_advantages
from problems import DEVICE

pytest.importorskip("triton")

from grpo_kernels.triton_kernels.advantages import LARGEST_GROUP, group_advantages_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of NumPy, in Triton's interpreter

# 1 unit in the last place: the float64 results differ by their order of summation, and may fall to either side of a rounding boundary.
ULP = {"rtol": 1.2e-7, "atol": 0.0}


def noise(dtype: torch.dtype) -> float:
    """As documented by `group_advantages`: a few units in the last place, of integers those of float64, and at most 1e-6."""
    return min(8 * torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps, 1e-6)


def both(rewards: Tensor, size: int, *, scale: str = "group", leave_one_out: bool = False, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    got = group_advantages_of(rewards.to(DEVICE), size, scale=scale, leave_one_out=leave_one_out, eps=eps, noise=noise(rewards.dtype))
    assert got.dtype == torch.float32
    assert got.shape == rewards.shape
    baseline = "leave_one_out" if leave_one_out else "mean"
    return got.cpu(), group_advantages(rewards.cpu(), size, scale=scale, baseline=baseline, eps=eps)


def random_rewards(size: int, dtype: torch.dtype = torch.float32, groups: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (3.0 * torch.randn(groups * size, generator=generator, dtype=torch.float64).abs()).to(dtype)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 64, 300])
def test_every_size(size: int, scale: str, leave_one_out: bool) -> None:
    got, want = both(random_rewards(size), size, scale=scale, leave_one_out=leave_one_out)
    torch.testing.assert_close(got, want, **ULP)
    assert got.any() == (size > 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_every_dtype(dtype: torch.dtype) -> None:
    rewards = random_rewards(7, dtype)
    if dtype == torch.bool:
        rewards[0], rewards[1] = True, False
    got, want = both(rewards, 7)
    torch.testing.assert_close(got, want, **ULP)
    assert got.any()


def test_the_arithmetic_is_float64() -> None:
    """Rewards that differ in their last digits only, and large integers that float32 does not tell apart."""
    close = 1e6 + torch.arange(8, dtype=torch.float64) * 1e-3
    torch.testing.assert_close(*both(close, 8, scale="none"), **ULP)
    assert both(close, 8, scale="none")[0][0].item() == pytest.approx(-3.5e-3, rel=1e-6)
    large = 2**40 + torch.arange(8)
    torch.testing.assert_close(*both(large, 8), **ULP)
    assert both(large, 8)[0].unique().numel() == 8


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("factor", [1e-200, 1e-30, 1e-7, 1e30, 1e150, 1e200])
def test_huge_and_tiny_rewards(factor: float, eps: float) -> None:
    """1e-200 and 1e200 leave float64 when squared; the std is then 0 or inf, and every advantage 0."""
    got, want = both(random_rewards(8, torch.float64) * factor, 8, eps=eps)
    torch.testing.assert_close(got, want, **ULP)
    assert got.isfinite().all()


def test_flat_groups_are_exactly_zero() -> None:
    thirds = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert thirds[0] != thirds[1]
    same = (torch.full((4,), 0.1), torch.full((3,), -1e30), torch.zeros(4), torch.full((4,), 2**53 + 2))
    for scale in ("group", "none"):
        for rewards in (thirds, thirds[:3], -thirds[:3], *same):
            got, want = both(rewards, len(rewards), scale=scale, eps=0.0)
            assert got.tolist() == want.tolist() == [0.0] * len(rewards)


def test_the_bound_of_flat_is_inclusive() -> None:
    got, want = both(torch.tensor([1.0, 1.0 - 2**-20]), 2)
    assert got.tolist() == want.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bound", [noise(torch.float32), noise(torch.bfloat16)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_bound_of_flat_is_exact(bound: float, sign: float) -> None:
    """It reaches the kernel as float64: 1e-6, that of bfloat16, is 3e-9 smaller in float32."""
    rewards = sign * torch.tensor([1.0, 1.0 - bound * (1.0 - 1e-9), 1.0, 1.0 - bound * (1.0 + 1e-9)], dtype=torch.float64).to(DEVICE)
    got = group_advantages_of(rewards, 2, scale="none", leave_one_out=False, eps=0.0, noise=bound)
    assert got.view(2, 2).any(1).tolist() == [False, True]


def test_eps_is_added_to_the_std_and_never_makes_a_group_nan() -> None:
    rewards = torch.tensor([0.0, 1e-200, 1.0, 3.0], dtype=torch.float64)
    got, _ = both(rewards, 2, eps=0.0)
    assert got.tolist() == pytest.approx([0.0, 0.0, -(0.5**0.5), 0.5**0.5])
    got, _ = both(rewards, 2, eps=1.0)
    assert got.tolist()[2:] == pytest.approx([-1 / (1 + 2**0.5), 1 / (1 + 2**0.5)])


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0])
    got, _ = both(rewards, 3, scale="none", leave_one_out=True)
    assert got.tolist() == [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5]


def test_any_stride_and_no_rewards() -> None:
    rewards = random_rewards(5)
    strided = torch.stack([rewards, torch.zeros_like(rewards)], 1)[:, 0]
    assert not strided.is_contiguous()
    torch.testing.assert_close(both(strided, 5)[0], both(rewards, 5)[0], rtol=0, atol=0)
    assert both(torch.empty(0), 5)[0].shape == (0,)


def test_the_largest_group() -> None:
    torch.testing.assert_close(*both(random_rewards(LARGEST_GROUP, groups=2), LARGEST_GROUP), **ULP)
