"""`linear_grpo_loss`: the GRPO loss and its gradients from hidden states and the head's weight, in three matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, SoftmaxChunk, select_backend
from grpo_kernels.backends.torch import exact_products, working_dtype
from grpo_kernels.objective import Objective, TokenLoss
from grpo_kernels.packing import LossCounts, RowLayout

# Logits divided by less, or by more, leave what float32 can hold or tell apart.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class LinearGRPOLoss:
    """What `linear_grpo_loss` returns. Only `loss` carries a gradient.

    float32 stands for float64 where an input is float64.

    Every per-row field has the caller's leading shape, [rows] or [batch, length], and is 0 (False) where `computed` is False: at masked
    rows, and at rows whose advantage is 0 when nothing else gives them a gradient.

    Attributes:
        loss: scalar float32, this call's share of the loss.
        logprobs: float32, log-probability of each target under the current policy, in nats.
        entropy: float32, entropy of each row's distribution, in nats.
        ratio: float32, exp(logp - old).
        kl: float32, the KL estimate against the reference; 0 without `ref_logprobs`.
        clipped_low, clipped_high: bool, the token's gradient was cut at 1 - clip_low or 1 + clip_high.
        computed: bool, the row went through the head.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    computed: Tensor


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
    counts: LossCounts | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> LinearGRPOLoss:
    """GRPO loss of completions, without ever holding [rows, vocabulary] logits.

    With gradients enabled, the gradients of `hidden` and `weight` are made in the same pass (each token's d loss / d logp is known as soon
    as its log-probability is) and `backward` only scales them. Rows that cannot move the weights never reach the head.

    Args:
        hidden: [rows, H] packed or [batch, length, H] padded; row t predicts `targets[t]`. Last hidden states, any float dtype and stride.
        weight: [V, H], the head's weight. Frozen (`requires_grad=False`): its gradient is not computed.
        targets: [rows] or [batch, length] integer token ids; ignored, and free to hold anything, where masked.
        advantages: one per row, or one per sequence ([batch], or [sequences] with `cu_seqlens`).
        objective: see `Objective`.
        cu_seqlens: [sequences + 1] integer, the boundaries of packed rows; needed by aggregation "sequence".
        old_logprobs: of the targets under the policy that sampled them, at the same temperature; None: equal to the current ones.
        ref_logprobs: under the reference policy; needed when `objective.kl_coef` is not 0.
        mask: bool or integer, 0 where a row does not count (prompt, tool output, padding). A masked row changes nothing, NaN or not.
        counts: what the loss is divided by, over all pieces of the optimiser step; None: this call's rows are all there is. The pieces
            then add up to the whole; with aggregation "sequence" a sequence's rows must be in one piece, for its length is counted there.
        temperature: the logits are divided by it, in float32.
        backend: "auto", "cpu" or "torch"; see `backends()`.

    Returns:
        LinearGRPOLoss.

    Raises:
        ValueError, TypeError: before any work, naming the argument, what was given and what is allowed.
        RuntimeError: in backward, when a second derivative is asked for, or a second backward without retain_graph in the first.

    Source: DESIGN 2; the objective arXiv 2402.03300; see `grpo_kernels.backends.torch` for the anchored softmax.
    """
    if not isinstance(objective, Objective):
        raise TypeError(f"objective is {objective!r}; it must be an Objective, such as Objective.dapo()")
    if not isinstance(counts, LossCounts | None):
        raise TypeError(f"counts is {counts!r}; it must be LossCounts(tokens=..., sequences=...)")
    check_head(hidden, weight, targets, temperature)
    layout = RowLayout.of(targets.shape, hidden.device, mask, cu_seqlens)
    if objective.aggregation == "sequence" and layout.sequences is None:
        raise ValueError("aggregation 'sequence' needs the boundaries of packed rows: give cu_seqlens, or padded rows [batch, length, H]")
    if objective.kl_coef and ref_logprobs is None:
        raise ValueError(f"objective.kl_coef is {objective.kl_coef}, but ref_logprobs is None; give them, or set kl_coef to 0")
    row_advantages = layout.per_row("advantages", advantages, per_sequence=True)
    old = None if old_logprobs is None else layout.per_row("old_logprobs", old_logprobs)
    ref = None if ref_logprobs is None else layout.per_row("ref_logprobs", ref_logprobs)
    if counts is None:
        counts = LossCounts.of(layout.mask, layout.sequence_of_row)
    weights = objective.token_weights(layout.mask, layout.sequence_of_row, layout.sequences or 1, counts)
    moves = layout.mask if objective.needs_every_token else layout.mask & (row_advantages != 0)
    rows = moves.nonzero()[:, 0]
    flat_targets = targets.reshape(-1)[rows].long()
    check_targets(flat_targets, rows, weight.shape[0])
    job = _Job(
        objective=objective,
        rows=rows,
        targets=flat_targets,
        advantages=row_advantages[rows],
        weights=weights[rows],
        old=None if old is None else old[rows],
        ref=None if ref is None else ref[rows],
        temperature=float(temperature),
        backend=select_backend(backend, hidden.device),
        hidden_gradient=torch.is_grad_enabled() and hidden.requires_grad,
        weight_gradient=torch.is_grad_enabled() and weight.requires_grad,
    )
    loss, *fields = _LinearGRPO.apply(hidden.reshape(-1, hidden.shape[-1]), weight, job)
    logprobs, entropy, ratio, kl, low, high = (field.view(layout.shape) for field in fields)
    return LinearGRPOLoss(loss, logprobs, entropy, ratio, kl, low, high, computed=moves.view(layout.shape))


