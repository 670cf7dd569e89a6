"""The operators for trainers that have only logits, or only log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import select_backend
from grpo_kernels.backends.triton import kernels
from grpo_kernels.head import DTYPES, HeadRows, check_target_shape
from grpo_kernels.linear_logprobs import TokenLogprobs
from grpo_kernels.linear_loss import PER_ROW, GRPOLoss, take_gradients
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
    backend: str = "auto",
) -> TokenLogprobs:
    """Log-probabilities of the targets and entropies, in float32 whatever the logits' dtype, differentiable in the logits.

    Args:
        logits: [rows, V] or [batch, length, V], any float dtype and stride; `logits[:, :-1]` is not copied.
        targets: [rows] or [batch, length] integer token ids.
        mask: bool or integer, 0 where a row does not count; such a row may hold anything, its results are 0 and its gradient is exactly 0.
        temperature: the logits are divided by it; one number, or one per row.
        overwrite_logits: the gradient of the logits is written over the logits, in backward, which saves a tensor of their size. Whatever
            else needs their values in its backward then fails with autograd's error on changed tensors, and never with a wrong gradient.
            Under torch.compile, which plans its memory itself, it does nothing.
        backend: "auto", "triton" or "torch", which "cpu" is here; see `backends()`.

    Returns:
        TokenLogprobs of the targets' shape.

    Raises:
        ValueError, TypeError: on bad arguments, before any work, naming them.
        RuntimeError: in backward, when a second derivative is asked for.
    """
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_selected_logprobs  # the custom ops exist only where torch.compile is used

        return compiled_selected_logprobs(logits, targets, mask, temperature, backend)
    check_logits(logits, targets, overwrite_logits=overwrite_logits)
    job = SelectedJob.of(logits, targets, mask, temperature, backend)
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
    backend: str = "auto",
) -> GRPOLoss:
    """`linear_grpo_loss` for trainers that have the logits, [rows, V] or [batch, length, V]: the same result, differentiable in them.

    See there for the arguments and errors, and `selected_logprobs` for `overwrite_logits` and `backend`. On a GPU, where neither
    `overwrite_logits` nor an objective that looks at more than one token at a time asks for two passes, the loss and its gradient are made
    by one kernel in this call, which reads the logits once and lets go of them; the gradient then is rounded to their dtype before the
    upstream factor, so that float16, whose loss scale would come too late, takes two passes as well.
    """
    inputs = LossInputs(
        objective=objective, advantages=advantages, cu_seqlens=cu_seqlens, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs, mask=mask, counts=counts, sequence_lengths=sequence_lengths, entropy_threshold=entropy_threshold,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_loss  # the custom ops exist only where torch.compile is used

        selected = selected_logprobs(logits, targets, mask=mask, temperature=temperature, backend=backend)
        return compiled_loss(selected.logprobs, selected.entropy, inputs)
    check_logits(logits, targets, overwrite_logits=overwrite_logits)
    rows = LossRows.of(targets, inputs)
    # Overwritten in this call, the logits would be gone for whoever reads them before backward, and nobody would say so.
    if has_kernels(logits, backend) and not overwrite_logits and logits.dtype != torch.float16:
        fused = FusedJob.of(logits, targets, rows, temperature)
        if fused is not None:
            return GRPOLoss(*_FusedLoss.apply(logits, fused, torch.is_grad_enabled() and logits.requires_grad))
    selected = selected_logprobs(
        logits, targets, mask=rows.moves(), temperature=temperature, overwrite_logits=overwrite_logits, backend=backend
    )
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

    `entropy`, of the same shape, is needed by `objective.entropy_coef` and `objective.top_entropy`.
    Result and errors as of `linear_grpo_loss`.
    """
    inputs = LossInputs(
        objective=objective, advantages=advantages, cu_seqlens=cu_seqlens, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs, mask=mask, counts=counts, sequence_lengths=sequence_lengths, entropy_threshold=entropy_threshold,
    )  # fmt: skip
    inputs.check()
    if entropy is None and (objective.entropy_coef or objective.top_entropy < 1.0):
        raise ValueError("entropy is None, but objective.entropy_coef or objective.top_entropy needs it")
    for name, tensor in (("logprobs", logprobs), ("entropy", entropy)):
        if not isinstance(tensor, Tensor) and not (name == "entropy" and tensor is None):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
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
    mine, uncertainty = (tensor.reshape(-1)[rows.index].to(dtype) for tensor in (logprobs, entropy))
    rows = rows.picked(uncertainty)
    loss, tokens = rows.value(mine, uncertainty)
    return GRPOLoss(loss, **rows.fields(mine, uncertainty, tokens))


