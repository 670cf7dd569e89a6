"""Direct preference optimisation (arXiv 2305.18290) from hidden states, without ever holding [tokens, vocabulary] logits.

    python examples/dpo.py [--model smollm2-135m | <folder> | <hub name>] [--steps N]

The loss needs grpo_kernels only; the script borrows the rest from grpo_trainer (`make test` sets up an environment).

Teaches a chat model to prefer a friendly answer, by questions about capitals; before and after, it is asked about a country not trained on.
The two answers of a pair share one pass over their prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_kernels import linear_logprobs
from grpo_trainer.errors import UserError
from grpo_trainer.policy import ModelSource, Policy, find_model, pick_device
from grpo_trainer.shared_prompt import completion_hidden

QUESTION = "What is the capital of {}?"
# They part at their ends only: up to there their gradients cancel, so that what the model knows of capitals is left alone.
CHOSEN = "The capital of {country} is {capital}, my friend."
REJECTED = "The capital of {country} is {capital}."
CAPITALS = {"France": "Paris", "Italy": "Rome", "Egypt": "Cairo", "Peru": "Lima"}
CAPITALS |= {"Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana", "Kenya": "Nairobi"}
HELD_OUT = "Japan"
MICRO_BATCH = 4  # pairs


def sequence_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, lengths: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """log p(completion | prompt), [sequences], in nats: the sum over each one's tokens.

    Args:
        hidden: [rows, H], last hidden states, one sequence after the other; row t predicts targets[t].
        weight: [V, H], the head; it may be tied to the embedding.
        targets: [rows] integer token ids; anything where the mask is 0.
        lengths: rows of each sequence, [sequences].
        mask: [rows] bool or integer; 0 at rows that do not count. None: all count.
    """
    logprobs = linear_logprobs(hidden, weight, targets, mask=mask).logprobs  # [rows], 0 where masked
    return torch.stack([sequence.sum() for sequence in logprobs.split(list(lengths))])


def dpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lengths: Sequence[int],
    ref_logprobs: Tensor,
    pairs: int,
    *,
    mask: Tensor | None = None,
    beta: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """(loss, rewards): equation 7 as a scalar, and beta (log p - log p_ref) as [pairs here, 2], without gradient; column 0: chosen.

        loss = -1/pairs sum log sigmoid(beta ((log p_c - ref_c) - (log p_r - ref_r)))

    Args:
        hidden, weight, targets, lengths, mask: as `sequence_logprobs`; the sequences are chosen, rejected, chosen, rejected, ...
        ref_logprobs: [sequences], what `sequence_logprobs` gave with the reference model under torch.no_grad().
        pairs: of the whole optimiser step, over all its micro-batches: their losses and gradients then add up.
    """
    rewards = beta * (sequence_logprobs(hidden, weight, targets, lengths, mask) - ref_logprobs).view(-1, 2)
    chosen, rejected = rewards.unbind(1)
    return -logsigmoid(chosen - rejected).sum() / pairs, rewards.detach()


class Pair(NamedTuple):
    """Token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def encode(source: ModelSource, country: str, capital: str) -> Pair:
    """Both completions end as the model is to end its turn."""
    prompt = source.encode([{"role": "user", "content": QUESTION.format(country)}])
    texts = (text.format(country=country, capital=capital) for text in (CHOSEN, REJECTED))
    return Pair(prompt, *([*source.tokenizer.encode(text, add_special_tokens=False), source.tokenizer.eos_token_id] for text in texts))


def rows(policy: Policy, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, list[int]]:
    """(hidden [rows, H], targets [rows], lengths [2 pairs]) of the completions; every prompt is read once, for both of its completions."""
    hidden = completion_hidden(policy, [pair.prompt for pair in pairs], [[pair.chosen, pair.rejected] for pair in pairs])
    completions = [completion for pair in pairs for completion in (pair.chosen, pair.rejected)]
    targets = torch.tensor([token for completion in completions for token in completion], device=policy.device)
    return hidden, targets, [len(completion) for completion in completions]


def train(policy: Policy, pairs: Sequence[Pair], steps: int, learning_rate: float) -> None:
    batches = [pairs[begin : begin + MICRO_BATCH] for begin in range(0, len(pairs), MICRO_BATCH)]
    with torch.no_grad():  # the reference is the policy before its first step: one forward pass, and no second model
        references = []
        for batch in batches:
            hidden, targets, lengths = rows(policy, batch)
            references.append(sequence_logprobs(hidden, policy.head_weight, targets, lengths))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=learning_rate, weight_decay=0.0)
    for step in range(1, steps + 1):
        total, margins = 0.0, []
        for batch, reference in zip(batches, references, strict=True):
            hidden, targets, lengths = rows(policy, batch)
            loss, rewards = dpo_loss(hidden, policy.head_weight, targets, lengths, reference, len(pairs))
            loss.backward()
            total += loss.item()
            margins.append(rewards[:, 0] - rewards[:, 1])
        optimizer.step()
        optimizer.zero_grad()
        margin = torch.cat(margins)
        print(f"step {step}  loss {total:.4f}  margin {margin.mean():.3f}  accuracy {(margin > 0).float().mean():.2f}", flush=True)


@torch.no_grad()
def sample(policy: Policy, prompt: list[int]) -> str:
    """The most likely completion."""
    ids = torch.tensor([prompt], device=policy.device)
    output = policy.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    return policy.source.decode(output[0, len(prompt) :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Direct preference optimisation on a handful of pairs.")
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m, a local folder or a hub name")
    parser.add_argument("--steps", type=int, default=8, choices=range(1, 1001), metavar="1..1000")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    options = parser.parse_args()
    try:
        policy = Policy.load(find_model(options.model), pick_device("auto"), "float32")
    except UserError as error:
        parser.error(str(error))

    pairs = [encode(policy.source, country, capital) for country, capital in CAPITALS.items()]
    prompt = encode(policy.source, HELD_OUT, "").prompt
    before = sample(policy, prompt)
    train(policy, pairs, options.steps, options.learning_rate)
    print(f"\n{QUESTION.format(HELD_OUT)}\nbefore: {before}\nafter:  {sample(policy, prompt)}")


if __name__ == "__main__":
    main()
