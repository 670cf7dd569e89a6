"""Group advantages: how much better a completion did than the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

AdvantageScale = Literal["group", "batch", "none"]


def _rounding(dtype: torch.dtype) -> float:
    """Relative spread that is rounding (0.1 + 0.2 against 0.3) and no signal: divided by its own std it would become advantages of +-1.

    A few units in the last place; but in half precision one unit is as coarse as a real difference, and only equal is equal.
    """
    return min(8 * torch.finfo(dtype).eps, 1e-6) if dtype.is_floating_point else 0.0


def group_advantages(
    rewards: Tensor,
    groups: Tensor | int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    scale: AdvantageScale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """`A_i = (r_i - mean of the group) / (std + eps)`, arXiv 2402.03300 section 4.1.2.

    Args:
        rewards: [completions], any real dtype.
        groups: the group of each completion as an integer tensor [completions] (any ids, any order), or one size for consecutive groups.
        sizes: instead of `groups`, the sizes of consecutive groups; they add up to the number of completions.
        scale: divide by the std of the group, of the whole batch, or by nothing (Dr. GRPO, arXiv 2503.20783). The std is the
            unbiased one (n - 1), as in the reference implementations.
        eps: added to the std.

    Returns:
        [completions] float32 on the rewards' device. A group of one, or with equal rewards (up to the rounding of their dtype), has
        advantage exactly 0.

    Raises:
        ValueError, TypeError: on a wrong type, shape or size, an unknown scale, or a reward that is not finite; names the argument.
    """
    if not isinstance(rewards, Tensor):
        raise TypeError(f"rewards is a {type(rewards).__name__}; it must be a tensor, [completions]")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; it must be finite and at least 0")
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be one-dimensional, [completions]")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale is {scale!r}; it must be 'group', 'batch' or 'none'")
    if not torch.isfinite(rewards).all():
        bad = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"rewards[{bad}] is {float(rewards[bad])}; every reward must be finite")
    ids, count = _group_ids(rewards, groups, sizes)
    # float64: a mean of rewards such as 0.1 then leaves no residue that the spread test would have to forgive.
    values = rewards.double()
    size = torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, ids, torch.ones_like(values))
    mean = torch.zeros_like(size).index_add_(0, ids, values) / size
    centred = values - mean[ids]
    flat = _is_flat(values, ids, count, _rounding(rewards.dtype))
    centred = torch.where(flat[ids], 0.0, centred)
    if scale == "group":
        variance = torch.zeros_like(size).index_add_(0, ids, centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[ids] + eps)
    elif scale == "batch" and not bool(flat.all()):
        centred = centred / (values.std() + eps)
    return centred.float()


def _group_ids(rewards: Tensor, groups: Tensor | int | None, sizes: Sequence[int] | None) -> tuple[Tensor, int]:
    total, device = rewards.numel(), rewards.device
    if (groups is None) == (sizes is None):
        raise ValueError("give exactly one of groups (ids, or one size) and sizes (a list of sizes)")
    if isinstance(groups, Integral):
        groups = int(groups)
        if groups < 1 or total % groups:
            raise ValueError(f"groups is {groups}; a group size must be at least 1 and divide the {total} rewards")
        sizes = [groups] * (total // groups)
    if sizes is not None:
        if any(size < 1 for size in sizes) or sum(sizes) != total:
            raise ValueError(f"sizes is {list(sizes)}; sizes must be at least 1 and add up to the {total} rewards")
        repeats = torch.tensor(list(sizes), dtype=torch.int64, device=device)
        return torch.repeat_interleave(torch.arange(len(sizes), device=device), repeats), len(sizes)
    if not isinstance(groups, Tensor):
        raise TypeError(f"groups is a {type(groups).__name__}; it must be a tensor of ids, or one size (a list of sizes goes to sizes)")
    if groups.shape != rewards.shape or groups.dtype.is_floating_point:
        raise ValueError(
            f"groups has shape {tuple(groups.shape)} and dtype {groups.dtype}; "
            f"it must hold one integer id per reward, {tuple(rewards.shape)}"
        )
    unique, ids = torch.unique(groups.to(device), return_inverse=True)
    return ids, unique.numel()


def _is_flat(values: Tensor, ids: Tensor, count: int, rounding: float) -> Tensor:
    """[groups] bool: whether the group's largest and smallest reward are equal up to rounding."""
    high = torch.full((count,), -torch.inf, dtype=values.dtype, device=values.device).scatter_reduce_(0, ids, values, "amax")
    low = torch.full_like(high, torch.inf).scatter_reduce_(0, ids, values, "amin")
    return (high - low) <= rounding * torch.maximum(high.abs(), low.abs())