def check_logits(logits: Tensor, targets: Tensor, *, overwrite_logits: bool) -> None:
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise TypeError(f"logits is a {type(logits).__name__}, targets a {type(targets).__name__}; both must be tensors")
    if logits.dim() not in (2, 3) or logits.shape[-1] < 1 or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}; "
            "it must be float16, bfloat16, float32 or float64, [rows, V] or [batch, length, V]"
        )
    check_target_shape(targets, logits.shape[:-1])
    if targets.device != logits.device:
        raise ValueError(f"targets is on {targets.device}, logits on {logits.device}; all tensors must be on one device")
    if overwrite_logits and _overlaps(logits):
        raise ValueError("overwrite_logits is True, but entries of logits share their memory (it is expanded, or an overlapping view)")


def _overlaps(logits: Tensor) -> bool:
    """Whether two entries may lie at one address: some stride is no larger than what the smaller ones reach over."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(logits.stride(), logits.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def has_kernels(logits: Tensor, backend: str) -> bool:
    """Whether the backend of that name computes on these logits by kernels.

    Raises:
        ValueError: of `select_backend`; "cpu" is torch here.
    """
    chosen = select_backend("torch" if backend == "auto" and logits.device.type == "cpu" else backend, logits.device)
    return chosen.name == "triton" and logits.dtype != torch.float64 and logits.stride(-1) == 1


@dataclass(frozen=True)
class SelectedJob:
    """targets: [N] int64, mask: [N] bool, inverse: [N] float64, one over the temperatures; N the rows of the flattened input. kernels: by
    Triton's kernels, or by torch."""

    targets: Tensor
    mask: Tensor
    inverse: Tensor
    kernels: bool

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, mask: Tensor | None, temperature: float | Tensor, backend: str) -> SelectedJob:
        by_kernels = has_kernels(logits, backend)
        layout = RowLayout.of(targets.shape, targets.device, mask, None)
        rows = layout.mask.nonzero()[:, 0]
        checked = HeadRows.of(rows, logits.shape[-1], targets, temperature)
        inverse = torch.ones(targets.numel(), dtype=torch.float64, device=targets.device)
        inverse[rows] = checked.temperatures.reciprocal()
        return cls(targets.reshape(-1).long(), layout.mask, inverse, by_kernels)

    def forward(self, logits: Tensor) -> Tensor:
        """[5, N]: log-probabilities, entropies, 1 - p_y, logarithm of the sum, offset; 0 at masked rows."""
        if self.kernels:
            found: Tensor = kernels().row_statistics(logits, self._slots, self.targets, self.inverse.float())
            return found.masked_fill_(~self.mask, 0.0)  # where nothing was written
        dtype = torch.promote_types(logits.dtype, torch.float32)
        results = torch.zeros(5, self.targets.numel(), dtype=dtype, device=logits.device)
        space = _Workspace(logits, dtype)
        for at in space.pieces(self.mask):
            offset, statistics = self._anchored(space, at)
            for row, values in enumerate((statistics.logprobs, statistics.entropy, statistics.complement, statistics.log_total, offset)):
                results[row, at] = values.to(dtype)
        return results

    @property
    def _slots(self) -> Tensor:
        return torch.where(self.mask, torch.arange(self.mask.numel(), device=self.mask.device), -1)

    def _anchored(self, space: _Workspace, at: Tensor) -> tuple[Tensor, Statistics]:
        """(offset, statistics), [n], of rows `at`; see `grpo_kernels.head_pass` for the anchored softmax."""
        logits = space.load(at, self.inverse[at])
        target_logits = logits[torch.arange(at.numel(), device=at.device), self.targets[at]]
        offset = target_logits.clone()
        others, weighted = self._sums(space, logits, at, offset)
        extreme = is_extreme(others)
        if bool(extreme.any()):
            few = extreme.nonzero()[:, 0]
            logits = space.load(at[few], self.inverse[at[few]])
            offset[few] = logits.amax(1)
            others[few], weighted[few] = self._sums(space, logits, at[few], offset[few])
        return offset, Statistics.of(others, weighted, target_logits.double() - offset.double())

    def _sums(self, space: _Workspace, logits: Tensor, at: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Of exp(x - o) and exp(x - o) (x - o) over all but the target, [n] float64; `logits` are overwritten."""
        distances = logits.sub_(offset[:, None])
        distances[torch.arange(at.numel(), device=at.device), self.targets[at]] = -torch.inf
        distances.clamp_(min=-1e30)  # a logit of -inf would make 0 * -inf a NaN; NaN passes through
        exponentials = torch.exp(distances, out=space.second(at.numel()))
        return exponentials.sum(1, dtype=torch.float64), distances.mul_(exponentials).sum(1, dtype=torch.float64)

    def backward(self, logits: Tensor, results: Tensor, slope: Tensor | None, entropy_slope: Tensor | None, *, overwrite: bool) -> Tensor:
        """The gradient of the logits from those of log-probabilities and entropies, [N] each or None for 0; `results` are forward's."""
        if self.kernels:
            gradient = _gradient_place(logits, overwrite=overwrite)
            slope = torch.zeros_like(results[0]) if slope is None else slope.contiguous()  # that of a sum is expanded
            extra = None if entropy_slope is None else entropy_slope.contiguous()
            kernels().row_gradient(logits, self._slots, self.targets, self.inverse.float(), results, slope, extra, gradient)
            return gradient
        logprobs, entropy, complement, log_total, offset = results
        nothing = torch.zeros_like(logprobs)
        slope, extra = nothing if slope is None else slope, nothing if entropy_slope is None else entropy_slope
        at_target = target_slope(slope, extra, logprobs, entropy, complement)
        # A NaN log-probability has slope 0 where its loss was clamped, and must not look like a row without gradient.
        moves = self.mask & ((slope != 0) | (extra != 0) | logprobs.isnan())
        # detach, not .data: whoever saved the logits for another backward is told that they have changed.
        gradient = logits.detach() if overwrite else torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        space = _Workspace(logits, results.dtype)
        for at in space.pieces(moves):
            # Two steps, for the offset may be large; the bound, because 0 * -inf would be NaN.
            log_p = space.load(at, self.inverse[at]).sub_(offset[at, None]).sub_(log_total[at, None]).clamp_(min=-1e30)
            slopes = torch.exp(log_p, out=space.second(at.numel()))
            if entropy_slope is None:
                slopes.mul_(-slope[at, None])
            else:
                slopes.mul_(log_p.mul_(-extra[at, None]).sub_((slope + extra * entropy)[at, None]))
            slopes[torch.arange(at.numel(), device=at.device), self.targets[at]] = at_target[at]
            space.store(gradient, at, slopes.mul_(self.inverse[at].to(slopes.dtype)[:, None]))
        if overwrite:
            for at in space.pieces(~moves):
                gradient[space.index(at)] = 0.0
        return gradient


def _gradient_place(logits: Tensor, *, overwrite: bool) -> Tensor:
    """Where a kernel writes the gradient of the logits. Who saved the logits for another backward is told that they change: torch does
    not see what a kernel does."""
    if not overwrite:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch.autograd.graph.increment_version(logits)
    return logits.detach()


@dataclass(frozen=True)
class FusedJob:
    """The loss and the gradient of the logits in one launch. slots: [N] int64, each row's place in the [n] tensors, or -1."""

    rows: LossRows
    slots: Tensor
    targets: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, rows: LossRows, temperature: float | Tensor) -> FusedJob | None:
        """None where the objective of a token depends on what is not known in its row."""
        rows = rows.one_launch(kernels().computes, kernels().token_objective)
        if rows.evaluator is None or rows.picks_by_entropy:
            return None
        asked = HeadRows.of(rows.index, logits.shape[-1], targets, temperature)
        slots = torch.full((targets.numel(),), -1, dtype=torch.int64, device=targets.device)
        slots[rows.index] = torch.arange(rows.index.numel(), device=targets.device)
        return cls(rows, slots, asked.targets, asked.temperatures.reciprocal().float())

    def compute(self, logits: Tensor, gradient: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the other fields of `GRPOLoss`."""
        rows = self.rows
        (logprobs, entropy, *_), tokens = kernels().row_loss(
            logits, self.slots, self.targets, self.inverse, rows.objective, advantages=rows.advantages, policy_weight=rows.policy_weight,
            old_logprobs=rows.old, ref_logprobs=rows.ref, entropy_threshold=rows.entropy_threshold, shares=rows.shares, bonus=rows.bonus,
            out=gradient,
        )  # fmt: skip
        return rows.total(tokens, entropy).float(), rows.fields(logprobs, entropy, rows.with_correction(tokens))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: FusedJob, wanted: bool) -> tuple[Tensor, ...]:
        ctx.gradients = _gradient_place(logits, overwrite=False) if wanted else None
        loss, fields = job.compute(logits, ctx.gradients)
        per_row = tuple(fields[name] for name in PER_ROW)
        ctx.mark_non_differentiable(*per_row)
        return loss, *per_row

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, None, None]:
        gradient, keep = take_gradients(ctx, "grpo_loss")
        return kernels().scaled(gradient, upstream, gradient.dtype, in_place=not keep), None, None


class _Workspace:
    """Two [n, V] buffers of the working dtype for some rows of the logits at a time, few enough for a cache (a CPU's second level, a GPU's
    memory): fresh temporaries of that size would cost more in page faults than the arithmetic."""

    def __init__(self, logits: Tensor, dtype: torch.dtype) -> None:
        self._logits = logits
        vocabulary = logits.shape[-1]
        self._most = max(1, (1 << 19 if logits.device.type == "cpu" else 1 << 27) // vocabulary)
        rows = min(self._most, logits.numel() // vocabulary)
        self._first, self._second = torch.empty(2, rows, vocabulary, dtype=dtype, device=logits.device)

    def pieces(self, which: Tensor) -> Iterator[Tensor]:
        """Indices of the rows where `which` [N] is true, as many at a time as fit."""
        yield from (piece for piece in which.nonzero()[:, 0].split(self._most) if piece.numel())

    def index(self, at: Tensor) -> tuple[Tensor, ...] | tuple[int, slice] | slice:
        """Flat row numbers as indices of [rows, V] or [batch, length, V]: no reshape, which would copy a slice such as logits[:, :-1].
        Neighbouring rows as a slice, which a CPU need not gather first."""
        length = self._logits.shape[1] if self._logits.dim() == 3 else 0
        if at.device.type == "cpu":
            first, last = int(at[0]), int(at[-1])
            if last - first + 1 == at.numel() and not length:
                return slice(first, last + 1)
            if last - first + 1 == at.numel() and first // length == last // length:
                return first // length, slice(first % length, last % length + 1)
        return (at // length, at % length) if length else (at,)

    def load(self, at: Tensor, inverse_temperature: Tensor) -> Tensor:
        """Rows `at` divided by their temperatures, in the first buffer."""
        rows = self._first[: at.numel()].copy_(self._logits[self.index(at)])
        return rows.mul_(inverse_temperature.to(rows.dtype)[:, None])

    def second(self, rows: int) -> Tensor:
        return self._second[:rows]

    def store(self, gradient: Tensor, at: Tensor, values: Tensor) -> None:
        index = self.index(at)
        gradient[index] = values.to(gradient.dtype) if isinstance(index, tuple) and isinstance(index[0], Tensor) else values


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
