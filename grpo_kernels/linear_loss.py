"""`linear_grpo_loss`: the GRPO loss and its gradients from hidden states and the head's weight, in three matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.backends import Backend, select_backend
from grpo_kernels.head import Head, HeadRows, check_head, check_support, working_dtype
from grpo_kernels.head_pass import Anchor, Flag, Wanted, in_chunks
from grpo_kernels.loss_rows import LossInputs, LossRows
from grpo_kernels.objective import Objective
from grpo_kernels.packing import LossCounts
from grpo_kernels.precision import exact_products
from grpo_kernels.support_pass import RowPass, pass_for


@dataclass(frozen=True)
class GRPOLoss:
    """What `linear_grpo_loss` returns. Only `loss` carries a gradient.

    float32 stands for float64 where an input is float64.

    Every per-row field has the caller's leading shape, [rows] or [batch, length], and is 0 (False) where `computed` is False: at masked
    rows, and at rows that cannot move the weights (advantage 0 or policy weight 0, when nothing else gives them a gradient). Only
    `rollout_ratio` and `policy_weight` are given at every row that counts.

    Attributes:
        loss: scalar float32, this call's share of the loss.
        logprobs: float32, log-probability of each target under the current policy, in nats.
        entropy: float32, entropy of each row's distribution, in nats.
        ratio: float32, exp(logp - old), of the whole sequence where `objective.ratio_level` says so.
        kl: float32, the KL estimate against the reference; 0 without `ref_logprobs`.
        clipped_low, clipped_high: bool, a bound of the ratio cut the token's gradient (see `Objective`).
        rollout_ratio: float32, exp(old - rollout) at the correction's level, before it is truncated or masked; 1 without a correction.
        policy_weight: float32, the constant factor on the policy loss: rollout correction, off-policy mask, entropy mask. 0: dropped.
        computed: bool, the row went through the head.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    rollout_ratio: Tensor
    policy_weight: Tensor
    computed: Tensor

    def metrics(self) -> dict[str, float]:
        """Means over the computed rows for a log; 0 where there are none. Over all rows that count: the raw rollout ratios, and `dropped`,
        the share whose policy weight is 0, so that a correction that silently drops whole sequences shows (TRL #4772, #5231)."""
        count = max(int(self.computed.sum()), 1)
        counted = self.rollout_ratio != 0  # a ratio is never 0, so that it is where the mask is
        ratio = self.rollout_ratio[counted].double() if bool(counted.any()) else self.rollout_ratio.new_ones(1).double()
        names = ("entropy", "ratio", "kl", "clipped_low", "clipped_high")
        means = {name: float(getattr(self, name).double().sum()) / count for name in names}
        return {
            **means,
            "rollout_ratio_min": float(ratio.min()),
            "rollout_ratio_mean": float(ratio.mean()),
            "rollout_ratio_max": float(ratio.max()),
            "dropped": float((counted & (self.policy_weight == 0)).sum()) / max(int(counted.sum()), 1),
        }


