"""Group advantages of equal consecutive groups, in one launch; in PyTorch they take some twenty."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.triton_kernels.runtime import FUSED, on

# A program holds its whole group in registers, 16 float64 numbers per thread at this size.
LARGEST_GROUP = 4096


# eps and noise are compiled in: as arguments they would be rounded to float32. They change with the settings and the dtype only.
@triton.jit(do_not_specialize=["size"])
def _group_advantages_kernel(
    advantages_ptr, rewards_ptr, size,
    EPS: tl.constexpr, NOISE: tl.constexpr, DIVIDE: tl.constexpr, LEAVE_ONE_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < size
    row = tl.program_id(0).to(tl.int64) * size + at
    # float64 as in group_advantages: a mean of rewards such as 0.1 then leaves no residue.
    rewards = tl.load(rewards_ptr + row, mask=inside, other=0).to(tl.float64)
    count = size.to(tl.float64)
    others = tl.maximum(size - 1, 1).to(tl.float64)
    mean = tl.sum(rewards) / count
    spread = tl.max(tl.where(inside, rewards, float("-inf"))) - tl.min(tl.where(inside, rewards, float("inf")))
    flat = spread <= NOISE * tl.max(tl.abs(rewards))
    centred = tl.where(inside & (flat == 0), rewards - mean, 0.0)
    advantages = centred
    if LEAVE_ONE_OUT:
        advantages = advantages * (count / others)
    if DIVIDE:
        std = tl.sqrt(tl.sum(centred * centred) / others)
        # Also for EPS 0, where the std is 0: the squares of tiny differences vanish.
        advantages = tl.where(std > 0.0, advantages / (std + EPS), 0.0)
    tl.store(advantages_ptr + row, advantages.to(tl.float32), mask=inside)


def group_advantages_of(
    rewards: Tensor, size: int, *, scale: Literal["group", "none"], leave_one_out: bool, eps: float, noise: float
) -> Tensor:
    """`group_advantages` [n] float32 of `rewards` [n], any real dtype and all finite, in groups of `size` consecutive ones, in one launch.

    `size` divides n and is at most LARGEST_GROUP. A group is flat, with advantages exactly 0, if its spread is at most `noise` times its
    largest absolute reward.
    """
    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    if rewards.numel():
        block = triton.next_power_of_2(size)
        with on(rewards.device):
            _group_advantages_kernel[(rewards.numel() // size,)](
                advantages, rewards.contiguous(), size, EPS=float(eps), NOISE=float(noise), DIVIDE=scale == "group",
                LEAVE_ONE_OUT=leave_one_out, BLOCK=block, num_warps=min(max(block // 256, 1), 8), **FUSED,
            )  # fmt: skip
    return advantages