@dataclass(frozen=True)
class _Job:
    """The rows to compute, all [n] and aligned with `rows` (indices into the flattened input)."""

    objective: Objective
    rows: Tensor
    targets: Tensor
    advantages: Tensor
    weights: Tensor
    old: Tensor | None
    ref: Tensor | None
    temperature: float
    backend: Backend
    hidden_gradient: bool
    weight_gradient: bool


class _LinearGRPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor, ...]:
        with exact_products(hidden.device):
            outcome = _run(hidden, weight, job)
        ctx.gradients = (outcome.hidden_gradient, outcome.weight_gradient)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        fields = (outcome.logprobs, outcome.entropy, outcome.ratio, outcome.kl, outcome.clipped_low, outcome.clipped_high)
        ctx.mark_non_differentiable(*fields)
        return outcome.loss, *fields

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():  # only under create_graph=True; a constant gradient would be silently wrong there
            raise RuntimeError("linear_grpo_loss has no second derivative; call backward without create_graph=True")
        if ctx.gradients is None:
            raise RuntimeError("linear_grpo_loss: a second backward needs retain_graph=True in the first")
        # With retain_graph the buffers must survive; otherwise they are scaled in place and given away, which saves a copy of [V, H].
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients, dtypes = ctx.gradients, ctx.dtypes
        if not keep:
            ctx.gradients = None
        scaled = [
            None if g is None else (g * upstream if keep else g.mul_(upstream)).to(dtype)
            for g, dtype in zip(gradients, dtypes, strict=True)
        ]
        return scaled[0], scaled[1], None


