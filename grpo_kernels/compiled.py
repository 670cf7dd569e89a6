"""The operators as custom ops with fake implementations, for torch.compile. Imported where a call is being compiled, and only there.

A custom op takes tensors and plain numbers, so the objective goes in by its key and a process group by its name. What depends on data -
which rows move the weights, the checks of values - happens inside of the op, where the values are. A forward op returns its gradients, or
what its backward op needs, as results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import logits
from grpo_kernels.backends import select_backend
from grpo_kernels.head import Head, check_head, check_support, working_dtype
from grpo_kernels.head_pass import Wanted
from grpo_kernels.linear_logprobs import LogprobJob, TokenLogprobs
from grpo_kernels.linear_loss import PER_ROW, GRPOLoss, LossJob, compute
from grpo_kernels.loss_rows import LossInputs, LossRows
from grpo_kernels.objective import Objective
from grpo_kernels.packing import LossCounts

_op = torch.library.custom_op
_OWN = 1 + len(PER_ROW)


def compiled_linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inputs: LossInputs,
    temperature: float | Tensor,
    softcap: float | None,
    support: Tensor | None,
    group: dist.ProcessGroup | None,
    backend: str,
) -> GRPOLoss:
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    results = _linear_grpo_loss(
        hidden, weight, bias, targets, *_flat(inputs), _heat(temperature), softcap, support, _group_name(group), backend, wanted
    )
    return _result(results)


def compiled_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    support: Tensor | None,
    group: dist.ProcessGroup | None,
    backend: str,
) -> TokenLogprobs:
    return TokenLogprobs(
        *_linear_logprobs(hidden, weight, bias, targets, mask, _heat(temperature), support, softcap, _group_name(group), backend)
    )


def compiled_selected_logprobs(
    logits: Tensor, targets: Tensor, mask: Tensor | None, temperature: float | Tensor, backend: str
) -> TokenLogprobs:
    return TokenLogprobs(*_selected_logprobs(logits, targets, mask, _heat(temperature), backend)[:2])


def compiled_loss(logprobs: Tensor, entropy: Tensor, inputs: LossInputs) -> GRPOLoss:
    results = _loss(logprobs, entropy, *_flat(inputs))
    return _result(results)


def _result(results: list[Tensor]) -> GRPOLoss:
    """The first of an op's results are those of GRPOLoss, the loss first; the others are for its backward op."""
    return GRPOLoss(results[0], *(field.detach() for field in results[1:_OWN]))


def _heat(temperature: float | Tensor) -> Tensor:
    return temperature if isinstance(temperature, Tensor) else _number(temperature)


def _number(value: float) -> Tensor:
    """A number that may change from call to call, as a sum: torch.compile keeps that symbolic. As an argument of an op, or of torch.tensor,
    it would be compiled anew for every value, and after eight of them refused."""
    return torch.zeros((), dtype=torch.float64) + value


def _group_name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


def _group(name: str) -> dist.ProcessGroup | None:
    # The only way back from a name, which torch's own functional collectives take as well; its stubs leave it out.
    return dist.distributed_c10d._resolve_process_group(name) if name else None  # type: ignore[attr-defined, arg-type]


def _flat(inputs: LossInputs) -> tuple[Any, ...]:
    """As the ops take them; `_inputs` is the way back."""
    counts = inputs.counts
    return (
        inputs.advantages, inputs.cu_seqlens, inputs.old_logprobs, inputs.ref_logprobs, inputs.rollout_logprobs, inputs.mask,
        inputs.sequence_lengths, inputs.objective.key, None if counts is None else counts.tokens,
        None if counts is None else counts.sequences,
        None if inputs.entropy_threshold is None else _number(inputs.entropy_threshold),
    )  # fmt: skip


def _inputs(
    advantages: Tensor, cu_seqlens: Tensor | None, old: Tensor | None, ref: Tensor | None, rollout: Tensor | None, mask: Tensor | None,
    sequence_lengths: Tensor | None, objective: str, tokens: int | None, sequences: int | None, entropy_threshold: Tensor | None,
) -> LossInputs:  # fmt: skip
    threshold = None if entropy_threshold is None else float(entropy_threshold)
    counts = None if tokens is None or sequences is None else LossCounts(tokens, sequences)
    return LossInputs(
        objective=Objective.of_key(objective), advantages=advantages, cu_seqlens=cu_seqlens, old_logprobs=old, ref_logprobs=ref,
        rollout_logprobs=rollout, mask=mask, counts=counts, sequence_lengths=sequence_lengths, entropy_threshold=threshold,
    )  # fmt: skip


def _fakes(shape: torch.Size, like: Tensor) -> list[Tensor]:
    """Of `GRPOLoss`: a number, then numbers and flags per row."""
    flags = ("clipped_low", "clipped_high", "computed")
    return [like.new_empty(()), *(like.new_empty(shape, dtype=torch.bool if name in flags else like.dtype) for name in PER_ROW)]


