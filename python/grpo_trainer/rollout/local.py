"""A small rollout engine on the trainer's own model: prompts read once per group, finished rows dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainer.errors import UserError
from grpo_trainer.policy import Policy
from grpo_trainer.rollout.engine import Completion
from grpo_trainer.shared_prompt import read_prompts


class LocalEngine:
    """Always in step with the policy: it samples from the very weights that are trained."""

    def __init__(self, policy: Policy, rows: int) -> None:
        """`rows`: how many completions are decoded at once."""
        self._policy = policy
        self._rows = rows

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self._policy.device).manual_seed(seed)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, temperature: float, max_new_tokens: int, generator: torch.Generator
    ) -> list[list[Completion]]:
        was_training = self._policy.model.training
        self._policy.model.eval()
        try:
            groups: list[list[Completion]] = []
            at_once = max(1, self._rows // group_size)
            for begin in range(0, len(prompts), at_once):
                groups += self._generate(prompts[begin : begin + at_once], group_size, temperature, max_new_tokens, generator)
            return groups
        finally:
            self._policy.model.train(was_training)

    def _generate(
        self, prompts: Sequence[Sequence[int]], group_size: int, temperature: float, max_new_tokens: int, generator: torch.Generator
    ) -> list[list[Completion]]:
        policy = self._policy
        prefix = read_prompts(policy, prompts)
        owner = torch.arange(len(prompts), device=policy.device).repeat_interleave(group_size)
        cache, mask, position = prefix.cache, prefix.mask[owner], prefix.lengths[owner]
        cache.batch_select_indices(owner)
        hidden = prefix.last_hidden[owner]
        head = policy.head_weight.float().t()  # float32 logits: half-precision ones are off by up to 0.2 nat
        eos = torch.tensor(sorted(policy.eos_ids), device=policy.device)
        drafts: list[tuple[list[int], list[float]]] = [([], []) for _ in range(owner.numel())]
        finished = [False] * owner.numel()
        alive = torch.arange(owner.numel(), device=policy.device)  # the completion that each remaining row belongs to
        for step in range(max_new_tokens):
            tokens, logprobs = _sample(hidden.float() @ head, temperature, generator)
            ended = (tokens[:, None] == eos).any(1)
            rows = zip(alive.tolist(), tokens.tolist(), logprobs.tolist(), ended.tolist(), strict=True)
            for index, token, logprob, end in rows:
                drafts[index][0].append(token)
                drafts[index][1].append(logprob)
                finished[index] = end
            keep = (~ended).nonzero()[:, 0]
            if keep.numel() == 0 or step + 1 == max_new_tokens:
                break
            if keep.numel() < alive.numel():
                cache.batch_select_indices(keep)
                alive, tokens, mask, position = alive[keep], tokens[keep], mask[keep], position[keep]
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
            output = policy.trunk(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            hidden, position = output.last_hidden_state[:, -1], position + 1
        completions = [
            Completion(ids, logprobs, "stop" if end else "length") for (ids, logprobs), end in zip(drafts, finished, strict=True)
        ]
        return [completions[i : i + group_size] for i in range(0, len(completions), group_size)]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens [rows], their log-probabilities [rows]) from float32 logits [rows, V]."""
    logprobs = torch.log_softmax(logits / temperature if temperature else logits, -1)
    if bool(logprobs.amax(-1).isnan().any()):
        raise UserError("the model's logits are not finite, so nothing can be sampled: its weights are damaged, or overflow in this dtype")
    tokens = logprobs.argmax(-1) if temperature == 0 else torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