PER_ROW = tuple(field.name for field in fields(GRPOLoss))[1:]


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
    rollout_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
    counts: LossCounts | None = None,
    sequence_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    support: Tensor | None = None,
    entropy_threshold: float | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> GRPOLoss:
    """GRPO loss of completions, without ever holding [rows, vocabulary] logits.

    With gradients enabled, the gradients of `hidden`, `weight` and `bias` are made in the same pass (each token's d loss / d logp is known
    as soon as its log-probability is) and `backward` only scales them. Rows that cannot move the weights never reach the head. A fourth
    product, a pass for the log-probabilities first, is needed only by `objective.top_entropy` without `entropy_threshold`, and by
    objectives that couple a sequence's tokens for sequences longer than a chunk (a few hundred rows on a CPU) with `old_logprobs`.

    Args:
        hidden: [rows, H] packed or [batch, length, H] padded; row t predicts `targets[t]`. Last hidden states, any float dtype and stride.
        weight: [V, H], the head's weight. Frozen (`requires_grad=False`): its gradient is not computed.
        targets: [rows] or [batch, length] integer token ids; ignored, and free to hold anything, where masked.
        advantages: one per row, or one per sequence ([batch], or [sequences] with `cu_seqlens`).
        objective: see `Objective`.
        cu_seqlens: [sequences + 1] integer, the boundaries of packed rows; needed by whatever looks at sequences.
        old_logprobs: of the targets under the policy that sampled them, at the same temperature; None: equal to the current ones.
        ref_logprobs: under the reference policy; needed when `objective.kl_coef` is not 0.
        rollout_logprobs: as the rollout engine reported them at the same temperature, NaN where it could not; needed by
            `objective.rollout_correction`, used by `off_policy_threshold`.
        mask: bool or integer, 0 where a row does not count (prompt, tool output, padding). A masked row changes nothing, NaN or not.
        counts: what the loss is divided by, over all pieces of the optimiser step; None: this call's rows are all there is.
        sequence_lengths: [sequences] integer, each sequence's tokens that count, for aggregation "sequence" when parts of a sequence are in
            other calls; None: all of them are in this one.
        bias: [V], the head's bias.
        temperature: the logits are divided by it, in float32; one number, or one per row.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature (Gemma 2).
        support: [rows, K] or [batch, length, K] integer, the tokens that a sampler with top-k, top-p or min-p could draw at each row, -1
            where fewer than K: log-probabilities and entropies are then over these and the target alone, as the sampler's were.
        entropy_threshold: for `objective.top_entropy`, from `top_entropy_threshold` over the whole step; None: over this call's rows.
        group: the vocabulary is split over this process group: `weight` and `bias` are this process's rows of it, in rank order, and all
            other arguments the same on every process. The gradient of `hidden` is then the whole one on every process.
        backend: "auto", "cpu", "triton" or "torch"; see `backends()`.

    Returns:
        GRPOLoss.

    Raises:
        ValueError, TypeError: before any work, naming the argument, what was given and what is allowed.
        RuntimeError: in backward, when a second derivative is asked for, or a second backward without retain_graph in the first.

    Source: `Objective` names the papers; see `grpo_kernels.head_pass` for the anchored softmax.
    """
    inputs = LossInputs(
        objective=objective, advantages=advantages, cu_seqlens=cu_seqlens, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs, mask=mask, counts=counts, sequence_lengths=sequence_lengths, entropy_threshold=entropy_threshold,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        from grpo_kernels.compiled import compiled_linear_grpo_loss  # the custom ops exist only where torch.compile is used

        return compiled_linear_grpo_loss(hidden, weight, bias, targets, inputs, temperature, softcap, support, group, backend)
    check_head(hidden, weight, targets, bias, softcap)
    check_support(support, group)
    head = Head.of(weight, bias, softcap, group)
    job = LossJob.of(hidden.dtype, targets, inputs, temperature, support, head, select_backend(backend, hidden.device))
    wanted = Wanted.by(hidden, weight, bias, entropy=objective.entropy_coef != 0)
    return GRPOLoss(*_LinearGRPO.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, job, wanted))


@dataclass(frozen=True)
class LossJob:
    """The rows of the loss, what the head is asked for in them, and how it is computed."""

    rows: LossRows
    head_rows: HeadRows
    head: Head
    backend: Backend

    @classmethod
    def of(
        cls, hidden: torch.dtype, targets: Tensor, inputs: LossInputs, temperature: float | Tensor, support: Tensor | None, head: Head,
        backend: Backend,
    ) -> LossJob:  # fmt: skip
        """`hidden`: the dtype of the hidden states."""
        rows = backend.prepared(LossRows.of(targets, inputs), working_dtype(hidden, head.weight.dtype))
        return cls(rows, HeadRows.of(rows.index, head.vocabulary, targets, temperature, support), head, backend)


