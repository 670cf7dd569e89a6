"""The prompt once per group, with nothing but the model's own key-value cache: for sampling and for training alike.

The trunk reads every prompt once; its keys and values are then handed to each of the prompt's completions. In training the gradient flows
back through the cache, so that P + G C tokens are computed in place of G (P + C), with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.policy import Policy


@dataclass
class Prefix:
    """What a batch of prompts leaves behind.

    Attributes:
        cache: keys and values, one batch row per prompt, left-padded to the longest.
        last_hidden: [prompts, H], the last prompt token's hidden state: it predicts the first token of every completion.
        mask: [prompts, P] int64, 0 at padding.
        lengths: [prompts] int64.
    """

    cache: Any
    last_hidden: Tensor
    mask: Tensor
    lengths: Tensor


def read_prompts(policy: Policy, prompts: Sequence[Sequence[int]]) -> Prefix:
    """Padding goes to the left, so that a sliding window, which counts places and not positions, stays exact."""
    from transformers import DynamicCache

    longest = max(len(prompt) for prompt in prompts)
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids = torch.tensor(rows, device=policy.device)
    mask = torch.tensor(masks, device=policy.device)
    cache = DynamicCache(config=policy.model.config)
    output = policy.trunk(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    )
    return Prefix(cache, output.last_hidden_state[:, -1], mask, mask.sum(1))


def completion_hidden(policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """The hidden state that predicts each completion token, [tokens, H], completion after completion, differentiable.

    `completions[i]` are those of `prompts[i]`, any number of any length of at least 1.
    """
    prefix = read_prompts(policy, prompts)
    flat = [list(completion) for group in completions for completion in group]
    owner = torch.tensor([i for i, group in enumerate(completions) for _ in group], device=policy.device)
    lengths = torch.tensor([len(completion) for completion in flat], device=policy.device)
    longest = int(lengths.max())
    hidden = prefix.last_hidden[owner][:, None]
    if longest > 1:
        # The last token of a completion predicts nothing that is scored, so it is never read.
        ids = torch.tensor([c[:-1] + [0] * (longest - len(c)) for c in flat], device=policy.device)
        steps = torch.arange(longest - 1, device=policy.device)
        mask = (steps < (lengths - 1)[:, None]).long()
        prefix.cache.batch_select_indices(owner)
        output = policy.trunk(
            input_ids=ids,
            attention_mask=torch.cat([prefix.mask[owner], mask], 1),
            position_ids=prefix.lengths[owner][:, None] + steps,
            past_key_values=prefix.cache,
            use_cache=True,
        )
        hidden = torch.cat([hidden, output.last_hidden_state], 1)
    scored = torch.arange(longest, device=policy.device) < lengths[:, None]
    return hidden[scored]
