"""Group advantages: how much better a completion did than the others of its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard, get_args

import torch
from torch import Tensor

from grpo_kernels.backends.triton import kernels, unavailable
from grpo_kernels.checks import check_choice, check_number
from grpo_kernels.objective import KLEstimator, kl_estimate
from grpo_kernels.packing import RowLayout

AdvantageScale = Literal["group", "batch", "none"]
AdvantageBaseline = Literal["mean", "leave_one_out"]
RewardCombination = Literal["sum_then_normalize", "normalize_then_sum"]
Rewards = Tensor | Sequence[float | None]


def group_advantages(
    rewards: Rewards | Sequence[Sequence[float | None]],
    groups: Tensor | int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    scale: AdvantageScale = "group",
    baseline: AdvantageBaseline = "mean",
    weights: Tensor | Sequence[float] | None = None,
    combine: RewardCombination = "sum_then_normalize",
    eps: float = 1e-6,
) -> Tensor:
    """`A_i = (r_i - mean of the group) / (std + eps)`, arXiv 2402.03300 section 4.1.2.

    Args:
        rewards: [completions], or [completions, K] for K rewards per completion: a tensor of any real dtype, or a list. In a list (its
            numbers are float64), None is a missing reward. A completion without any reward has advantage 0 and is left out of all
            means, stds and counts.
        groups: the group of each completion as an integer tensor [completions] (any ids, any order), or one size for consecutive groups.
        sizes: instead of `groups`, the sizes of consecutive groups; they add up to the number of completions.
        scale: divide by the std of the group, of the whole batch, or by nothing (Dr. GRPO, arXiv 2503.20783). The std is the
            unbiased one (n - 1), as in the reference implementations.
        baseline: "mean", or "leave_one_out", the mean of the *other* completions of the group (RLOO, arXiv 2402.14740, which has scale
            "none"). The std stays that of all completions: of the others alone it would be 0 for the one success of a group.
        weights: [K], what each reward counts; by default 1. A completion's missing rewards are left out of its sum.
        combine: "sum_then_normalize" treats the weighted sum as one reward. "normalize_then_sum" (GDPO, arXiv 2601.05242) gives each
            reward its own mean and std of the group, and divides the weighted sums by their std over the batch; it needs scale "group"
            and baseline "mean".
        eps: added to each std.

    Returns:
        [completions] float32 on the rewards' device (a list: CPU). A group of one, or with equal rewards (up to the rounding of their
        dtype), has advantage exactly 0; with "normalize_then_sum" that holds for each reward apart too.

    Raises:
        ValueError, TypeError: on a wrong type, shape or size, an unknown choice, choices that exclude each other, or a reward that is
            not finite (NaN is an error, never a missing reward); names the argument.
    """
    check_choice("scale", scale, get_args(AdvantageScale))
    check_choice("baseline", baseline, get_args(AdvantageBaseline))
    check_choice("combine", combine, get_args(RewardCombination))
    check_number("eps", eps, 0.0, math.inf)
    if combine == "normalize_then_sum" and (scale, baseline) != ("group", "mean"):
        raise ValueError(f"combine 'normalize_then_sum' needs scale 'group' and baseline 'mean'; they are {scale!r} and {baseline!r}")
    scores = Scores.read("rewards", rewards)
    shape = tuple(scores.values.shape)
    if len(shape) not in (1, 2) or shape[1:] == (0,):
        raise ValueError(f"rewards has shape {shape}; it must be [completions], or [completions, K] with K at least 1")
    ids, count = group_ids(shape[0], scores.values.device, groups, sizes)
    plain = len(shape) == 1 and weights is None and combine == "sum_then_normalize"
    if plain and isinstance(rewards, Tensor) and isinstance(groups, Integral):
        at_once = _in_one_launch(rewards.detach(), int(groups), scale, baseline, eps)
        if at_once is not None:
            return at_once
    factors = _reward_weights(weights, 1 if len(shape) == 1 else shape[1], scores.values.device)
    if combine == "normalize_then_sum":
        scores = scores.normalized(ids, count, eps)
        # In each group, a normalised reward adds up to 0, so that the groups' means and the batch's are 0 alike: the rest is scale "batch".
        scale = "batch"
    scores = scores.weighted_sum(factors)
    centred = scores.centred(ids, count)
    advantages = centred.values
    if baseline == "leave_one_out":
        advantages = advantages * (centred.size / (centred.size - 1).clamp(min=1))[ids]
    if scale == "group":
        advantages = divide(advantages, centred.std[ids], eps)
    elif scale == "batch":
        advantages = divide(advantages, scores.centred(torch.zeros_like(ids), 1).std, eps)
    return advantages.float()


def _in_one_launch(rewards: Tensor, size: int, scale: AdvantageScale, baseline: AdvantageBaseline, eps: float) -> Tensor | None:
    """Groups of one size, one after another on a GPU: a kernel instead of some twenty launches. None where it cannot."""
    if rewards.device.type != "cuda" or scale == "batch" or unavailable(rewards.device) is not None:
        return None
    if size > kernels().LARGEST_GROUP:
        return None
    noise = _rounding(rewards.dtype)
    advantages: Tensor = kernels().group_advantages_of(
        rewards, size, scale=scale, leave_one_out=baseline == "leave_one_out", eps=eps, noise=noise
    )
    return advantages


def kl_penalized_rewards(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    coef: float,
    kl: KLEstimator = "k1",
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`rewards[i] - coef * KL summed over the tokens of completion i`: the KL penalty in the reward (arXiv 2203.02155 eq. 2), not the loss.

    Args:
        rewards: [completions], any real dtype.
        logprobs: [rows] with `cu_seqlens`, or padded [completions, length]: log-probabilities (natural log, floating point) under the
            policy that sampled. Taken as constants: no gradient flows.
        ref_logprobs: of the same shape, under the reference.
        coef: reward per nat, at least 0.
        kl: the estimate per token; "k1", `logprobs - ref_logprobs`, is the paper's. Differences are bounded as in the loss.
        cu_seqlens: [completions + 1] integer, the first row of each completion, and the end.
        mask: of the shape of `logprobs`, bool or integer; 0 leaves a token out, whatever is there (NaN too).

    Returns:
        [completions] float32 on the rewards' device. A completion without tokens keeps its reward.

    Raises:
        ValueError, TypeError: on a wrong type, shape or setting, or a reward, or a log-probability that counts, that is not finite; names
            the argument.
    """
    for name, tensor in (("rewards", rewards), ("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
    check_choice("kl", kl, get_args(KLEstimator))
    check_number("coef", coef, 0.0, math.inf)
    if logprobs.dim() not in (1, 2):
        raise ValueError(f"logprobs has shape {tuple(logprobs.shape)}; it must be [rows] or [completions, length]")
    if logprobs.dim() == 1 and cu_seqlens is None:
        raise ValueError("cu_seqlens is None; log-probabilities of shape [rows] need it, the bounds of the completions")
    layout = RowLayout.of(logprobs.shape, logprobs.device, mask, cu_seqlens)
    if rewards.shape != (layout.sequences,):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must hold one reward per completion, ({layout.sequences},)")
    before = Scores.read("rewards", rewards).values
    counted = {}
    for name, values in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        # where, not a product: what is masked may be NaN. With 0 in both, its estimate is 0.
        counted[name] = torch.where(layout.mask, layout.per_row(name, values), 0.0).double()
        if not torch.isfinite(counted[name]).all():
            raise ValueError(f"{name} is not finite at a token that counts; mask it out, or look for its cause")
    estimate = kl_estimate(kl, counted["logprobs"], counted["ref_logprobs"])
    penalty = torch.zeros(before.shape, dtype=before.dtype, device=logprobs.device).index_add_(0, layout.sequence_of_row, estimate)
    return (before - coef * penalty.to(before.device)).float()


@dataclass(frozen=True)
class Centred:
    """`values` [n]: minus the group's mean, exactly 0 where missing or the group is flat; `std` (n - 1) and `size` [groups]. All float64.

    Of scores [n, K]: K columns each.
    """

    values: Tensor
    std: Tensor
    size: Tensor


@dataclass(frozen=True)
class Scores:
    """What is compared within groups, each [n] or, for K rewards apart, [n, K].

    `values` float64, 0 where missing; `present` bool; `noise` float64: what of a value may be rounding (0.1 + 0.2 against 0.3) and no
    signal. Divided by its own std it would become advantages of +-1.
    """

    values: Tensor
    present: Tensor
    noise: Tensor

    @classmethod
    def read(cls, name: str, rewards: Rewards | Sequence[Sequence[float | None]]) -> Scores:
        """From a tensor, or a list in which None is missing; errors name `name`. The shape is the caller's to check."""
        if not isinstance(rewards, Tensor):
            values, present = _read_list(name, rewards)
            dtype = values.dtype
        elif rewards.dtype.is_complex:
            raise TypeError(f"{name} has dtype {rewards.dtype}; it must be real")
        else:
            # float64: a mean of rewards such as 0.1 then leaves no residue that the flat-group test would have to forgive.
            values, present = rewards.detach().double(), torch.ones(rewards.shape, dtype=torch.bool, device=rewards.device)
            dtype = rewards.dtype
        bad = (~torch.isfinite(values)).nonzero().tolist()
        if bad:
            given = float(values[tuple(bad[0])])
            raise ValueError(f"{name}{bad[0]} is {given}; every reward must be finite (a missing reward is written as None, in a list)")
        return cls(values, present, _rounding(dtype) * values.abs())

    def centred(self, ids: Tensor, groups: int) -> Centred:
        """Against the group means. A group is flat if its largest and smallest value are equal up to rounding."""
        index = ids.view(-1, *[1] * (self.values.dim() - 1)).expand_as(self.values)
        zeros = self.values.new_zeros(groups, *self.values.shape[1:])

        def reduced(values: Tensor, how: str, start: float) -> Tensor:
            return (zeros + start).scatter_reduce_(0, index, torch.where(self.present, values, start), how)

        size = zeros.index_add(0, ids, self.present.double())
        mean = zeros.index_add(0, ids, self.values) / size.clamp(min=1)
        spread = reduced(self.values, "amax", -torch.inf) - reduced(self.values, "amin", torch.inf)
        flat = spread <= reduced(self.noise, "amax", 0.0)
        values = torch.where(self.present & ~flat[ids], self.values - mean[ids], 0.0)
        variance = zeros.index_add(0, ids, values.square()) / (size - 1).clamp(min=1)
        return Centred(values, variance.sqrt(), size)

    def normalized(self, ids: Tensor, groups: int, eps: float) -> Scores:
        """`(value - mean) / (std + eps)` of the group, each column apart."""
        centred = self.centred(ids, groups)
        std = centred.std[ids]
        return Scores(divide(centred.values, std, eps), self.present, divide(self.noise, std, eps))

    def weighted_sum(self, weights: Tensor) -> Scores:
        """[n] from [n] or [n, K], over the rewards that are there; missing only where all are. `weights` [K] float64."""
        values, present, noise = (part.reshape(-1, weights.numel()) for part in (self.values, self.present, self.noise))
        return Scores((values * weights).sum(1), present.any(1), (noise * weights.abs()).sum(1))


def divide(values: Tensor, std: Tensor, eps: float) -> Tensor:
    """`values / (std + eps)`, and 0 where the std is 0, also for eps 0."""
    return torch.where(std > 0, values / (std + eps), 0.0)


def group_ids(total: int, device: torch.device, groups: Tensor | int | None, sizes: Sequence[int] | None) -> tuple[Tensor, int]:
    """The group of each of `total` completions, [total] int64 from 0 on, and how many groups. See `group_advantages`."""
    if (groups is None) == (sizes is None):
        raise ValueError("give exactly one of groups (ids, or one size) and sizes (a list of sizes)")
    if isinstance(groups, Integral):
        groups = int(groups)
        if groups < 1 or total % groups:
            raise ValueError(f"groups is {groups}; a group size must be at least 1 and divide the {total} completions")
        sizes = [groups] * (total // groups)
    if sizes is not None:
        sizes = integers("sizes", sizes)
        if any(size < 1 for size in sizes) or sum(sizes) != total:
            raise ValueError(f"sizes is {sizes}; sizes must be at least 1 and add up to the {total} completions")
        repeats = torch.tensor(sizes, dtype=torch.int64, device=device)
        return torch.repeat_interleave(torch.arange(len(sizes), device=device), repeats), len(sizes)
    if not isinstance(groups, Tensor):
        raise TypeError(f"groups is a {type(groups).__name__}; it must be a tensor of ids, or one size (a list of sizes goes to sizes)")
    if groups.shape != (total,) or groups.dtype.is_floating_point:
        raise ValueError(
            f"groups has shape {tuple(groups.shape)} and dtype {groups.dtype}; it must hold one integer id per completion, ({total},)"
        )
    unique, ids = torch.unique(groups.to(device), return_inverse=True)
    return ids, unique.numel()


def integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """A list, or a one-dimensional tensor or array, of integers as a list of int."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(items, Sequence) or not all(isinstance(item, Integral) for item in items):
        raise TypeError(f"{name} is {values!r}; it must be a one-dimensional sequence of integers")
    return [int(item) for item in items]


def _rounding(dtype: torch.dtype) -> float:
    """Relative spread of rewards that is rounding: a few units in the last place; of integers, those of float64.

    In half precision one unit is as coarse as a real difference, and only equal is equal.
    """
    return min(8 * torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps, 1e-6)


def _read_list(name: str, rewards: object) -> tuple[Tensor, Tensor]:
    """`values` float64, 0 where missing, and `present` bool: [n], or [n, K] from a list of lists."""
    if not _is_list(rewards):
        raise TypeError(f"{name} is a {type(rewards).__name__}; it must be a tensor, or a list of numbers and None")
    nested = any(map(_is_list, rewards))
    rows: Sequence[Any] = rewards if nested else [rewards]
    for i, row in enumerate(rows):
        if not _is_list(row) or len(row) != len(rows[0]):
            raise ValueError(f"{name}[{i}] is {row!r}; as {name} is a list of lists, each must hold as many rewards as {name}[0]")
        for k, item in enumerate(row):
            if item is not None and not isinstance(item, Real):
                raise TypeError(f"{name}{f'[{i}][{k}]' if nested else f'[{k}]'} is {item!r}; it must be a number, or None where missing")
    values = torch.tensor([[0.0 if item is None else float(item) for item in row] for row in rows], dtype=torch.float64, device="cpu")
    present = torch.tensor([[item is not None for item in row] for row in rows], dtype=torch.bool, device="cpu")
    return (values, present) if nested else (values[0], present[0])


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _reward_weights(weights: Tensor | Sequence[float] | None, count: int, device: torch.device) -> Tensor:
    if weights is None:
        return torch.ones(count, dtype=torch.float64, device=device)
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device=device).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"weights is {weights!r}; it must be a tensor or a list of numbers") from None
    if values.shape != (count,) or not torch.isfinite(values).all():
        raise ValueError(f"weights is {values.tolist()}; it must hold one finite weight per reward of a completion, ({count},)")
    return values
