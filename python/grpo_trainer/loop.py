"""The GRPO loop: rollouts, rewards, advantages, loss, step."""

from __future__ import annotations

import time

import torch

from grpo_kernels import group_advantages
from grpo_trainer.checkpoint import save_checkpoint
from grpo_trainer.data import EncodedExample
from grpo_trainer.errors import UserError
from grpo_trainer.evaluation import Evaluation, evaluate
from grpo_trainer.groups import Group
from grpo_trainer.interrupt import StopRequest
from grpo_trainer.monitor.advice import advice
from grpo_trainer.monitor.display import Display
from grpo_trainer.monitor.metrics import step_metrics
from grpo_trainer.run import Run

_ADVICE_PAUSE = 10  # steps before the same sentence is said again


def train(run: Run, display: Display) -> bool:
    """Trains from `run.first_step` to the end. False: stopped on request, with a checkpoint.

    Raises:
        UserError: `max_nonfinite_steps` in a row were not finite. Their updates were left out; the weights are saved.
    """
    config = run.config
    nonfinite = 0
    told: dict[str, int] = {}
    with StopRequest(display.note) as stop:
        if _evaluation_due(run, run.first_step):
            evaluate_now(run, display, run.first_step)
        for step in range(run.first_step, config.steps):
            started = time.perf_counter()
            display.phase("rollout")
            groups = rollout(run, run.data.batch(step, config.prompts_per_step, config.seed), step)
            rolled_out = time.perf_counter()

            display.phase("update")
            torch.manual_seed(_mix(config.seed, step))  # dropout, in models that have it
            updates = run.learner.update(groups, step)
            metrics = step_metrics(step + 1, groups, updates, rolled_out - started, time.perf_counter() - rolled_out)

            run.metrics.write(metrics)
            run.samples.write(_sample(run, groups[0], step + 1))
            display.step(metrics)
            for sentence in advice(metrics, config.sampling.max_new_tokens):
                if step - told.get(sentence, -_ADVICE_PAUSE) >= _ADVICE_PAUSE:
                    told[sentence] = step
                    display.note(f"step {step + 1}: {sentence}")

            nonfinite = nonfinite + 1 if any(not update.finite for update in updates) else 0
            last = step + 1 == config.steps
            if nonfinite == config.max_nonfinite_steps:
                folder = _save(run, step + 1)
                raise UserError(
                    f"stopped: {nonfinite} steps in a row were not finite (max_nonfinite_steps). What was not finite was left out of "
                    f"the weights in {folder}. Lower optimizer.learning_rate, use dtype=float32, or look for a damaged model."
                )
            if last or stop.requested or (config.save_every and (step + 1) % config.save_every == 0):
                display.phase("saving")
                _save(run, step + 1)
            if stop.requested and not last:
                return False
            if _evaluation_due(run, step + 1):
                evaluate_now(run, display, step + 1)
    return True


def _evaluation_due(run: Run, step: int) -> bool:
    """Before, after, and every so often; not again where a run that was resumed has it already."""
    every = run.config.evaluation.every
    due = step in (0, run.config.steps) or bool(every and step % every == 0)
    return due and step not in [row["step"] for row in run.evaluations.read()]


def rollout(run: Run, examples: list[EncodedExample], step: int) -> list[Group]:
    """Completions, scores and advantages of a step's prompts."""
    config = run.config
    completions = run.engine.generate(
        [example.ids for example in examples],
        config.group_size,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        generator=run.engine.generator(_mix(config.seed, step)),
    )
    groups = []
    for example, group in zip(examples, completions, strict=True):
        scores = [run.task.score(example.example, example.text, run.source.decode(c.token_ids)) for c in group]
        groups.append(Group(example.example, example.ids, group, scores, torch.zeros(len(group))))
    rewards = torch.tensor([score.reward for group in groups for score in group.scores], dtype=torch.float64)
    sizes = [len(group.completions) for group in groups]
    advantages = group_advantages(rewards, sizes=sizes, scale=config.objective.scale(), baseline=config.objective.baseline())
    for scored, values in zip(groups, advantages.split(sizes), strict=True):
        scored.advantages = values
    return groups


def evaluate_now(run: Run, display: Display, step: int) -> Evaluation:
    display.phase(f"evaluating after {step} steps")
    result = evaluate(run, step)
    run.evaluations.write(result.to_json())
    return result


def _save(run: Run, step: int) -> str:
    return str(save_checkpoint(run.folder, run.policy, run.learner.optimizer, step))


def _sample(run: Run, group: Group, step: int) -> dict[str, object]:
    """The step's first group, for people to read."""
    completions = [
        {"text": run.source.decode(c.token_ids), "reward": s.reward, "parts": s.parts, "finish": c.finish_reason}
        for c, s in zip(group.completions, group.scores, strict=True)
    ]
    return {"step": step, "prompt": run.source.decode(group.prompt_ids), "completions": completions}


def _mix(seed: int, step: int) -> int:
    """One seed per (seed, step), so that a resumed run draws what an unbroken one would have drawn."""
    return (seed * 1_000_003 + step * 7919 + 17) % 2**63
