"""Row kernels: one program per row of given logits, or of a chunk's products h W^T. The mathematics are `grpo_kernels.head_pass`'s.

Distances to a row's offset become sums of their exponentials, and with the sums known `_logit_gradient` makes the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.objective import Objective
from grpo_kernels.softmax import MIN_ANCHORED_LOGPROB
from grpo_kernels.token_batch import TokenLoss
from grpo_kernels.triton_kernels.objective import token_settings, token_terms
from grpo_kernels.triton_kernels.runtime import DOUBLE_TOO, FAR, FLOAT, FUSED, INDEX, INTERPRETED, LOG2E, NEAR, expect, on, stored

_LOGITS = (torch.float16, torch.bfloat16, torch.float32)
_EXTREME = tl.constexpr(-MIN_ANCHORED_LOGPROB)
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E_LOW = tl.constexpr(1.4426950408889634 - 1.44269502162933349609375)  # what float32 leaves of log2(e)


@triton.jit
def _log1p(x):
    """Goldberg's: the rounding of 1 + x is divided out again, so that small x keep their digits. Large ones would only be rounded more."""
    rounded = 1.0 + x
    log = tl.log(rounded)
    return tl.where(rounded == 1.0, x, tl.where(x < 1.0, log * (x / (rounded - 1.0)), log))


@triton.jit
def _tanh(x):
    """Within 2 units in the last place: near 0, where 1 - 2 / (e^2x + 1) has no digits left, the polynomial of Cephes' tanhf."""
    square = x * x
    series = -5.70498872745e-3
    series = series * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * square * series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def _row_start(row, length, outer_stride, inner_stride, WIDTH: tl.constexpr):
    """The element at which `row` of [batch, length, V] begins; the launcher knows it for a multiple of WIDTH."""
    start = (row // length).to(tl.int64) * outer_stride + (row % length).to(tl.int64) * inner_stride
    return tl.multiple_of(start, WIDTH)


@triton.jit
def _put(x, value, target, begin, BLOCK: tl.constexpr):
    """The block `x` of columns from `begin` on with `value` at the target. One block of many has it: the others skip the comparisons."""
    if (target >= begin) & (target < begin + BLOCK):
        x = tl.where(begin + tl.arange(0, BLOCK) == target, value, x)
    return x


@triton.jit
def _bounded(distance):
    """At least FAR; a NaN passes through."""
    return tl.maximum(distance, FAR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp(x, dtype: tl.constexpr):
    """exp of finite or NaN `x`, for a row of `dtype`: of float32, what rounding x log2(e) lost (1e-6 of the result at 30) is put back."""
    power = x * LOG2E
    result = tl.exp2(power)
    if dtype == tl.float32:
        if INTERPRETED:  # whose fma rounds twice
            lost = (x.to(tl.float64) * LOG2E - power.to(tl.float64)).to(tl.float32)
        else:
            lost = tl.fma(x, _LOG2E_LOW, tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), -power))
        result += result * (lost * _LN2)
    return result


@triton.jit
def _logit_gradient(x, offset, log_total, slope, entropy_slope, ENTROPY: tl.constexpr, dtype: tl.constexpr):
    """p (slope + entropy_slope log p) with p = exp(x - offset - log_total), to be stored in `dtype`."""
    log_p = _bounded((x - offset) - log_total)  # two steps, for the offset may be large
    factor = slope
    if ENTROPY:
        factor = slope + entropy_slope * log_p
    return _exp(log_p, dtype) * factor


