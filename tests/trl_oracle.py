"""TRL's own `GRPOTrainer._compute_loss`, run without a model or a trainer: the oracle of the parity tests.

The method is called unbound on an object that holds the attributes it reads (TRL 1.16.0). None of the loss is written again here, only
what TRL prepares before it: the log-probabilities of the model, and the rollout-correction ratio, made between generation and loss.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch as TRL holds it: completions padded on the right, all [batch, length] but `advantages`, [batch].

    `old` None: the first update, where TRL takes the current log-probabilities. `rollout` None: no log-probabilities from vLLM.
    """

    mask: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None


@dataclass(frozen=True)
class TRLLoss:
    """`metrics`: what the method logged, by TRL's names."""

    loss: Tensor
    metrics: dict[str, float]


def linear_logprobs_and_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """What TRL's `_get_per_token_logps_and_entropies` returns for a model with these last hidden states and this head."""
    logprobs = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return logprobs.gather(-1, targets[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def trl_loss(
    logprobs: Tensor, entropies: Tensor, batch: Batch, *, accumulation: int = 1, items: int | None = None, **settings: Any
) -> TRLLoss:
    """The loss of one training micro-batch, with the graph to `logprobs` and `entropies`.

    Args:
        accumulation: TRL's gradient accumulation steps.
        items: TRL's `num_items_in_batch`, the loss tokens of the whole generation batch; None: those of this micro-batch.
        settings: `GRPOConfig` fields.
    """
    trainer = _trainer(logprobs, entropies, batch, accumulation, settings)
    loss = _trl().GRPOTrainer._compute_loss(trainer, model=None, inputs=_inputs(logprobs, batch, items, trainer))
    return TRLLoss(loss, {name: values[-1] for name, values in trainer._metrics["train"].items()})


def rollout_ratio(old: Tensor, rollout: Tensor, mask: Tensor, *, mode: str, low: float | None, high: float | None) -> Tensor:
    """The factor that corrects for vLLM's log-probabilities: [batch, length], or [batch, 1] at sequence level.

    After TRL 1.16.0, trainer/grpo_trainer.py lines 2659-2703, inside `_generate_and_score_completions`, which cannot be called by itself.
    """
    difference = torch.nan_to_num((old - rollout) * mask, nan=0.0)
    level, action = mode.split("_")
    ratio = (difference.sum(-1, keepdim=True) if level == "sequence" else difference).exp()
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return ratio.masked_fill(outside, 0.0)


@functools.cache
def _trl() -> ModuleType:
    import trl  # here, because it takes seconds and is not installed everywhere

    return trl


def _trainer(logprobs: Tensor, entropies: Tensor, batch: Batch, accumulation: int, settings: dict[str, Any]) -> SimpleNamespace:
    args = _trl().GRPOConfig(
        output_dir="unused", report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=2, num_generations=2,
        gradient_accumulation_steps=accumulation, **settings,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=_ONE_PROCESS,
        current_gradient_accumulation_steps=accumulation,
        use_vllm=batch.rollout is not None,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=args.entropy_coef != 0.0,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=_trl().GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=_trl().GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        **{name: getattr(args, name) for name in _SAME_NAME},
    )
    trainer.get_high_entropy_mask = MethodType(_trl().GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


# Settings that the trainer keeps under their own names.
_SAME_NAME = (
    "beta", "loss_type", "importance_sampling_level", "max_completion_length", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "off_policy_mask_threshold", "vllm_importance_sampling_correction",
)  # fmt: skip

_ONE_PROCESS = SimpleNamespace(
    num_processes=1,
    sync_gradients=True,
    gather=lambda tensor: tensor,
    reduce=lambda tensor, reduction: tensor,
    pad_across_processes=lambda tensor, dim, pad_index: tensor,
)


def _inputs(logprobs: Tensor, batch: Batch, items: int | None, trainer: SimpleNamespace) -> dict[str, Tensor]:
    mask = batch.mask.long()
    nothing = torch.zeros(mask.shape[0], 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": batch.advantages,
        "num_items_in_batch": mask.sum() if items is None else torch.tensor(items),
    }
    if batch.old is not None:
        inputs["old_per_token_logps"] = batch.old
    if batch.ref is not None:
        inputs["ref_per_token_logps"] = batch.ref
    if batch.rollout is not None:
        inputs["sampling_per_token_logps"] = batch.rollout
        if trainer.vllm_importance_sampling_correction:
            args, old = trainer.args, logprobs.detach() if batch.old is None else batch.old
            inputs["importance_sampling_ratio"] = rollout_ratio(
                old, batch.rollout, mask, mode=args.vllm_importance_sampling_mode,
                low=args.vllm_importance_sampling_clip_min, high=args.vllm_importance_sampling_clip_max,
            )  # fmt: skip
    return inputs