@dataclass
class _Outcome:
    """Results over all rows of the input, written chunk by chunk; [N] each, the gradients [N, H] and [V, H] or None."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    hidden_gradient: Tensor | None
    weight_gradient: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, weight: Tensor, job: _Job) -> _Outcome:
        dtype = working_dtype(hidden, weight)
        total = hidden.shape[0]

        def per_row(kind: torch.dtype) -> Tensor:
            return torch.zeros(total, dtype=kind, device=hidden.device)

        # The first chunk overwrites the weight's gradient, so it starts as zeros only when there is no chunk.
        allocate = torch.empty_like if job.rows.numel() else torch.zeros_like
        return cls(
            loss=torch.zeros((), dtype=torch.float64, device=hidden.device),
            logprobs=per_row(dtype),
            entropy=per_row(dtype),
            ratio=per_row(dtype),
            kl=per_row(dtype),
            clipped_low=per_row(torch.bool),
            clipped_high=per_row(torch.bool),
            hidden_gradient=torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if job.hidden_gradient else None,
            weight_gradient=allocate(weight, dtype=dtype, memory_format=torch.contiguous_format) if job.weight_gradient else None,
        )

    def write(self, at: Tensor, chunk: SoftmaxChunk, tokens: TokenLoss) -> None:
        self.logprobs[at] = chunk.logprobs
        self.entropy[at] = chunk.entropy
        self.ratio[at] = tokens.ratio.to(self.ratio.dtype)
        self.kl[at] = tokens.kl.to(self.kl.dtype)
        self.clipped_low[at] = tokens.clipped_low
        self.clipped_high[at] = tokens.clipped_high


def _run(hidden: Tensor, weight: Tensor, job: _Job) -> _Outcome:
    """The pass over chunks of rows: softmax, d loss / d logp, and both gradients while the chunk's exponentials are alive."""
    outcome = _Outcome.empty(hidden, weight, job)
    size = job.backend.rows_per_chunk(weight.shape[0])
    for begin in range(0, job.rows.numel(), size):
        piece = slice(begin, begin + size)
        at, targets = job.rows[piece], job.targets[piece]
        rows = hidden[at]
        chunk = job.backend.softmax(
            rows, weight, targets, job.temperature, hidden_gradient=job.hidden_gradient, weight_gradient=job.weight_gradient
        )
        tokens, coefficient = _differentiate(chunk.logprobs, piece, job)
        outcome.write(at, chunk, tokens)
        outcome.loss += (tokens.loss.double() * job.weights[piece]).sum()
        scale = (-coefficient / (chunk.total * job.temperature))[:, None]
        if outcome.hidden_gradient is not None:
            assert chunk.weighted_rows is not None
            outcome.hidden_gradient[at] = scale * (chunk.weighted_rows - chunk.others[:, None] * chunk.target_rows)
        if outcome.weight_gradient is not None:
            scaled = scale * rows.to(chunk.target_rows.dtype)
            job.backend.add_weight_gradient(chunk, targets, scaled, outcome.weight_gradient, first=begin == 0)
    outcome.loss = outcome.loss.to(outcome.logprobs.dtype)
    return outcome


def _differentiate(logprobs: Tensor, piece: slice, job: _Job) -> tuple[TokenLoss, Tensor]:
    """The tokens' losses, and c = d loss / d logp by autograd on [n] numbers: the objective's mathematics stand in one place only."""
    # Clones, because tensors made under inference_mode may not take part in a gradient.
    with torch.inference_mode(False), torch.enable_grad():
        variable = logprobs.clone().detach().requires_grad_()
        old = None if job.old is None else job.old[piece].clone()
        ref = None if job.ref is None else job.ref[piece].clone()
        tokens = job.objective.token_loss(variable, old, ref, job.advantages[piece].clone())
        (coefficient,) = torch.autograd.grad((tokens.loss * job.weights[piece].clone()).sum(), variable)
    return TokenLoss(tokens.loss.detach(), tokens.ratio, tokens.kl, tokens.clipped_low, tokens.clipped_high), coefficient


def check_head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    """What every operator on (hidden, weight, targets) requires."""
    if hidden.dim() not in (2, 3):
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be [rows, H] or [batch, length, H]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [V, H] with hidden's H = {hidden.shape[-1]}")
    if weight.shape[0] < 1 or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; V and H must be at least 1")
    if targets.shape != hidden.shape[:-1] or targets.dtype not in _INTEGERS:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and dtype {targets.dtype}; "
            f"it must hold integer ids of shape {tuple(hidden.shape[:-1])}"
        )
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be float16, bfloat16, float32 or float64")
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}; all tensors must be on one device")
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"temperature is {temperature}; it must be from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")


def check_targets(targets: Tensor, rows: Tensor, vocabulary: int) -> None:
    bad = (targets < 0) | (targets >= vocabulary)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"targets holds {int(targets[first])} at row {int(rows[first])}; "
            f"an unmasked target must be in [0, {vocabulary}), the rows of weight"
        )
