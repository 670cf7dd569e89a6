"""The operators for trainers that have only logits, or only log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.head import check_targets, check_temperatures, row_temperatures
from grpo_kernels.linear_logprobs import TokenLogprobs
from grpo_kernels.linear_loss import GRPOLoss
from grpo_kernels.loss_rows import LossInputs, LossRows
from grpo_kernels.objective import Objective
from grpo_kernels.packing import LossCounts, RowLayout
from grpo_kernels.softmax import Statistics, is_extreme, target_slope


def selected_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    overwrite_logits: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of the targets and entropies, in float32 whatever the logits' dtype, differentiable in the logits.

    Args:
        logits: [rows, V] or [batch, length, V], any float dtype and stride; `logits[:, :-1]` is not copied.
        targets: [rows] or [batch, length] integer token ids.
        mask: bool or integer, 0 where a row does not count; such a row may hold anything, its results are 0 and its gradient is exactly 0.
        temperature: the logits are divided by it; one number, or one per row.
        overwrite_logits: backward writes the gradient of the logits over the logits, which saves a tensor of their size. Whatever else
            needs their values in its backward then fails with autograd's error on changed tensors, and never with a wrong gradient.

    Raises:
        ValueError, TypeError: on bad arguments, before any work, naming them.
        RuntimeError: in backward, when a second derivative is asked for.
    """
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_selected_logprobs  # the custom ops exist only where torch.compile is used

        return compiled_selected_logprobs(logits, targets, mask, temperature)
    _check_logits(logits, targets, overwrite_logits)
    job = SelectedJob.of(logits, targets, mask, temperature)
    logprobs, entropy = _SelectedLogprobs.apply(logits, job, overwrite_logits)
    return TokenLogprobs(logprobs.view(targets.shape), entropy.view(targets.shape))


def grpo_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
    counts: LossCounts | None = None,
    sequence_lengths: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy_threshold: float | None = None,
    overwrite_logits: bool = False,
) -> GRPOLoss:
    """`linear_grpo_loss` for trainers that have the logits; see there for the arguments, and `selected_logprobs` for `overwrite_logits`."""
    inputs = LossInputs(
        objective, advantages, cu_seqlens, old_logprobs, ref_logprobs, rollout_logprobs, mask, counts, sequence_lengths, entropy_threshold
    )
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_loss  # the custom ops exist only where torch.compile is used

        selected = selected_logprobs(logits, targets, mask=mask, temperature=temperature)
        return compiled_loss(selected.logprobs, selected.entropy, inputs)
    _check_logits(logits, targets, overwrite_logits)
    rows = LossRows.of(targets, inputs)
    moves = rows.scatter(torch.ones_like(rows.rows, dtype=torch.bool))
    selected = selected_logprobs(logits, targets, mask=moves, temperature=temperature, overwrite_logits=overwrite_logits)
    return loss_of_rows(rows, selected.logprobs, selected.entropy)


def grpo_loss_from_logprobs(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
    counts: LossCounts | None = None,
    sequence_lengths: Tensor | None = None,
    entropy_threshold: float | None = None,
) -> GRPOLoss:
    """The loss from log-probabilities [rows] or [batch, length] that the trainer has already, differentiable in them and in `entropy`.

    `entropy`, of the same shape, is needed by `objective.entropy_coef` and `objective.top_entropy`. Otherwise as `linear_grpo_loss`.
    """
    inputs = LossInputs(
        objective, advantages, cu_seqlens, old_logprobs, ref_logprobs, rollout_logprobs, mask, counts, sequence_lengths, entropy_threshold
    )
    if entropy is None and (objective.entropy_coef or objective.top_entropy < 1.0):
        raise ValueError("entropy is None, but objective.entropy_coef or objective.top_entropy needs it")
    for name, tensor in (("logprobs", logprobs), ("entropy", entropy)):
        if tensor is not None and (tensor.shape != logprobs.shape or tensor.dim() not in (1, 2) or not tensor.dtype.is_floating_point):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; it must be floating point, [rows] or [batch, length]"
            )
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_loss  # the custom ops exist only where torch.compile is used

        return compiled_loss(logprobs, entropy, inputs)
    return loss_of_rows(LossRows.of(logprobs, inputs), logprobs, entropy)


