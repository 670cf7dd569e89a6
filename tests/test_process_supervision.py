from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
import torch

from grpo_kernels.advantages import group_advantages
from grpo_kernels.process_supervision import process_advantages

REWARDS = [[1.0, 0.0, 1.0], [0.0], [], [2.0, None, 5.0], [4.0, 4.0]]
ENDS = [[1, 2, 5], [2], [], [0, 1, 2], [0, 3]]
LENGTHS = [7, 3, 2, 3, 4]
SIZES = [3, 2]


def plain(rewards: list[list[float | None]], sizes: list[int], scale: str, eps: float) -> list[float]:
    """The definition in plain Python, token after token."""
    advantages, first = [], 0
    for size in sizes:
        group = range(first, first + size)
        there = [r for i in group for r in rewards[i] if r is not None]
        divisor = stdev(there) + eps if scale == "group" else 1.0
        for i in group:
            for t in range(LENGTHS[i]):
                ahead = [r for r, end in zip(rewards[i], ENDS[i], strict=True) if r is not None and end >= t]
                advantages.append(sum((r - mean(there)) / divisor for r in ahead))
        first += size
    return advantages


def test_textbook_values() -> None:
    advantages = process_advantages([[1, 0], [0, 0, 1]], [[0, 2], [0, 1, 2]], [3, 4], 2, scale="none")
    # Mean 0.4: steps +.6 -.4, and -.4 -.4 +.6; from the last step backwards they add up; the token after the last step has 0.
    assert advantages.tolist() == pytest.approx([0.2, -0.4, -0.4, -0.2, 0.2, 0.6, 0.0], rel=1e-6)
    scaled = process_advantages([[1, 0], [0, 0, 1]], [[0, 2], [0, 1, 2]], [3, 4], 2)
    std = ((2 * 0.36 + 3 * 0.16) / 4) ** 0.5
    assert scaled.tolist() == pytest.approx([a / (std + 1e-6) for a in advantages.tolist()], rel=1e-5)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_ragged_steps_by_their_definition(scale: str) -> None:
    advantages = process_advantages(REWARDS, ENDS, LENGTHS, sizes=SIZES, scale=scale, eps=0.01)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(plain(REWARDS, SIZES, scale, 0.01), rel=1e-6, abs=1e-7)
    assert torch.equal(advantages[[6, 10, 11]], torch.zeros(3))  # after the last step, and the completion without steps


def test_a_missing_step_reward_is_as_if_there_were_no_such_step() -> None:
    without_rewards, without_ends = [*REWARDS[:3], [2.0, 5.0], REWARDS[4]], [*ENDS[:3], [0, 2], ENDS[4]]
    expected = process_advantages(without_rewards, without_ends, LENGTHS, sizes=SIZES)
    assert torch.equal(process_advantages(REWARDS, ENDS, LENGTHS, sizes=SIZES), expected)
    assert not torch.equal(process_advantages([*REWARDS[:3], [2.0, 0.0, 5.0], REWARDS[4]], ENDS, LENGTHS, sizes=SIZES), expected)


def test_one_step_that_ends_with_the_completion_is_outcome_supervision() -> None:
    rewards, lengths = [1.0, 0.0, 0.5, 2.0], [3, 1, 4, 2]
    advantages = process_advantages([[r] for r in rewards], [[length - 1] for length in lengths], lengths, 4)
    assert torch.equal(advantages, group_advantages(rewards, 4).repeat_interleave(torch.tensor(lengths)))
    assert advantages.abs().max() > 1


def test_tensors_and_group_ids_equal_lists_and_sizes() -> None:
    complete = [[0.0 if r is None else r for r in rewards] for rewards in REWARDS]
    expected = process_advantages(complete, ENDS, LENGTHS, sizes=SIZES)
    tensors = [torch.tensor(rewards, dtype=torch.float16) for rewards in complete]
    ends = [torch.tensor(own, dtype=torch.int64) for own in ENDS]
    assert torch.equal(process_advantages(tensors, ends, torch.tensor(LENGTHS), torch.tensor([9, 9, 9, -1, -1])), expected)
    mixed = [complete[0], *tensors[1:]]
    assert torch.equal(process_advantages(mixed, ENDS, LENGTHS, sizes=SIZES), expected)