@triton.jit
def _sums(row, vocabulary, target, inverse, offset, EVICTION: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over all columns but the target of exp(x - offset) and exp(x - offset) (x - offset), float64. Of an extreme row: anything."""
    others = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < vocabulary, other=-float("inf"), eviction_policy=EVICTION).to(tl.float32) * inverse
        distance = _put(_bounded(x - offset), FAR, target, begin, BLOCK)
        exponential = _exp(distance, row.dtype.element_ty)
        others += exponential
        weighted += exponential * distance
    if row.dtype.element_ty == tl.float32:  # the sums of lanes, once per row; half precision has no digits that would gain
        return tl.sum(others.to(tl.float64)), tl.sum(weighted.to(tl.float64))
    return tl.sum(others).to(tl.float64), tl.sum(weighted).to(tl.float64)


@triton.jit
def _maximum(row, vocabulary, inverse, EVICTION: tl.constexpr, BLOCK: tl.constexpr):
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < vocabulary, other=-float("inf"), eviction_policy=EVICTION).to(tl.float32)
        largest = tl.maximum(largest, x * inverse)
    return tl.max(largest)


@triton.jit
def _statistics_of(row, vocabulary, target, inverse, EVICTION: tl.constexpr, BLOCK: tl.constexpr):
    """`grpo_kernels.softmax.Statistics` of a row, in float32, and its offset."""
    target_logit = tl.load(row + target).to(tl.float32) * inverse
    offset = target_logit
    others, weighted = _sums(row, vocabulary, target, inverse, offset, EVICTION, BLOCK)
    if not (_log1p(others.to(tl.float32)) <= _EXTREME):  # infinity and NaN included; NaN stays one
        offset = _maximum(row, vocabulary, inverse, EVICTION, BLOCK)
        others, weighted = _sums(row, vocabulary, target, inverse, offset, EVICTION, BLOCK)
    distance = target_logit - offset
    own = tl.exp(distance)
    total = others + own
    near = distance > -1.0
    # Of a likely target log(total) would have no digits left, and with it the entropy.
    surprise = _log1p((others / own).to(tl.float32))
    log_total = tl.where(near, distance + surprise, tl.log(total.to(tl.float32)))
    logp = tl.where(near, -surprise, distance - log_total)
    # Both terms of the entropy may be ten times their difference: in float64, for a few scalars.
    mean = (weighted + tl.where(own > 0.0, own * distance, 0.0)) / total
    entropy = (log_total - mean).to(tl.float32)
    return logp, tl.where(entropy < 0.0, 0.0, entropy), (others / total).to(tl.float32), log_total, offset


@triton.jit
def _store_statistics(statistics, slot, count, logp, entropy, complement, log_total, offset):
    tl.store(statistics + slot, logp)
    tl.store(statistics + count + slot, entropy)
    tl.store(statistics + 2 * count + slot, complement)
    tl.store(statistics + 3 * count + slot, log_total)
    tl.store(statistics + 4 * count + slot, offset)


@triton.jit
def _write_gradient(
    row, out, vocabulary, target, inverse, logp, entropy, complement, log_total, offset, slope, entropy_slope,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`out` may be `row`: an element is read by the thread that overwrites it, and by no other."""
    at_target = slope * complement
    base = slope
    if ENTROPY:
        at_target -= entropy_slope * tl.exp(logp) * (_bounded(logp) + entropy)
        base = slope + entropy_slope * entropy
    at_target *= inverse
    by_log_p = -inverse * entropy_slope
    base *= -inverse
    last = (tl.cdiv(vocabulary, BLOCK) - 1) * BLOCK
    for back in range(0, vocabulary, BLOCK):  # from the end, which was read last and is in the L2 cache if anything is
        begin = last - back
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(row + columns, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(tl.float32) * inverse
        gradient = _put(
            _logit_gradient(x, offset, log_total, base, by_log_p, ENTROPY, row.dtype.element_ty), at_target, target, begin, BLOCK
        )
        tl.store(out + columns, stored(gradient, out.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def _write_zeros(out, vocabulary, BLOCK: tl.constexpr):
    for begin in range(0, vocabulary, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        tl.store(out + columns, tl.zeros([BLOCK], out.dtype.element_ty), mask=columns < vocabulary, eviction_policy="evict_first")


@triton.jit
def _logit(product, columns, vocabulary, bias, softcap, inverse):
    """(x, 1 - tanh^2) of products z; dx / dz is the second / T, and without a soft cap that is 1."""
    if bias is not None:
        product += tl.load(bias + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)
    if softcap is not None:
        tanh = _tanh(product * (1.0 / softcap))
        return tanh * softcap * inverse, 1.0 - tanh * tanh
    return product * inverse, tl.full(product.shape, 1.0, tl.float32)


@triton.jit
def _inside(x, outside, vocabulary, begin, BLOCK: tl.constexpr):
    """The block `x` of columns from `begin` on with `outside` in those beyond the vocabulary."""
    if begin + BLOCK > vocabulary:
        x = tl.where(begin + tl.arange(0, BLOCK) < vocabulary, x, outside)
    return x


# No variants by the number of rows. Of the sizes and strides only WIDTH matters, and the tensors of one element per row are slices of
# common buffers, which are aligned where that number happens to be a multiple of 4.
_SIZES = ["vocabulary", "length", "outer_stride", "inner_stride", "out_outer_stride", "out_inner_stride", "count"]
_PER_ROW = [
    "slots", "targets", "inverse_temperature", "statistics", "slopes", "entropy_slopes", "old_logprobs", "ref_logprobs", "advantages",
    "policy_weights", "entropy_threshold", "shares", "bonus", "values", "flags", "offsets", "log_totals", "target_gradients", "others_out",
    "weighted_out",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_PER_ROW)
def _row_statistics_kernel(
    logits, slots, targets, inverse_temperature, statistics, vocabulary, length, outer_stride, inner_stride, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        vocabulary = vocabulary // WIDTH * WIDTH  # the same number, now known for a multiple
        start = logits + _row_start(row, length, outer_stride, inner_stride, WIDTH)
        target = tl.load(targets + slot).to(tl.int32)
        inverse = tl.load(inverse_temperature + slot)
        logp, entropy, complement, log_total, offset = _statistics_of(start, vocabulary, target, inverse, "evict_first", BLOCK)
        _store_statistics(statistics, slot, count, logp, entropy, complement, log_total, offset)


def row_statistics(logits: Tensor, slots: Tensor, targets: Tensor, inverse_temperature: Tensor) -> Tensor:
    """[5, n] float32: log-probability of the target, entropy, 1 - p_y, logarithm of the sum, offset.

    Args:
        logits: [rows, V] or [batch, length, V], float16, bfloat16 or float32, of any strides but the last, which is 1.
        slots: [rows] or [batch * length] int64, each row's place in the [n] tensors; -1: the row does not count and is never read.
        targets: [n] int64.
        inverse_temperature: [n] float32.
    """
    count = targets.numel()
    rows = _Rows.of(logits)
    _expect_rows(logits, rows, slots, targets, inverse_temperature)
    statistics = torch.empty(5, count, dtype=torch.float32, device=logits.device)
    if targets.numel():
        # Of float32, 8 warps would hold twice the bytes, and the float64 of their lanes' sums: Triton 3.6 spills.
        warps = 16 if logits.dtype == torch.float32 else 8
        with on(logits.device):
            _row_statistics_kernel[(rows.count,)](
                logits, slots, targets, inverse_temperature, statistics, logits.shape[-1], rows.length, rows.outer_stride,
                rows.inner_stride, targets.numel(), WIDTH=rows.width, **_shape(logits.shape[-1], warps=warps),
            )  # fmt: skip
    return statistics


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_PER_ROW)
def _row_gradient_kernel(
    logits, out, slots, targets, inverse_temperature, statistics, slopes, entropy_slopes, vocabulary, length, outer_stride, inner_stride,
    out_outer_stride, out_inner_stride, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    vocabulary = vocabulary // WIDTH * WIDTH
    out_start = out + _row_start(row, length, out_outer_stride, out_inner_stride, WIDTH)
    slope = 0.0
    entropy_slope = 0.0
    logp = 0.0
    if slot >= 0:
        slope = tl.load(slopes + slot)
        logp = tl.load(statistics + slot)
        if entropy_slopes is not None:
            entropy_slope = tl.load(entropy_slopes + slot)
    # A NaN log-probability has slope 0 where its loss was clamped, and must not look like a row without gradient.
    if (slope != 0.0) | (entropy_slope != 0.0) | (logp != logp):
        start = logits + _row_start(row, length, outer_stride, inner_stride, WIDTH)
        _write_gradient(
            start, out_start, vocabulary, tl.load(targets + slot).to(tl.int32), tl.load(inverse_temperature + slot), logp,
            tl.load(statistics + count + slot), tl.load(statistics + 2 * count + slot), tl.load(statistics + 3 * count + slot),
            tl.load(statistics + 4 * count + slot), slope, entropy_slope, entropy_slopes is not None, BLOCK,
        )  # fmt: skip
    else:
        _write_zeros(out_start, vocabulary, BLOCK)


def row_gradient(
    logits: Tensor, slots: Tensor, targets: Tensor, inverse_temperature: Tensor, statistics: Tensor, slope: Tensor,
    entropy_slope: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """The gradient of the logits over `out`: the logits themselves, or a tensor of their shape and dtype. Every row of it is written.

    `statistics` and the arguments before are those of `row_statistics`; `slope` and `entropy_slope` [n] float32 the gradients of the
    log-probabilities and the entropies. Rows that do not count, or have none, get exact zeros.
    """
    rows, out_rows = _Rows.of(logits), _Rows.of(out)
    _expect_rows(logits, rows, slots, targets, inverse_temperature)
    _expect_place(logits, out)
    expect(logits, (5, targets.numel()), FLOAT, statistics=statistics)
    expect(logits, (targets.numel(),), FLOAT, slope=slope, entropy_slope=entropy_slope)
    if rows.count:
        with on(logits.device):
            _row_gradient_kernel[(rows.count,)](
                logits, out, slots, targets, inverse_temperature, statistics, slope, entropy_slope, logits.shape[-1], rows.length,
                rows.outer_stride, rows.inner_stride, out_rows.outer_stride, out_rows.inner_stride, targets.numel(),
                WIDTH=min(rows.width, out_rows.width), **_shape(logits.shape[-1]),
            )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_PER_ROW)
def _row_loss_kernel(
    logits, out, slots, targets, inverse_temperature, old_logprobs, ref_logprobs, advantages, policy_weights, entropy_threshold, shares,
    bonus, statistics, values, flags, vocabulary, length, outer_stride, inner_stride, out_outer_stride, out_inner_stride, count,
    low, high, max_ratio, tau_pos, tau_neg, kl_coef,
    POLICY: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    HAS_MAX_RATIO: tl.constexpr, KL_RATIO_CORRECTED: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    vocabulary = vocabulary // WIDTH * WIDTH
    moves = False
    if slot >= 0:
        start = logits + _row_start(row, length, outer_stride, inner_stride, WIDTH)
        target = tl.load(targets + slot).to(tl.int32)
        inverse = tl.load(inverse_temperature + slot)
        EVICTION: tl.constexpr = "evict_first" if out is None else "evict_last"
        logp, entropy, complement, log_total, offset = _statistics_of(start, vocabulary, target, inverse, EVICTION, BLOCK)
        _store_statistics(statistics, slot, count, logp, entropy, complement, log_total, offset)
        old = logp
        ref = logp
        threshold = entropy
        if HAS_OLD:
            old = tl.load(old_logprobs + slot)
        if HAS_REF:
            ref = tl.load(ref_logprobs + slot)
        if HAS_THRESHOLD:
            threshold = tl.load(entropy_threshold).to(tl.float32)
        loss, slope, ratio, kl, clipped_low, clipped_high, weight = token_terms(
            logp, entropy, old, ref, tl.load(advantages + slot), tl.load(policy_weights + slot), threshold,
            low, high, max_ratio, tau_pos, tau_neg, kl_coef,
            POLICY, KL, HAS_OLD, HAS_REF, HAS_THRESHOLD, HAS_MAX_RATIO, KL_RATIO_CORRECTED,
        )  # fmt: skip
        tl.store(values + slot, loss)
        tl.store(values + count + slot, ratio)
        tl.store(values + 2 * count + slot, kl)
        tl.store(values + 3 * count + slot, weight)
        tl.store(values + 4 * count + slot, 1.0)  # rollout_ratio: no correction is left where `computes`
        tl.store(flags + slot, clipped_low)
        tl.store(flags + count + slot, clipped_high)
        if out is not None:
            slope *= tl.load(shares + slot).to(tl.float32)
            entropy_slope = 0.0
            if ENTROPY:
                entropy_slope = -tl.load(bonus + slot).to(tl.float32)
            moves = (slope != 0.0) | (entropy_slope != 0.0) | (logp != logp)
            if moves:
                # In place. All warps have read the row, and used its target's logit, before the barriers inside the reductions; that
                # these have barriers is Triton's affair, and without one a warp could overwrite what another is about to read.
                tl.debug_barrier()
                out_start = out + _row_start(row, length, out_outer_stride, out_inner_stride, WIDTH)
                _write_gradient(
                    start, out_start, vocabulary, target, inverse, logp, entropy, complement, log_total, offset, slope, entropy_slope,
                    ENTROPY, BLOCK,
                )  # fmt: skip
    if out is not None:  # noqa: SIM102  (the compiler leaves out what a None decides; not so with `and`)
        if not moves:
            _write_zeros(out + _row_start(row, length, out_outer_stride, out_inner_stride, WIDTH), vocabulary, BLOCK)


def row_loss(
    logits: Tensor, slots: Tensor, targets: Tensor, inverse_temperature: Tensor, objective: Objective, *, advantages: Tensor,
    policy_weight: Tensor, old_logprobs: Tensor | None, ref_logprobs: Tensor | None, entropy_threshold: Tensor | None, shares: Tensor,
    bonus: Tensor, out: Tensor | None,
) -> tuple[Tensor, TokenLoss]:  # fmt: skip
    """`row_statistics`, the objective, and with `out` the gradient of sum(shares * loss) - sum(bonus * entropy), in one launch.

    Two reads of a row, the second from the L2 cache where it is still there, and one write. An objective that `computes`.

    Args:
        logits, slots, targets, inverse_temperature: of `row_statistics`.
        advantages, policy_weight, old_logprobs, ref_logprobs: [n] float32, as in `TokenBatch`. entropy_threshold: a scalar tensor.
        shares, bonus: [n] float64 or float32. bonus is read only with `objective.entropy_coef`.
        out: of `row_gradient`, or None: no gradient.

    Returns:
        The statistics [5, n], and the TokenLoss of `Objective.evaluate`, all of it detached.
    """
    count = targets.numel()
    statistics, values = torch.empty(10, count, dtype=torch.float32, device=logits.device).split(5)
    flags = torch.empty(2, count, dtype=torch.bool, device=logits.device)
    rows = _Rows.of(logits)
    out_rows = rows if out is None else _Rows.of(out)
    _expect_rows(logits, rows, slots, targets, inverse_temperature)
    if out is not None:
        _expect_place(logits, out)
    expect(
        logits, (count,), FLOAT, advantages=advantages, policy_weight=policy_weight, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs
    )
    expect(logits, (count,), DOUBLE_TOO, shares=shares, bonus=bonus)
    if rows.count and (count or out is not None):
        settings = token_settings(
            objective, old=old_logprobs is not None, ref=ref_logprobs is not None, threshold=entropy_threshold is not None
        )
        # 16 warps of 4096 elements: two rows at a time per multiprocessor (64 registers a thread), of which about a half each, what is
        # read and not yet read again, fits the L2 cache. With 8 warps it would be four or more rows.
        with on(logits.device):
            _row_loss_kernel[(rows.count,)](
                logits, out, slots, targets, inverse_temperature, old_logprobs, ref_logprobs, advantages, policy_weight, entropy_threshold,
                shares, bonus, statistics, values, flags, logits.shape[-1], rows.length, rows.outer_stride, rows.inner_stride,
                out_rows.outer_stride, out_rows.inner_stride, count, **settings, ENTROPY=objective.entropy_coef != 0,
                WIDTH=min(rows.width, out_rows.width), **_shape(logits.shape[-1], warps=16),
            )  # fmt: skip
    loss, ratio, kl, weight, rollout_ratio = values
    return statistics, TokenLoss(loss, ratio, kl, flags[0], flags[1], rollout_ratio, weight)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _anchor_rows_kernel(
    products, out, targets, inverse_temperature, offsets, bias, softcap, others_out, weighted_out, vocabulary, padded, out_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int32)
    inverse = tl.load(inverse_temperature + row)
    offset = tl.load(offsets + row)
    others = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, padded, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        product = tl.load(products + row * padded + columns, mask=columns < padded, other=0.0, eviction_policy="evict_first")
        x, _ = _logit(product, columns, vocabulary, bias, softcap, inverse)
        distance = tl.minimum(x - offset, NEAR, propagate_nan=tl.PropagateNan.ALL)
        distance = _put(_bounded(distance), FAR, target, begin, BLOCK)
        distance = _inside(distance, FAR, vocabulary, begin, BLOCK)
        exponential = _exp(distance, tl.float32)
        others += exponential
        weighted += exponential * distance
        if out is not None:
            _store_over(out + row * out_stride, columns, exponential, padded)
    tl.store(others_out + row, tl.sum(others))
    tl.store(weighted_out + row, tl.sum(weighted))


@triton.jit
def _store_over(out, columns, x, padded):
    """A block of a row over the float32 that it was made of; blocks go upwards.

    Element j of a narrower type lies over float32 element j / 2: in this block or one before. The barrier lets no warp store until every
    warp has read this block, and so all before it. What is stored reaches no block that is yet to be read, for j / 2 <= j.
    """
    if out.dtype.element_ty.primitive_bitwidth < 32:
        tl.debug_barrier()
    tl.store(out + columns, stored(x, out.dtype.element_ty), mask=columns < padded, eviction_policy="evict_first")


def anchor_rows(
    products: Tensor, vocabulary: int, targets: Tensor, inverse_temperature: Tensor, offset: Tensor, *, bias: Tensor | None,
    softcap: float | None, store: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Sweep.others` and `Sweep.weighted`, [n] float32, of a chunk's products; with `store` also the exponentials, in place.

    An extreme row is not redone: its `others` are finite and at least e^60, or NaN.

    Args:
        products: [n, padded] contiguous float32, padded >= `vocabulary` a multiple of 64; the columns between hold anything.
        targets: [n] int64, -1: another process has it.
        inverse_temperature, offset: [n] float32.
        bias: [vocabulary], or None.
        store: float32 or bfloat16: `products.view(store)[:, :padded]` are exp(x - offset) afterwards, 0 at the target and outside the
            vocabulary. None: `products` stay.
    """
    _expect_products(products, vocabulary, targets, bias, inverse_temperature=inverse_temperature, offset=offset)
    others, weighted = torch.empty(2, products.shape[0], dtype=torch.float32, device=products.device)
    if products.shape[0]:
        out = None if store is None else products.view(store)
        with on(products.device):
            _anchor_rows_kernel[(products.shape[0],)](
                products, out, targets, inverse_temperature, offset, bias, _float(softcap), others, weighted, vocabulary, products.shape[1],
                0 if out is None else out.shape[1], **_shape(products.shape[1]),
            )  # fmt: skip
    return others, weighted


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _products_gradient_kernel(
    products, out, targets, inverse_temperature, offsets, log_totals, slopes, entropy_slopes, target_gradients, bias, softcap, vocabulary,
    padded, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int32)
    inverse = tl.load(inverse_temperature + row)
    offset = tl.load(offsets + row)
    log_total = tl.load(log_totals + row)
    slope = tl.load(slopes + row)
    entropy_slope = tl.load(entropy_slopes + row)
    target_gradient = tl.load(target_gradients + row)
    for begin in range(0, padded, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        product = tl.load(products + row * padded + columns, mask=columns < padded, other=0.0, eviction_policy="evict_first")
        x, by_cap = _logit(product, columns, vocabulary, bias, softcap, inverse)
        gradient = _logit_gradient(
            x, offset, log_total, -inverse * slope, -inverse * entropy_slope, ENTROPY=True, dtype=out.dtype.element_ty
        )
        gradient *= by_cap
        gradient = _inside(_put(gradient, target_gradient, target, begin, BLOCK), 0.0, vocabulary, begin, BLOCK)
        _store_over(out + row * out_stride, columns, gradient, padded)


def products_gradient(
    products: Tensor, vocabulary: int, targets: Tensor, inverse_temperature: Tensor, offset: Tensor, log_total: Tensor, slope: Tensor,
    entropy_slope: Tensor, target_gradient: Tensor, *, bias: Tensor | None, softcap: float | None, store: torch.dtype,
) -> None:  # fmt: skip
    """The gradient of a chunk's products in place, in `store`; the arguments are those of `anchor_rows` and of `LogitSlopes`."""
    _expect_products(
        products, vocabulary, targets, bias, inverse_temperature=inverse_temperature, offset=offset, log_total=log_total, slope=slope,
        entropy_slope=entropy_slope, target_gradient=target_gradient,
    )  # fmt: skip
    if products.shape[0]:
        out = products.view(store)
        with on(products.device):
            _products_gradient_kernel[(products.shape[0],)](
                products, out, targets, inverse_temperature, offset, log_total, slope, entropy_slope, target_gradient, bias,
                _float(softcap), vocabulary, products.shape[1], out.shape[1], **_shape(products.shape[1]),
            )  # fmt: skip


def _float(softcap: float | None) -> float | None:
    """Of an int Triton would compile the value in, and a number of numpy's it does not take."""
    return None if softcap is None else float(softcap)


def _expect_rows(logits: Tensor, rows: _Rows, slots: Tensor, targets: Tensor, inverse_temperature: Tensor) -> None:
    if logits.dtype not in _LOGITS or logits.dim() not in (2, 3) or logits.stride(-1) != 1:
        raise ValueError(
            f"a Triton kernel got logits of {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; "
            "it takes float16, bfloat16 or float32 [rows, V] or [batch, length, V] with last stride 1"
        )
    expect(logits, (rows.count,), INDEX, slots=slots)
    expect(logits, (targets.numel(),), INDEX, targets=targets)
    expect(logits, (targets.numel(),), FLOAT, inverse_temperature=inverse_temperature)


def _expect_place(logits: Tensor, out: Tensor) -> None:
    if out.shape != logits.shape or out.dtype != logits.dtype or out.device != logits.device or out.stride(-1) != 1:
        raise ValueError(
            f"a Triton kernel got out of {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}; "
            f"it takes {logits.dtype} {tuple(logits.shape)} with last stride 1 on {logits.device}"
        )


def _expect_products(products: Tensor, vocabulary: int, targets: Tensor, bias: Tensor | None, **per_row: Tensor) -> None:
    rows, padded = products.shape
    expect(products, (rows, max(padded, vocabulary)), FLOAT, products=products)
    expect(products, (rows,), INDEX, targets=targets)
    expect(products, (rows,), FLOAT, **per_row)
    expect(products, (vocabulary,), (*_LOGITS, torch.float64), bias=bias)


@dataclass(frozen=True)
class _Rows:
    """Where the `count` rows of [rows, V] or [batch, length, V] are. `width`: a row's begin and length are multiples of so many elements,
    16 bytes where they can be: a vector load."""

    count: int
    length: int
    outer_stride: int
    inner_stride: int
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        length = max(tensor.shape[-2], 1)
        outer = tensor.stride(0) if tensor.dim() == 3 and tensor.shape[0] > 1 else 0
        inner = tensor.stride(-2) if length > 1 else 0
        size = tensor.element_size()
        aligned = all(n * size % 16 == 0 for n in (outer, inner, tensor.shape[-1])) and tensor.data_ptr() % 16 == 0
        return cls(tensor.shape[:-1].numel(), length, outer, inner, 16 // size if aligned else 1)


def _shape(vocabulary: int, *, warps: int = 8) -> dict[str, Any]:
    """At least one element per thread, so that no two threads hold the same one, and at most as many as their registers hold."""
    if vocabulary <= 4096:
        return {"BLOCK": 1024, "num_warps": 4, **FUSED}
    return {"BLOCK": 4096, "num_warps": warps, **FUSED}