def loss_of_rows(rows: LossRows, logprobs: Tensor, entropy: Tensor) -> GRPOLoss:
    """`logprobs` and `entropy` are of the caller's shape; the loss is differentiable in both."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    mine, uncertainty = (tensor.reshape(-1)[rows.rows].to(dtype) for tensor in (logprobs, entropy))
    rows = rows.picked(uncertainty)
    loss, tokens = rows.value(mine, uncertainty)
    return GRPOLoss(loss, *rows.fields(mine, uncertainty, tokens))


def _check_logits(logits: Tensor, targets: Tensor, overwrite_logits: bool) -> None:
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise TypeError(f"logits is a {type(logits).__name__}, targets a {type(targets).__name__}; both must be tensors")
    if logits.dim() not in (2, 3) or logits.shape[-1] < 1 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}; it must be floating point, [rows, V] or [batch, length, V]"
        )
    if targets.shape != logits.shape[:-1] or targets.dtype.is_floating_point or targets.dtype in (torch.bool,):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and dtype {targets.dtype}; "
            f"it must hold integer ids of shape {tuple(logits.shape[:-1])}"
        )
    if targets.device != logits.device:
        raise ValueError(f"targets is on {targets.device}, logits on {logits.device}; all tensors must be on one device")
    if overwrite_logits and any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError("overwrite_logits is True, but logits is expanded: several of its entries share their memory")


@dataclass(frozen=True)
class SelectedJob:
    """targets: [N] int64, mask: [N] bool, inverse: [N] float64, one over the temperatures; N the rows of the flattened input."""

    targets: Tensor
    mask: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, mask: Tensor | None, temperature: float | Tensor) -> SelectedJob:
        layout = RowLayout.of(targets.shape, targets.device, mask, None)
        rows = layout.mask.nonzero()[:, 0]
        flat = targets.reshape(-1).long()
        check_targets(flat[rows], rows, logits.shape[-1])
        temperatures = row_temperatures(temperature, targets)
        check_temperatures(temperatures[rows], rows)
        return cls(flat, layout.mask, temperatures.reciprocal())

    def forward(self, logits: Tensor) -> Tensor:
        """[5, N]: log-probabilities, entropies, 1 - p_y, logarithm of the sum, offset; 0 at masked rows."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        results = torch.zeros(5, self.targets.numel(), dtype=dtype, device=logits.device)
        for at in _pieces(self.mask, logits.shape[-1]):
            offset, statistics = _anchored(logits[_index(at, logits)].to(dtype), self.targets[at], self.inverse[at])
            for row, values in enumerate((statistics.logprobs, statistics.entropy, statistics.complement, statistics.log_total, offset)):
                results[row, at] = values.to(dtype)
        return results

    def backward(self, logits: Tensor, results: Tensor, slope: Tensor | None, entropy_slope: Tensor | None, *, overwrite: bool) -> Tensor:
        """The gradient of the logits from those of log-probabilities and entropies, [N] each or None for 0; `results` are forward's."""
        logprobs, entropy, complement, log_total, offset = results
        nothing = torch.zeros_like(logprobs)
        slope, extra = nothing if slope is None else slope, nothing if entropy_slope is None else entropy_slope
        at_target = target_slope(slope, extra, logprobs, entropy, complement)
        moves = self.mask & ((slope != 0) | (extra != 0))
        # detach, not .data: whoever saved the logits for another backward is told that they have changed.
        gradient = logits.detach() if overwrite else torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for at in _pieces(moves, logits.shape[-1]):
            scale = self.inverse[at].to(results.dtype)[:, None]
            # Two steps, for the offset may be large; the bound, because 0 * -inf would be NaN.
            log_p = logits[_index(at, logits)].to(results.dtype) * scale
            log_p = log_p.sub_(offset[at, None]).sub_(log_total[at, None]).clamp_(min=-1e30)
            factor = slope[at, None]
            if entropy_slope is not None:
                factor = (slope + extra * entropy)[at, None] + extra[at, None] * log_p
            slopes = log_p.exp_().mul_(factor).neg_()
            slopes[torch.arange(at.numel(), device=at.device), self.targets[at]] = at_target[at]
            gradient[_index(at, logits)] = slopes.mul_(scale).to(logits.dtype)
        if overwrite:
            for at in _pieces(~moves, logits.shape[-1]):
                gradient[_index(at, logits)] = 0.0
        return gradient


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: SelectedJob, overwrite_logits: bool) -> tuple[Tensor, Tensor]:
        results = job.forward(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, results)
        ctx.job, ctx.overwrite_logits = job, overwrite_logits
        return results[0].clone(), results[1].clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, entropy_slope: Tensor | None) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("selected_logprobs has no second derivative; call backward without create_graph=True")
        logits, results = ctx.saved_tensors
        if slope is None and entropy_slope is None:
            return None, None, None
        return ctx.job.backward(logits, results, slope, entropy_slope, overwrite=ctx.overwrite_logits), None, None


def _anchored(rows: Tensor, targets: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Statistics]:
    """(offset [n], statistics) of logits `rows` [n, V], which are overwritten; see `grpo_kernels.head_pass` for the anchored softmax."""
    own = torch.arange(targets.numel(), device=targets.device), targets
    logits = rows.mul_(inverse_temperature.to(rows.dtype)[:, None])
    target_logits = logits[own].clone()
    offset = target_logits.clone()
    others, weighted = _sums(logits, own, offset)
    extreme = is_extreme(others)
    if bool(extreme.any()):
        at = extreme.nonzero()[:, 0]
        offset[at] = logits[at].amax(1)
        others[at], weighted[at] = _sums(logits[at], (torch.arange(at.numel(), device=at.device), targets[at]), offset[at])
    return offset, Statistics.of(others, weighted, target_logits.double() - offset.double())


def _sums(logits: Tensor, own: tuple[Tensor, Tensor], offset: Tensor) -> tuple[Tensor, Tensor]:
    distance = logits - offset[:, None]
    distance[own] = -torch.inf
    distance.clamp_(min=-1e30)  # a logit of -inf would make 0 * -inf a NaN; NaN passes through
    exponentials = distance.exp()
    return exponentials.sum(1, dtype=torch.float64), distance.mul_(exponentials).sum(1, dtype=torch.float64)


def _pieces(which: Tensor, vocabulary: int) -> Iterator[Tensor]:
    """Indices of the rows where `which` [N] is true, few enough at a time for a cache (a CPU's second level, a GPU's memory)."""
    elements = 1 << 19 if which.device.type == "cpu" else 1 << 27
    yield from which.nonzero()[:, 0].split(max(1, elements // vocabulary))


def _index(at: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Flat row numbers as indices of [rows, V] or [batch, length, V]: no reshape, which would copy a slice such as logits[:, :-1]."""
    return (at,) if logits.dim() == 2 else (at // logits.shape[1], at % logits.shape[1])
