"""How good the policy is on held-out prompts: accuracy of samples, accuracy of the greedy completion, length."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from grpo_trainer.data import EncodedExample
from grpo_trainer.rollout.engine import Completion
from grpo_trainer.run import Parts


@dataclass(frozen=True)
class Evaluation:
    """Accuracies and truncated are shares in [0, 1], mean_length is in tokens; `samples` are (prompt, completion, correct)."""

    step: int
    prompts: int
    sampled_accuracy: float
    greedy_accuracy: float
    mean_length: float
    truncated: float
    samples: list[tuple[str, str, bool]]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def evaluate(parts: Parts, step: int) -> Evaluation:
    """The samples depend on the seed only, not on the step: before and after are compared on the same random numbers."""
    config, engine, source = parts.config, parts.engine, parts.source
    chosen = parts.data.held_out[: config.evaluation.prompts]
    prompts = [item.ids for item in chosen]
    generator = engine.generator(config.seed)
    longest = config.sampling.max_new_tokens
    sampled = engine.generate(
        prompts, config.evaluation.samples, temperature=config.sampling.temperature, max_new_tokens=longest, generator=generator
    )
    greedy = engine.generate(prompts, 1, temperature=0.0, max_new_tokens=longest, generator=generator)

    def correct(item: EncodedExample, completion: Completion) -> bool:
        return parts.task.score(item.example, item.text, source.decode(completion.token_ids)).correct

    def accuracy(groups: list[list[Completion]]) -> float:
        marks = [correct(item, completion) for item, group in zip(chosen, groups, strict=True) for completion in group]
        return sum(marks) / len(marks)

    flat = [completion for group in sampled for completion in group]
    return Evaluation(
        step=step,
        prompts=len(chosen),
        sampled_accuracy=accuracy(sampled),
        greedy_accuracy=accuracy(greedy),
        mean_length=sum(len(c.token_ids) for c in flat) / len(flat),
        truncated=sum(c.finish_reason == "length" for c in flat) / len(flat),
        samples=[
            (item.question, source.decode(group[0].token_ids), correct(item, group[0]))
            for item, group in zip(chosen[:3], sampled[:3], strict=True)
        ],
    )
