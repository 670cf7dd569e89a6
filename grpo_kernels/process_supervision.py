"""Process supervision: an advantage per token, from rewards for the steps of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from grpo_kernels.advantages import Rewards, Scores, group_ids, integers
from grpo_kernels.checks import check_choice, check_number


def process_advantages(
    step_rewards: Sequence[Rewards],
    step_ends: Sequence[Sequence[int] | Tensor],
    lengths: Sequence[int] | Tensor,
    groups: Tensor | int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    scale: Literal["group", "none"] = "group",
    eps: float = 1e-6,
) -> Tensor:
    """`A_t = sum of (r_j - mean) / (std + eps) over the steps j that end at t or later`, arXiv 2402.03300 section 4.1.3.

    Mean and std (unbiased, n - 1) are those of all step rewards of all completions of the group.

    Args:
        step_rewards: for each completion the rewards of its steps, as in `group_advantages`: a list of numbers, None where missing, or a
            tensor [steps]. A missing one is left out: it moves no token and is in no mean or std.
        step_ends: for each completion the last token of each step, strictly rising, counted from 0 at the completion's first token.
        lengths: [completions], the tokens of each completion.
        groups, sizes: which completions are compared, as in `group_advantages`.
        scale: divide by the std of the group, or by nothing.
        eps: added to the std.

    Returns:
        [sum(lengths)] float32, the completions one after the other: the per-row advantages of `linear_grpo_loss`. On the device of the
        first tensor in `step_rewards`, or the CPU. Exactly 0: tokens after the last step's end, completions without steps, and groups
        whose step rewards are equal (up to the rounding of their dtype).

    Raises:
        ValueError, TypeError: on a wrong type, shape or size, an unknown scale, step ends that do not rise or leave the completion, or a
            reward that is not finite; names the argument and the completion.
    """
    check_choice("scale", scale, ("group", "none"))
    check_number("eps", eps, 0.0, math.inf)
    tokens = integers("lengths", lengths)
    for name, values in (("step_rewards", step_rewards), ("step_ends", step_ends)):
        if len(values) != len(tokens):
            raise ValueError(f"{name} has {len(values)} entries; it must have one per completion, as lengths has, {len(tokens)}")
    device = next((rewards.device for rewards in step_rewards if isinstance(rewards, Tensor)), torch.device("cpu"))
    completion_groups, count = group_ids(len(tokens), device, groups, sizes)
    steps = [Scores.read(f"step_rewards[{i}]", rewards) for i, rewards in enumerate(step_rewards)]
    ends = [integers(f"step_ends[{i}]", values) for i, values in enumerate(step_ends)]
    for i, length in enumerate(tokens):
        _check_completion(i, steps[i].values, ends[i], length)
    if not tokens:
        return torch.zeros(0, dtype=torch.float32, device=device)
    every = Scores(*(torch.cat([getattr(step, part).to(device) for step in steps]) for part in ("values", "present", "noise")))
    steps_per_completion = [len(own) for own in ends]
    ids = completion_groups.repeat_interleave(torch.tensor(steps_per_completion, device=device))
    relative = every.normalized(ids, count, eps).values if scale == "group" else every.centred(ids, count).values
    sums, spans = [], []
    for own, own_ends, length in zip(relative.split(steps_per_completion), ends, tokens, strict=True):
        # Tokens between two ends share their sum; those after the last end have a 0 of their own.
        sums += [own.flip(0).cumsum(0).flip(0), own.new_zeros(1)]
        bounds = [-1, *own_ends, length - 1]
        spans += [end - start for start, end in pairwise(bounds)]
    return torch.cat(sums).repeat_interleave(torch.tensor(spans, device=device)).float()


def _check_completion(i: int, rewards: Tensor, ends: list[int], length: int) -> None:
    if length < 0:
        raise ValueError(f"lengths[{i}] is {length}; it must be at least 0")
    if rewards.shape != (len(ends),):
        raise ValueError(f"step_rewards[{i}] has shape {tuple(rewards.shape)}; it must hold one reward per step end, ({len(ends)},)")
    bounds = [-1, *ends, length]
    if ends and any(end >= following for end, following in pairwise(bounds)):
        raise ValueError(
            f"step_ends[{i}] is {ends}; it must rise strictly from at least 0 and stay below the completion's length, {length}"
        )
