"""The learner: from groups to one optimiser step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from grpo_kernels import GRPOLoss, LossCounts, linear_grpo_loss, linear_logprobs
from grpo_trainer.config import Config
from grpo_trainer.groups import Group, MicroBatch, loss_counts, micro_batches
from grpo_trainer.policy import Policy
from grpo_trainer.shared_prompt import completion_hidden


@dataclass
class UpdateStats:
    """Of one optimiser update. `tokens` went through the head; the sums are over those, and over no other."""

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    stepped: bool = False
    finite: bool = True
    tokens: int = 0
    ratio_sum: float = 0.0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    clipped_low: int = 0
    clipped_high: int = 0

    def add(self, result: GRPOLoss) -> None:
        self.loss += result.loss.item()
        self.tokens += int(result.computed.sum())
        self.ratio_sum += float(result.ratio.double().sum())
        self.kl_sum += float(result.kl.double().sum())
        self.entropy_sum += float(result.entropy.double().sum())
        self.clipped_low += int(result.clipped_low.sum())
        self.clipped_high += int(result.clipped_high.sum())

    def per_token(self, total: float) -> float | None:
        return total / self.tokens if self.tokens else None


class Learner:
    def __init__(self, policy: Policy, reference: Policy | None, config: Config) -> None:
        """`reference` is the frozen policy of the KL penalty; needed where `objective.kl_coef` is not 0."""
        self._policy = policy
        self._reference = reference
        self._config = config
        self._objective = config.objective.build(config.sampling.max_new_tokens)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def update(self, groups: Sequence[Group], step: int) -> list[UpdateStats]:
        """`updates_per_step` optimiser updates on one rollout batch, fewer where one is not finite. Groups that cannot move the weights
        are not computed."""
        moving = groups if self._objective.moves_without_advantage else [group for group in groups if group.has_signal]
        batches = micro_batches(moving, self._config.micro_batch_tokens)
        counts = loss_counts(groups)
        if self._reference is not None:
            for batch in batches:
                batch.ref = self._reference_logprobs(self._reference, batch)
        self._policy.model.train()
        done: list[UpdateStats] = []
        while len(done) < self._config.updates_per_step and (not done or done[-1].finite):
            done.append(self._update_once(batches, counts, step))
        return done

    def _update_once(self, batches: list[MicroBatch], counts: LossCounts, step: int) -> UpdateStats:
        stats = UpdateStats(learning_rate=self._learning_rate(step))
        total = _Float32Gradients(self._policy.model)
        for batch in batches:
            result = self._loss(batch, counts)
            stats.add(result)
            if not math.isfinite(stats.loss):
                break
            result.loss.backward()
            if len(batches) > 1:
                total.collect()
            # On a batch's first update the ratio is 1 by definition; later ones are relative to the log-probabilities it had then.
            if batch.old is None and self._config.updates_per_step > 1:
                batch.old = result.logprobs.detach()
        total.hand_back()
        self._step(stats, any_gradient=bool(batches))
        return stats

    def _loss(self, batch: MicroBatch, counts: LossCounts) -> GRPOLoss:
        device = self._policy.device
        return linear_grpo_loss(
            completion_hidden(self._policy, batch.prompts, batch.completions),
            self._policy.head_weight,
            batch.targets.to(device),
            batch.advantages.to(device),
            objective=self._objective,
            cu_seqlens=batch.cu_seqlens,
            old_logprobs=batch.old,
            ref_logprobs=batch.ref,
            counts=counts,
            temperature=self._config.sampling.temperature,
            backend=self._config.backend,
        )

    def _step(self, stats: UpdateStats, *, any_gradient: bool) -> None:
        """Applies the gradients, unless there are none (Adam's momentum would move the weights all the same) or they are not finite."""
        if not math.isfinite(stats.loss):
            stats.grad_norm = math.nan  # unknown: there was no backward pass
        elif any_gradient:
            parameters = self._policy.model.parameters()
            stats.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.optimizer.max_grad_norm))
        stats.finite = math.isfinite(stats.grad_norm)
        if any_gradient and stats.finite:
            for settings in self.optimizer.param_groups:
                settings["lr"] = stats.learning_rate
            self.optimizer.step()
            stats.stepped = True
        self.optimizer.zero_grad(set_to_none=True)

    def _learning_rate(self, step: int) -> float:
        settings = self._config.optimizer
        return settings.learning_rate * min(1.0, (step + 1) / (settings.warmup_steps + 1))

    @torch.no_grad()
    def _reference_logprobs(self, reference: Policy, batch: MicroBatch) -> torch.Tensor:
        hidden = completion_hidden(reference, batch.prompts, batch.completions)
        targets = batch.targets.to(reference.device)
        temperature = self._config.sampling.temperature
        return linear_logprobs(hidden, reference.head_weight, targets, temperature=temperature, backend=self._config.backend).logprobs


class _Float32Gradients:
    """Sums the micro-batches' gradients of half-precision parameters in float32: a bfloat16 running sum is worse by every piece.

    Float32 parameters are left to autograd, which adds up in float32 already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.dtype != torch.float32]
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)

    def collect(self) -> None:
        """Takes the gradients of one backward pass."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                so_far = self._sums[index]
                self._sums[index] = parameter.grad.float() if so_far is None else so_far.add_(parameter.grad)
                parameter.grad = None

    def hand_back(self) -> None:
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                parameter.grad = total.to(parameter.dtype)
