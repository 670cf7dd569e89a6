"""Supervised fine-tuning: the loss on completion tokens only, from hidden states, without ever holding [tokens, vocabulary] logits.

    python examples/sft.py [--model smollm2-135m | <folder> | <hub name>] [--steps N]

The loss needs grpo_kernels only; the script borrows the rest from grpo_trainer (`make test` sets up an environment).

Teaches a chat model to answer like a pirate, by questions about capitals; before and after, it is asked about a country not trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_kernels import linear_logprobs
from grpo_trainer.errors import UserError
from grpo_trainer.policy import ModelSource, Policy, find_model, pick_device

QUESTION = "What is the capital of {}?"
ANSWER = "Ahoy! The capital of {country} is {capital}, matey."
CAPITALS = {"France": "Paris", "Italy": "Rome", "Egypt": "Cairo", "Peru": "Lima"}
CAPITALS |= {"Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana", "Kenya": "Nairobi"}
HELD_OUT = "Japan"
MICRO_BATCH = 4


def sft_loss(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Mean negative log-likelihood of the tokens that count, a scalar: -1/tokens sum_t mask_t log p(targets_t).

    Args:
        hidden: [batch, length, H], or packed [rows, H]: last hidden states, where position t predicts targets[t].
        weight: [V, H], the head; it may be tied to the embedding.
        targets: [batch, length] or [rows], integer token ids; anything where the mask is 0.
        mask: of the targets' shape, bool or integer; 0 at prompts and padding, which then cost nothing.
        tokens: how many count in the whole optimiser step, over all its micro-batches: their losses and gradients then add up.
    """
    return -linear_logprobs(hidden, weight, targets, mask=mask).logprobs.sum() / tokens


def encode(source: ModelSource, question: str, answer: str) -> tuple[list[int], list[int]]:
    """(prompt, completion). The completion ends as the model is to end its turn."""
    prompt = source.encode([{"role": "user", "content": question}])
    return prompt, [*source.tokenizer.encode(answer, add_special_tokens=False), source.tokenizer.eos_token_id]


def padded(pairs: Sequence[tuple[list[int], list[int]]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, targets, mask), each [batch, length]: position t reads inputs[t] and predicts targets[t]; mask: a completion token.

    Padded on the right, where a causal model's other positions do not see it.
    """
    length = max(len(prompt) + len(completion) for prompt, completion in pairs) - 1
    inputs = torch.zeros(len(pairs), length, dtype=torch.int64)
    targets = torch.zeros_like(inputs)
    mask = torch.zeros_like(inputs, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(pairs):
        ids = torch.tensor(prompt + completion)
        end = len(ids) - 1
        inputs[row, :end], targets[row, :end] = ids[:-1], ids[1:]
        mask[row, len(prompt) - 1 : end] = True
    return inputs.to(device), targets.to(device), mask.to(device)


def train(policy: Policy, pairs: Sequence[tuple[list[int], list[int]]], steps: int, learning_rate: float) -> None:
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=learning_rate, weight_decay=0.0)
    tokens = sum(len(completion) for _, completion in pairs)
    for step in range(1, steps + 1):
        total = 0.0
        for begin in range(0, len(pairs), MICRO_BATCH):
            inputs, targets, mask = padded(pairs[begin : begin + MICRO_BATCH], policy.device)
            hidden = policy.trunk(input_ids=inputs, use_cache=False).last_hidden_state
            loss = sft_loss(hidden, policy.head_weight, targets, mask, tokens)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {total:.4f}", flush=True)


@torch.no_grad()
def sample(policy: Policy, prompt: list[int]) -> str:
    """The most likely completion."""
    ids = torch.tensor([prompt], device=policy.device)
    output = policy.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    return policy.source.decode(output[0, len(prompt) :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on a handful of chats.")
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m, a local folder or a hub name")
    parser.add_argument("--steps", type=int, default=8, choices=range(1, 1001), metavar="1..1000")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    options = parser.parse_args()
    try:
        policy = Policy.load(find_model(options.model), pick_device("auto"), "float32")
    except UserError as error:
        parser.error(str(error))

    pairs = [
        encode(policy.source, QUESTION.format(country), ANSWER.format(country=country, capital=capital))
        for country, capital in CAPITALS.items()
    ]
    prompt, _ = encode(policy.source, QUESTION.format(HELD_OUT), "")
    before = sample(policy, prompt)
    train(policy, pairs, options.steps, options.learning_rate)
    print(f"\n{QUESTION.format(HELD_OUT)}\nbefore: {before}\nafter:  {sample(policy, prompt)}")


if __name__ == "__main__":
    main()