class _LinearGRPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: LossJob, wanted: Wanted) -> tuple[Tensor, ...]:
        outcome = compute(hidden, job, wanted)
        ctx.gradients, ctx.backend = outcome.gradients, job.backend
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(*outcome.fields)
        return outcome.loss, *outcome.fields

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, keep = take_gradients(ctx, "linear_grpo_loss")
        scaled = [
            None if g is None else ctx.backend.scaled(g, upstream, dtype, in_place=not keep)
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def take_gradients(ctx: Any, name: str) -> tuple[Any, bool]:
    """What a forward left in `ctx.gradients`, and whether it must stay for a second backward. Otherwise it may be scaled in place and given
    away, which saves a copy of [V, H].

    Raises:
        RuntimeError: a second derivative, or a second backward without retain_graph in the first.
    """
    if torch.is_grad_enabled():  # only under create_graph=True; a constant gradient would be silently wrong there
        raise RuntimeError(f"{name} has no second derivative; call backward without create_graph=True")
    if ctx.gradients is None:
        raise RuntimeError(f"{name}: a second backward needs retain_graph=True in the first")
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    gradients = ctx.gradients
    if not keep:
        ctx.gradients = None
    return gradients, keep


@dataclass
class Outcome:
    """`fields`: those of GRPOLoss after `loss`, in order. `gradients`: of hidden [N, H], weight and bias, or None."""

    loss: Tensor
    fields: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]


def compute(hidden: Tensor, job: LossJob, wanted: Wanted) -> Outcome:
    """The whole pass, without autograd: `hidden` is [N, H]."""
    head, count = job.head, job.head_rows.targets.numel()
    dtype = working_dtype(hidden.dtype, head.weight.dtype)
    with torch.no_grad(), exact_products(hidden.device):
        chunks = _Chunks(
            hidden=hidden,
            job=job,
            head_pass=pass_for(job.head_rows, head, job.backend, hidden.dtype, wanted),
            logprobs=torch.zeros(count, dtype=dtype, device=hidden.device),
            entropy=torch.zeros(count, dtype=dtype, device=hidden.device),
            hidden_gradient=torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if wanted.hidden else None,
        )
        rows = chunks.run(gradients=wanted.any)
        job.backend.release()
        loss, tokens = rows.value(chunks.logprobs, chunks.entropy)
        if chunks.hidden_gradient is not None and head.slice is not None:
            head.slice.sum(chunks.hidden_gradient)
    per_row = rows.fields(chunks.logprobs, chunks.entropy, tokens)
    return Outcome(loss, tuple(per_row[name] for name in PER_ROW), (chunks.hidden_gradient, *chunks.head_pass.parameter_gradients()))