@_op("grpo_kernels::linear_grpo_loss", mutates_args=())
def _linear_grpo_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, advantages: Tensor, cu_seqlens: Tensor | None,
    old: Tensor | None, ref: Tensor | None, rollout: Tensor | None, mask: Tensor | None, sequence_lengths: Tensor | None, objective: str,
    tokens: int | None, sequences: int | None, entropy_threshold: Tensor | None, temperature: Tensor, softcap: float | None,
    support: Tensor | None, group: str, backend: str, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The fields of `GRPOLoss` and the gradients of hidden, weight and bias, empty where not wanted."""
    check_head(hidden, weight, targets, bias, softcap)
    inputs = _inputs(advantages, cu_seqlens, old, ref, rollout, mask, sequence_lengths, objective, tokens, sequences, entropy_threshold)
    head = Head.of(weight, bias, softcap, _group(group))
    check_support(support, _group(group))
    job = LossJob.of(hidden.dtype, targets, inputs, temperature, support, head, select_backend(backend, hidden.device))
    flat = hidden.reshape(-1, hidden.shape[-1])
    outcome = compute(flat, job, Wanted(wanted[0], wanted[1], wanted[2], inputs.objective.entropy_coef != 0))
    # In the dtype that the fake implementation can know: a backend may leave the weight's gradient in the weight's.
    dtype = working_dtype(hidden.dtype, weight.dtype)
    gradients = [hidden.new_empty(0) if g is None else g.to(dtype) for g in outcome.gradients]
    gradients[0] = gradients[0].view(hidden.shape) if wanted[0] else gradients[0]
    return [outcome.loss, *outcome.fields, *gradients]


@_linear_grpo_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *arguments: Any) -> list[Tensor]:
    like = hidden.new_empty(0, dtype=working_dtype(hidden.dtype, weight.dtype))
    wanted = arguments[-1]
    gradients = [
        like.new_empty(t.shape) if wants and t is not None else hidden.new_empty(0)
        for wants, t in zip(wanted, (hidden, weight, bias), strict=True)
    ]
    return [*_fakes(targets.shape, like), *gradients]


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[_OWN:])
    ctx.dtypes = [t.dtype if wants and t is not None else None for wants, t in zip(inputs[-1], inputs[:3], strict=True)]
    ctx.others = len(inputs) - 3


def _scale_gradients(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    loss = upstream[0]
    gradients = [
        None if loss is None or dtype is None else (gradient * loss).to(dtype)
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    ]
    return *gradients, *[None] * ctx.others


_linear_grpo_loss.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@_op("grpo_kernels::linear_logprobs", mutates_args=())
def _linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None, temperature: Tensor,
    support: Tensor | None, softcap: float | None, group: str, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_head(hidden, weight, targets, bias, softcap)
    check_support(support, _group(group))
    head = Head.of(weight, bias, softcap, _group(group))
    job = LogprobJob.of(targets, mask, temperature, support, head, select_backend(backend, hidden.device))
    logprobs, entropy = job.forward(hidden.reshape(-1, hidden.shape[-1]))
    return logprobs.view(targets.shape), entropy.view(targets.shape)


@_linear_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    dtype = working_dtype(hidden.dtype, weight.dtype)
    return hidden.new_empty(targets.shape, dtype=dtype), hidden.new_empty(targets.shape, dtype=dtype)


@_op("grpo_kernels::linear_logprobs_backward", mutates_args=())
def _linear_logprobs_backward(
    logprob_gradient: Tensor, entropy_gradient: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
    mask: Tensor | None, temperature: Tensor, support: Tensor | None, softcap: float | None, group: str, backend: str,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    head = Head.of(weight, bias, softcap, _group(group))
    job = LogprobJob.of(targets, mask, temperature, support, head, select_backend(backend, hidden.device))
    flat = hidden.reshape(-1, hidden.shape[-1])
    gradients = job.backward(flat, logprob_gradient.reshape(-1), entropy_gradient.reshape(-1), Wanted(*wanted))
    tensors = (hidden, weight, bias)
    return [hidden.new_empty(0) if g is None or t is None else g.view(t.shape).to(t.dtype) for g, t in zip(gradients, tensors, strict=True)]


@_linear_logprobs_backward.register_fake
def _(
    logprob_gradient: Tensor, entropy_gradient: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
) -> list[Tensor]:
    wanted = arguments[-1]
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if wants and t is not None else hidden.new_empty(0)
        for wants, t in zip(wanted, (hidden, weight, bias), strict=True)
    ]


def _keep_logprob_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _differentiate_logprobs(ctx: Any, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    targets = tensors[3]
    zero = torch.zeros(targets.shape, dtype=working_dtype(tensors[0].dtype, tensors[1].dtype), device=targets.device)
    upstream = (zero if g is None else g for g in (logprob_gradient, entropy_gradient))
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _linear_logprobs_backward(*upstream, *tensors, *ctx.settings, wanted)
    return *(g if wants else None for g, wants in zip(gradients, wanted, strict=True)), *[None] * 7


_linear_logprobs.register_autograd(_differentiate_logprobs, setup_context=_keep_logprob_inputs)


@_op("grpo_kernels::selected_logprobs", mutates_args=())
def _selected_logprobs(logits_: Tensor, targets: Tensor, mask: Tensor | None, temperature: Tensor, backend: str) -> list[Tensor]:
    """(logprobs, entropy), and what `SelectedJob.backward` needs."""
    logits.check_logits(logits_, targets, overwrite_logits=False)
    job = logits.SelectedJob.of(logits_, targets, mask, temperature, backend)
    saved = job.forward(logits_)
    return [saved[0].view(targets.shape).clone(), saved[1].view(targets.shape).clone(), saved]


@_selected_logprobs.register_fake
def _(logits_: Tensor, targets: Tensor, *arguments: Any) -> list[Tensor]:
    like = logits_.new_empty(0, dtype=torch.promote_types(logits_.dtype, torch.float32))
    return [like.new_empty(targets.shape), like.new_empty(targets.shape), like.new_empty((5, targets.numel()))]


@_op("grpo_kernels::selected_logprobs_backward", mutates_args=())
def _selected_logprobs_backward(
    logprob_gradient: Tensor, entropy_gradient: Tensor, logits_: Tensor, targets: Tensor, mask: Tensor | None,
    temperature: Tensor, saved: Tensor, backend: str,
) -> Tensor:  # fmt: skip
    job = logits.SelectedJob.of(logits_, targets, mask, temperature, backend)
    return job.backward(logits_, saved, logprob_gradient.reshape(-1), entropy_gradient.reshape(-1), overwrite=False)


@_selected_logprobs_backward.register_fake
def _(logprob_gradient: Tensor, entropy_gradient: Tensor, logits_: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits_, memory_format=torch.contiguous_format)


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[2])
    ctx.backend = inputs[4]


def _differentiate_selected(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    _, targets, *_, saved = tensors = ctx.saved_tensors
    zero = torch.zeros(targets.shape, dtype=saved.dtype, device=saved.device)
    given = (zero if g is None else g for g in upstream[:2])
    return _selected_logprobs_backward(*given, *tensors, ctx.backend), None, None, None, None


_selected_logprobs.register_autograd(_differentiate_selected, setup_context=_keep_logits)


@_op("grpo_kernels::loss", mutates_args=())
def _loss(
    logprobs: Tensor, entropy: Tensor, advantages: Tensor, cu_seqlens: Tensor | None, old: Tensor | None, ref: Tensor | None,
    rollout: Tensor | None, mask: Tensor | None, sequence_lengths: Tensor | None, objective: str, tokens: int | None,
    sequences: int | None, entropy_threshold: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The fields of `GRPOLoss`, and the slopes of logprobs and entropy, float32 at least: upstream may be a loss scale."""
    inputs = _inputs(advantages, cu_seqlens, old, ref, rollout, mask, sequence_lengths, objective, tokens, sequences, entropy_threshold)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    # Tensors made under inference_mode may not take part in a gradient: the rows too are made outside of it.
    with torch.inference_mode(False), torch.enable_grad():
        rows = LossRows.of(logprobs, inputs)
        leaves = [t.detach().to(dtype, copy=True, memory_format=torch.contiguous_format).requires_grad_() for t in (logprobs, entropy)]
        result = logits.loss_of_rows(rows, *leaves)
        slopes = torch.autograd.grad(result.loss, leaves, materialize_grads=True)
    fields = (result.loss, *(getattr(result, name) for name in PER_ROW))
    return [*(field.detach() for field in fields), *slopes]


@_loss.register_fake
def _(logprobs: Tensor, entropy: Tensor, *arguments: Any) -> list[Tensor]:
    like = logprobs.new_empty(0, dtype=torch.promote_types(logprobs.dtype, torch.float32))
    return [*_fakes(logprobs.shape, like), like.new_empty(logprobs.shape), like.new_empty(logprobs.shape)]


def _keep_slopes(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[_OWN:])
    ctx.dtypes = [t.dtype for t in inputs[:2]]


def _scale_slopes(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    loss = upstream[0]
    gradients = (None if loss is None else (slopes * loss).to(dtype) for slopes, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
    return *gradients, *[None] * 11


_loss.register_autograd(_scale_slopes, setup_context=_keep_slopes)