def test_permuted_completions_have_permuted_advantages() -> None:
    ids, order = torch.tensor([0, 0, 0, 1, 1]), [3, 0, 4, 2, 1]
    pieces = process_advantages(REWARDS, ENDS, LENGTHS, ids).split(LENGTHS)
    permuted = process_advantages([REWARDS[i] for i in order], [ENDS[i] for i in order], [LENGTHS[i] for i in order], ids[order])
    assert torch.allclose(permuted, torch.cat([pieces[i] for i in order]), atol=1e-6)


def test_a_constant_added_to_a_group_changes_nothing() -> None:
    shifted = [[None if r is None else r + (7.0 if i < 3 else -3.0) for r in rewards] for i, rewards in enumerate(REWARDS)]
    advantages = process_advantages(REWARDS, ENDS, LENGTHS, sizes=SIZES)
    assert torch.allclose(process_advantages(shifted, ENDS, LENGTHS, sizes=SIZES), advantages, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("flat", [[[0.3, 0.1 + 0.2], [0.3]], [[None, None], [None]], [[5.0, None], [None]]])
def test_a_flat_group_gives_exactly_zero(flat: list, scale: str) -> None:
    advantages = process_advantages([*flat, [1.0, 0.0]], [[0, 1], [1], [0, 1]], [2, 2, 2], sizes=[2, 1], scale=scale, eps=0.0)
    assert torch.equal(advantages[:4], torch.zeros(4))
    assert advantages[5] < -0.4


def test_nothing_to_supervise() -> None:
    assert process_advantages([], [], [], sizes=[]).shape == (0,)
    assert torch.equal(process_advantages([[], []], [[], []], [2, 0], 2), torch.zeros(2))


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, "scale is 'batch'; it must be one of 'group', 'none'", {"scale": "batch"}),
        (ValueError, "eps is -1", {"eps": -1.0}),
        (TypeError, r"lengths is \[3.0, 2\]", {"lengths": [3.0, 2]}),
        (ValueError, r"lengths\[1\] is -1", {"lengths": [3, -1], "step_ends": [[0, 2], []], "step_rewards": [[1.0, 0.0], []]}),
        (ValueError, "step_rewards has 1 entries; .*, 2", {"step_rewards": [[1.0, 0.0]]}),
        (ValueError, "step_ends has 3 entries; .*, 2", {"step_ends": [[0, 2], [1], [1]]}),
        (ValueError, "groups is 3", {"groups": 3}),
        (ValueError, "exactly one of groups", {"sizes": [2]}),
        (TypeError, r"step_rewards\[0\] is a float", {"step_rewards": [1.0, 0.0]}),
        (ValueError, r"step_rewards\[1\]\[0\] is nan", {"step_rewards": [[1.0, 0.0], [math.nan]]}),
        (ValueError, r"step_rewards\[1\] has shape \(2,\); .*\(1,\)", {"step_rewards": [[1.0, 0.0], [1.0, 2.0]]}),
        (ValueError, r"step_rewards\[1\] has shape \(1, 1\)", {"step_rewards": [[1.0, 0.0], torch.zeros(1, 1)]}),
        (TypeError, r"step_ends\[1\] is \[1.0\]", {"step_ends": [[0, 2], [1.0]]}),
        (ValueError, r"step_ends\[0\] is \[2, 2\]; it must rise strictly", {"step_ends": [[2, 2], [1]]}),
        (ValueError, r"step_ends\[0\] is \[-1, 2\]", {"step_ends": [[-1, 2], [1]]}),
        (ValueError, r"step_ends\[1\] is \[2\]; .* below the completion's length, 2", {"step_ends": [[0, 2], [2]]}),
    ],
)
def test_bad_arguments_are_named(error: type[Exception], message: str, changed: dict) -> None:
    arguments = {"step_rewards": [[1.0, 0.0], [0.5]], "step_ends": [[0, 2], [1]], "lengths": [3, 2], "groups": 2}
    with pytest.raises(error, match=message):
        process_advantages(**(arguments | changed))