Slopes = Callable[[Tensor, Any], Tensor]  # of rows [n] and their chunk: d loss / d logp, [n]


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a job, and in which order they go through the head. `logprobs` and `entropy` [n] are filled, and `hidden_gradient`
    [N, H] where wanted."""

    hidden: Tensor
    job: LossJob
    head_pass: RowPass
    logprobs: Tensor
    entropy: Tensor
    hidden_gradient: Tensor | None

    def run(self, *, gradients: bool) -> LossRows:
        """Returns the job's rows, with the entropy threshold where it is found here."""
        rows = self.job.rows
        everything = slice(0, rows.index.numel())
        if rows.picks_by_entropy:
            # The threshold is a quantile over all rows, so their entropies come first; then only rows that it leaves need a gradient.
            self._forward(everything)
            rows = rows.picked(self.entropy)
            if gradients:
                self._backward(rows, everything)
        elif not gradients:
            self._forward(everything)
        elif rows.couples_tokens and rows.slopes_are_known:
            # The first update on a batch: every ratio is 1 whatever the log-probabilities are, and so is every slope; the zeros that
            # stand for them are replaced chunk by chunk.
            self._backward(rows, everything, forward=True)
        elif rows.couples_tokens:
            for piece in whole_sequences(rows.sequence_of_row, self.head_pass.rows_per_chunk):
                if not self._at_once(rows, piece):
                    self._forward(piece)
                    self._backward(rows, piece)
        else:
            self._sweep(everything, lambda at, chunk: rows.take(at).slopes(chunk.logprobs, chunk.entropy))
        return rows

    def _at_once(self, rows: LossRows, piece: slice) -> bool:
        """Forward and backward of whole sequences in one chunk. False, with nothing done, where they are longer than a chunk or a row is
        extreme: the log-probabilities, and then the slopes, need a pass of their own."""
        if piece.stop - piece.start > self.head_pass.rows_per_chunk:
            return False
        chunk = self._chunk(piece, gradients=True)
        if chunk.any_extreme:
            return False
        self._write(piece, chunk)
        self._add_gradients(piece, chunk, rows.take(piece).slopes(chunk.logprobs, chunk.entropy))
        return True

    def _forward(self, piece: slice) -> None:
        """Log-probabilities and entropies of a piece of any size."""
        self._sweep(piece, None)

    def _backward(self, rows: LossRows, piece: slice, *, forward: bool = False) -> None:
        """The slopes of a piece of any size at once, from the log-probabilities that are there, then its gradients; rows without slopes
        are left out. `forward`: the slopes do not depend on the log-probabilities, which are written here, of all rows."""
        whole = rows.take(piece)
        slopes = whole.slopes(self.logprobs[piece], self.entropy[piece])
        moves = (slopes != 0) | (whole.bonus != 0) | forward
        # Otherwise not written again: other chunks round otherwise, and an entropy could fall below the threshold that it was.
        self._sweep(moves.nonzero()[:, 0] + piece.start, lambda at, chunk: slopes[at - piece.start], write=forward)

    def _sweep(self, rows: slice | Tensor, slopes: Slopes | None, *, write: bool = True) -> None:
        """Some rows through the head, with their gradients where `slopes` is given."""
        places = rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop, device=self.hidden.device)

        def part(at: Tensor, anchor: Anchor) -> tuple[Tensor, Flag]:
            chunk = self._chunk(at, gradients=slopes is not None, anchor=anchor)
            if write:
                self._write(at, chunk)
            if slopes is not None:
                self._add_gradients(at, chunk, slopes(at, chunk))
            return chunk.extreme, chunk.any_extreme

        in_chunks(places, self.head_pass.rows_per_chunk, part)

    def _chunk(self, at: slice | Tensor, *, gradients: bool, anchor: Anchor = "target") -> Any:
        rows = self.job.rows.index[at]
        return self.head_pass.forward(self.hidden[rows], self.job.head_rows[at], gradients=gradients, anchor=anchor)

    def _write(self, at: slice | Tensor, chunk: Any) -> None:
        self.logprobs[at], self.entropy[at] = chunk.logprobs, chunk.entropy

    def _add_gradients(self, at: slice | Tensor, chunk: Any, slopes: Tensor) -> None:
        gradient = self.head_pass.backward(chunk, slopes, -self.job.rows.bonus[at].to(slopes.dtype))
        if self.hidden_gradient is not None and gradient is not None:
            self.hidden_gradient[self.job.rows.index[at]] = gradient


def whole_sequences(sequence_of_row: Tensor, most: int) -> Iterator[slice]:
    """Pieces of [0, rows) cut at the ends of sequences, of at most `most` rows where a sequence is not longer."""
    lengths = torch.unique_consecutive(sequence_of_row, return_counts=True)[1].tolist()
    begin = end = 0
    for length in lengths:
        if end > begin and end + length - begin > most:
            yield slice(begin, end)
            begin = end
        end += length
    if end > begin:
        yield slice(begin, end)
