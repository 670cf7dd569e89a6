"""Prompts as token ids, checked before anything is loaded, and the order in which steps take them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from grpo_trainer.config import Config
from grpo_trainer.errors import UserError
from grpo_trainer.policy import ModelSource
from grpo_trainer.tasks import Example, Task


@dataclass(frozen=True)
class EncodedExample:
    """`text` is the prompt as the model reads it, special tokens included; `question` is what a person asked."""

    example: Example
    ids: list[int]
    text: str
    question: str


@dataclass(frozen=True)
class PromptData:
    train: list[EncodedExample]
    held_out: list[EncodedExample]

    def batch(self, step: int, size: int, seed: int) -> list[EncodedExample]:
        """The prompts of a step: passes over shuffled data, one after the other, as a function of (seed, step) and of nothing else."""
        picked: list[EncodedExample] = []
        epoch, place = divmod(step * size, len(self.train))
        while len(picked) < size:
            order = list(range(len(self.train)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            picked += [self.train[i] for i in order[place : place + size - len(picked)]]
            epoch, place = epoch + 1, 0
        return picked


def encode_task(task: Task, source: ModelSource, config: Config) -> PromptData:
    """Raises:
    UserError: a prompt that is empty, or leaves no room for `sampling.max_new_tokens` in the model's context.
    """
    context = source.context_length
    room = config.sampling.max_new_tokens

    def encode(example: Example) -> EncodedExample:
        ids = source.encode(example.prompt)
        question = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
        if not ids:
            raise UserError(f"a prompt of the task {config.task.name!r} is empty: {example.prompt!r}")
        if context is not None and len(ids) + room > context:
            raise UserError(
                f"a prompt of {len(ids)} tokens and sampling.max_new_tokens = {room} do not fit the context of {context} tokens "
                f"of model {source.name!r}: {question[:80]!r}"
            )
        return EncodedExample(example, ids, str(source.tokenizer.decode(ids)), question)

    return PromptData([encode(e) for e in task.train], [encode(e) for e in task.held_out])
