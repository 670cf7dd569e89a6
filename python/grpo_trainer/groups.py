"""A group: one prompt, its completions, their scores and advantages; and how groups are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels import LossCounts
from grpo_trainer.rollout.engine import Completion
from grpo_trainer.tasks import Example, Score


@dataclass
class Group:
    """`advantages` is [completions] float32."""

    example: Example
    prompt_ids: list[int]
    completions: list[Completion]
    scores: list[Score]
    advantages: Tensor

    @property
    def has_signal(self) -> bool:
        return bool((self.advantages != 0).any())


def loss_counts(groups: Sequence[Group]) -> LossCounts:
    """Over all groups of a step, those without signal included: skipping them must not change the others' weight."""
    completions = [completion for group in groups for completion in group.completions]
    return LossCounts(sum(len(c.token_ids) for c in completions), len(completions))


@dataclass
class Piece:
    """Some completions of one group: what a micro-batch is made of."""

    prompt_ids: list[int]
    completion_ids: list[list[int]]
    advantages: Tensor


class MicroBatch:
    """Completions for one forward and backward pass, packed: row t of the loss is the t-th token of all completions in order.

    `old` and `ref` are [rows] log-probabilities, filled when they are known.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.prompts = [piece.prompt_ids for piece in pieces]
        self.completions = [piece.completion_ids for piece in pieces]
        flat = [ids for piece in pieces for ids in piece.completion_ids]
        self.targets = torch.tensor([token for ids in flat for token in ids])
        self.cu_seqlens = torch.tensor([0, *(len(ids) for ids in flat)]).cumsum(0)
        self.advantages = torch.cat([piece.advantages for piece in pieces])
        self.old: Tensor | None = None
        self.ref: Tensor | None = None


def micro_batches(groups: Sequence[Group], most_tokens: int) -> list[MicroBatch]:
    """Groups cut into passes of at most `most_tokens`, padding counted; at least one completion each.

    Groups of like length go together, to pad less. A group that does not fit alone is split over passes, its prompt read in each.
    """
    batches: list[list[Piece]] = [[]]
    order = sorted(range(len(groups)), key=lambda i: max(len(c.token_ids) for c in groups[i].completions))
    for i in order:
        for piece in _split(groups[i], most_tokens):
            if batches[-1] and _tokens([*batches[-1], piece]) > most_tokens:
                batches.append([])
            batches[-1].append(piece)
    return [MicroBatch(batch) for batch in batches if batch]


def _split(group: Group, most_tokens: int) -> list[Piece]:
    longest = max(len(c.token_ids) for c in group.completions)
    fitting = max(1, (most_tokens - len(group.prompt_ids)) // longest)
    return [
        Piece(
            group.prompt_ids,
            [c.token_ids for c in group.completions[begin : begin + fitting]],
            group.advantages[begin : begin + fitting],
        )
        for begin in range(0, len(group.completions), fitting)
    ]


def _tokens(pieces: list[Piece]) -> int:
    """Tokens that the trunk computes: every prompt and every completion padded to the longest."""
    completions = [ids for piece in pieces for ids in piece.completion_ids]
    return len(pieces) * max(len(p.prompt_ids) for p in pieces) + len(completions) * max(len(ids) for ids in completions)
