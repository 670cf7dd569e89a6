"""Correctness of every Triton launcher, and of the operators on top of them, against float64 on the device where they run.

Each `check_*` computes one result after the other from a `Case` and gives it to a `Judge`. `grpo_kernels.reference` is the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import traffic_model
from contenders import relative_error
from torch import Tensor

from grpo_kernels import Objective, TokenBatch, group_advantages, grpo_loss, linear_grpo_loss, linear_logprobs, selected_logprobs
from grpo_kernels.reference import reference_grpo_loss, reference_logprobs
from grpo_kernels.token_batch import TokenLoss
from grpo_kernels.triton_kernels import advantages, anchored_gemm, objective, rows
from grpo_kernels.triton_kernels import targets as target_rows

BACKEND = "triton"
# Upper bounds of what a case holds at a time, per weight and per logit: the weight in float64, its gradient and what is added to that,
# beside the case's own and ours; the logits in float64 in a dozen versions.
BYTES_PER_WEIGHT, BYTES_PER_LOGIT = 36, 100
PIECE = 64  # rows whose float64 logits are there at a time
OBJECTIVES = {"dapo + kl": Objective.dapo(kl_coef=0.04), "dapo + entropy": Objective.dapo(entropy_coef=0.01)}
Shape = tuple[int, int, int]  # N, H, V


def bytes_needed(shape: Shape) -> int:
    N, H, V = shape
    return BYTES_PER_WEIGHT * V * H + BYTES_PER_LOGIT * N * V


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat16", "bf16")


@dataclass(frozen=True)
class Check:
    name: str
    where: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # a NaN does not pass


@dataclass(frozen=True)
class Judge:
    """Compares results with float64, and their errors with those of what torch makes in the same dtype."""

    where: str
    checks: list[Check] = field(default_factory=list)

    def relative(self, name: str, value: Tensor, exact: Tensor, torchs: Tensor, stored: torch.dtype | None = None) -> None:
        """L2, at most twice torch's. In 16 bits (`stored`: in what dtype `value` was) also at most the dtype's unit, for torch's softmax
        of rounded logits is no measure."""
        dtype = stored or value.dtype
        value, exact, torchs = (t.reshape(-1, t.shape[-1]) for t in (value, exact, torchs))
        unit = torch.finfo(dtype).eps
        # A quarter of a unit is the rounding of the result itself; in float32 exp's argument, of some 10, is rounded as well.
        allowed = 2 * max(relative_error(torchs, exact), unit / 4, 5e-7)
        self.checks.append(Check(name, self.where, relative_error(value, exact), allowed if dtype == torch.float32 else min(allowed, unit)))

    def absolute(self, name: str, value: Tensor, exact: Tensor, torchs: Tensor) -> None:
        """Largest difference, at most twice that of torch's from float32 logits; 2e-5 is always allowed."""
        theirs = float((torchs.double() - exact.double()).abs().max())
        self.checks.append(Check(name, self.where, float((value.double() - exact.double()).abs().max()), max(2 * theirs, 2e-5)))


@dataclass(frozen=True)
class Case:
    """A random loss: hidden [N, H], weight [V, H], the others [N]. Old and reference log-probabilities lie around the current ones."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor
    mask: Tensor
    temperature: Tensor

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
        """Logits of standard deviation 3, a fifth of the rows masked but never the first."""
        N, H, V = shape
        g = torch.Generator(device).manual_seed(0)
        hidden = (torch.randn(N, H, generator=g, device=device) * 3 / H**0.5).to(dtype)
        weight = torch.randn(V, H, generator=g, device=device).to(dtype)
        targets = torch.randint(0, V, (N,), generator=g, device=device)
        temperature = 0.7 + 0.6 * torch.rand(N, generator=g, device=device)
        mask = torch.rand(N, generator=g, device=device) >= 0.2
        mask[:1] = True
        now = (hidden.double() * weight[targets].double()).sum(1) / temperature - products(hidden, weight, temperature).logsumexp(1)
        old, ref = (now.float() + 0.3 * torch.randn(N, generator=g, device=device) for _ in range(2))
        return cls(hidden, weight, targets, torch.randn(N, generator=g, device=device), old, ref, mask, temperature)

    @classmethod
    def without_head(cls, count: int, V: int, device: torch.device) -> Case:
        """For given logits of standard deviation 3: random targets, all rows count."""
        g = torch.Generator(device).manual_seed(0)
        targets, ones, nothing = torch.randint(0, V, (count,), generator=g, device=device), torch.ones(count, device=device), torch.empty(0)
        typical = -math.log(V) - 4.5  # of a target whose logit is 0
        old, ref = (typical + 0.1 * torch.randn(count, generator=g, device=device) for _ in range(2))
        return cls(nothing, nothing, targets, torch.randn(count, generator=g, device=device), old, ref, ones.bool(), ones)


def products(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """The logits [N, V], by float32 products of the operands as they are."""
    if hidden.device.type == "cuda" and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits.div_(temperature[:, None])


@dataclass(frozen=True)
class Answer:
    """Of the specification: scalar, [N], [N], and what the check asks for."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor


def specification(case: Case, goal: Objective, dtype: torch.dtype, rows_at_once: int) -> Answer:
    """`grpo_kernels.reference` in `dtype`, with autograd, piece by piece."""
    weight = case.weight.detach().to(dtype).requires_grad_()
    losses, logprobs, entropy, gradients = [], [], [], []
    for start in range(0, case.hidden.shape[0], rows_at_once):
        at = slice(start, start + rows_at_once)
        hidden = case.hidden[at].detach().to(dtype).requires_grad_()
        logp, H = reference_logprobs(hidden, weight, case.targets[at], temperature=case.temperature[at].to(dtype))
        loss = _reference_loss(case, goal, logp, H, at)
        if loss.requires_grad:  # not where all rows are masked
            loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        logprobs.append(logp.detach())
        entropy.append(H.detach())
    return Answer(torch.stack(losses).sum(), torch.cat(logprobs), torch.cat(entropy), torch.cat(gradients), weight.grad)


def _reference_loss(case: Case, goal: Objective, logp: Tensor, H: Tensor, at: slice = slice(None)) -> Tensor:
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp, H, A, old, ref = (t.to(dtype) for t in (logp, H, case.advantages[at], case.old[at], case.ref[at]))
    return reference_grpo_loss(
        logp, H, A, objective=goal, sequence_of_row=torch.zeros_like(case.targets[at]), mask=case.mask[at],
        tokens=int(case.mask.sum()), sequences=1, old_logprobs=old, ref_logprobs=ref,
    )  # fmt: skip


def check_linear(judge: Judge, case: Case, goal: Objective) -> None:
    """`linear_grpo_loss` and `linear_logprobs`, by whatever strategy is chosen."""
    exact = specification(case, goal, torch.float64, PIECE)
    eager = specification(case, goal, case.hidden.dtype, case.hidden.shape[0])
    logp, H = _scores(products(case.hidden, case.weight, case.temperature), case.targets)
    hidden, weight = (t.detach().clone().requires_grad_() for t in (case.hidden, case.weight))
    head: dict[str, Any] = {"temperature": case.temperature, "mask": case.mask, "backend": BACKEND}
    loss = linear_grpo_loss(
        hidden, weight, case.targets, case.advantages, objective=goal, old_logprobs=case.old, ref_logprobs=case.ref, **head
    )
    loss.loss.backward()
    at = case.mask
    judge.relative("linear_grpo_loss: d hidden", hidden.grad, exact.hidden_gradient, eager.hidden_gradient)
    judge.relative("linear_grpo_loss: d weight", weight.grad, exact.weight_gradient, eager.weight_gradient)
    judge.absolute("linear_grpo_loss: logp", loss.logprobs[at], exact.logprobs[at], logp[at])
    judge.absolute("linear_grpo_loss: entropy", loss.entropy[at], exact.entropy[at], H[at])
    judge.absolute("linear_grpo_loss: loss", loss.loss.detach(), exact.loss, _reference_loss(case, goal, logp, H))
    with torch.no_grad():
        alone = linear_logprobs(case.hidden, case.weight, case.targets, **head)
    judge.absolute("linear_logprobs: logp", alone.logprobs[at], exact.logprobs[at], logp[at])
    judge.absolute("linear_logprobs: entropy", alone.entropy[at], exact.entropy[at], H[at])


def _scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    distribution = torch.log_softmax(logits, -1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@dataclass(frozen=True)
class LogitsAnswer:
    """Of given logits [N, V]: scalar, [N], [N], [N, V]."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, logits: Tensor, case: Case, goal: Objective, dtype: torch.dtype) -> LogitsAnswer:
        """Softmax and loss in `dtype`, the gradient in that of the logits."""
        leaf = logits.detach().clone().requires_grad_()
        logp, H = _scores(leaf.to(dtype) / case.temperature[:, None].to(dtype), case.targets)
        loss = _reference_loss(case, goal, logp, H)
        loss.backward()
        return cls(loss.detach(), logp.detach(), H.detach(), leaf.grad)


def check_logits(judge: Judge, case: Case, goal: Objective, logits: Tensor) -> None:
    """`grpo_loss` in place and `selected_logprobs`, against the truth from the same, rounded logits."""
    exact = LogitsAnswer.of(logits.double(), case, goal, torch.float64)
    torchs = LogitsAnswer.of(logits, case, goal, torch.float32)
    head: dict[str, Any] = {"temperature": case.temperature, "mask": case.mask, "backend": BACKEND}
    past: dict[str, Any] = {"old_logprobs": case.old, "ref_logprobs": case.ref}
    leaf = logits.detach().clone().requires_grad_()
    loss = grpo_loss(leaf.clone(), case.targets, case.advantages, objective=goal, overwrite_logits=True, **past, **head)
    loss.loss.backward()
    at = case.mask
    judge.relative("grpo_loss in place: d logits", leaf.grad, exact.gradient, torchs.gradient)
    judge.absolute("grpo_loss in place: logp", loss.logprobs[at], exact.logprobs[at], torchs.logprobs[at])
    judge.absolute("grpo_loss in place: loss", loss.loss.detach(), exact.loss, torchs.loss)
    alone = selected_logprobs(logits, case.targets, **head)
    judge.absolute("selected_logprobs: logp", alone.logprobs[at], exact.logprobs[at], torchs.logprobs[at])
    judge.absolute("selected_logprobs: entropy", alone.entropy[at], exact.entropy[at], torchs.entropy[at])


@dataclass(frozen=True)
class RowArguments:
    """What the row kernels are given for the rows of a case that count, [n] each; slots [N]."""

    slots: Tensor
    targets: Tensor
    inverse_temperature: Tensor
    batch: TokenBatch
    shares: Tensor
    bonus: Tensor

    @classmethod
    def of(cls, case: Case, goal: Objective) -> RowArguments:
        at, count = case.mask, int(case.mask.sum())
        ones = torch.ones(count, device=at.device)
        batch = TokenBatch(
            logprobs=case.old[at] + 0.1,
            old_logprobs=case.old[at],
            ref_logprobs=case.ref[at] if goal.kl_coef else None,
            rollout_logprobs=None,
            advantages=case.advantages[at],
            entropy=ones,
            sequence_of_row=torch.zeros_like(case.targets[at]),
            lengths=ones[:1] * count,
            policy_weight=ones,
        )
        slots = torch.where(at, at.cumsum(0) - 1, -1)
        bonus = ones.double() * goal.entropy_coef / count
        return cls(slots, case.targets[at], case.temperature[at].reciprocal(), batch, ones.double() / count, bonus)


def row_statistics(logits: Tensor, given: RowArguments) -> Tensor:
    return rows.row_statistics(logits, given.slots, given.targets, given.inverse_temperature)


def row_loss(logits: Tensor, given: RowArguments, goal: Objective, out: Tensor) -> tuple[Tensor, TokenLoss]:
    names = ("old_logprobs", "ref_logprobs", "advantages", "policy_weight", "entropy_threshold")
    known: dict[str, Any] = {name: getattr(given.batch, name) for name in names} | {"shares": given.shares, "bonus": given.bonus}
    return rows.row_loss(logits, given.slots, given.targets, given.inverse_temperature, goal, out=out, **known)


def check_rows(judge: Judge, case: Case, goal: Objective, logits: Tensor) -> None:
    """The launchers of the row kernel on logits as given; rows that do not count are NaN there, and get zeros."""
    at, given = case.mask, RowArguments.of(case, goal)
    exact = LogitsAnswer.of(logits.double(), case, goal, torch.float64)
    torchs = LogitsAnswer.of(logits, case, goal, torch.float32)
    logits = logits.masked_fill(~at[:, None], math.nan)
    logp, theirs = exact.logprobs[at], torchs.logprobs[at]

    statistics = row_statistics(logits, given)
    judge.absolute("row_statistics: logp", statistics[0], logp, theirs)
    judge.absolute("row_statistics: entropy", statistics[1], exact.entropy[at], torchs.entropy[at])
    judge.absolute("row_statistics: 1 - p", statistics[2], -torch.expm1(logp), -torch.expm1(theirs))

    variable = logp.detach().clone().requires_grad_()
    (goal.evaluate(as_float64(replace(given.batch, logprobs=variable))).loss * given.shares).sum().backward()
    entropy_slope = -given.bonus.float() if goal.entropy_coef else None
    out = torch.full_like(logits, math.nan)
    known = (given.slots, given.targets, given.inverse_temperature, statistics, variable.grad.float(), entropy_slope)
    rows.row_gradient(logits, *known, out)
    judge.relative("row_gradient", out, exact.gradient, torchs.gradient)

    written = logits.clone()
    fused, tokens = row_loss(written, given, goal, written)
    judge.relative("row_loss: d logits, in place", written, exact.gradient, torchs.gradient)
    judge.absolute("row_loss: logp", fused[0], logp, theirs)
    judge.absolute("row_loss: entropy", fused[1], exact.entropy[at], torchs.entropy[at])
    losses = [
        goal.evaluate(replace(given.batch, logprobs=theirs)).loss,
        goal.evaluate(as_float64(replace(given.batch, logprobs=logp))).loss,
    ]
    judge.absolute("row_loss: token losses", tokens.loss, losses[1], losses[0])


def as_float64(batch: TokenBatch) -> TokenBatch:
    floats: dict[str, Any] = {k: v.double() for k, v in vars(batch).items() if isinstance(v, Tensor) and v.is_floating_point()}
    return replace(batch, **floats)


@dataclass(frozen=True)
class Anchored:
    """exp(x - o), 0 at the target, of logits x [n, V] in their dtype; others and weighted: its sums as in `anchor_rows`."""

    exponentials: Tensor
    others: Tensor
    weighted: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, offset: Tensor) -> Anchored:
        distance = logits - offset[:, None].to(logits.dtype)
        exponentials = distance.clamp(max=61).exp().scatter_(1, targets[:, None], 0)
        return cls(exponentials, exponentials.sum(1), (exponentials * distance).sum(1))

    def check(self, judge: Judge, name: str, found: tuple[Tensor, Tensor], kept: Tensor | None, torchs: Anchored) -> None:
        """Each row by its own sum: they differ by orders of magnitude."""
        scale = self.others[:, None]
        if kept is not None:
            judge.relative(name, kept.double() / scale, self.exponentials / scale, torchs.exponentials.to(kept.dtype) / scale, kept.dtype)
        judge.absolute(f"{name}: others", found[0] / self.others, self.others / self.others, torchs.others / self.others)
        scale = self.others + self.weighted.abs()
        judge.absolute(f"{name}: weighted", found[1] / scale, self.weighted / scale, torchs.weighted / scale)


def check_products(judge: Judge, case: Case) -> None:
    """The kernels of a chunk: `anchor_rows` and `products_gradient` on float32 products, and for 16-bit operands `anchored_products`."""
    count, V, device = case.hidden.shape[0], case.weight.shape[0], case.hidden.device
    inverse = case.temperature.reciprocal()
    given = torch.full((count, traffic_model.padded(V)), 1e30, device=device)  # what stands behind the vocabulary must not matter
    given[:, :V] = products(case.hidden, case.weight, torch.ones_like(inverse))
    logits, logits32 = given[:, :V].double() * inverse[:, None].double(), given[:, :V] * inverse[:, None]
    offset = logits.gather(1, case.targets[:, None])[:, 0].float()
    exact, torchs = (Anchored.of(x, case.targets, offset) for x in (logits, logits32))
    for store in (None, torch.bfloat16, torch.float32):
        work = given.clone()
        found = rows.anchor_rows(work, V, case.targets, inverse, offset, bias=None, softcap=None, store=store)
        kept = None if store is None else work.view(store)[:, :V]
        exact.check(judge, f"anchor_rows, {'sums only' if store is None else name_of(store)}", found, kept, torchs)

    g = torch.Generator(device).manual_seed(1)
    slope, entropy_slope, own_gradient = torch.randn(3, count, generator=g, device=device).unbind()
    log_total = torch.log1p(exact.others).float()

    def gradient(logits: Tensor) -> Tensor:
        logp = logits - offset[:, None] - log_total[:, None]
        result = -logp.exp() * (slope[:, None] + entropy_slope[:, None] * logp) * inverse[:, None]
        return result.scatter_(1, case.targets[:, None], own_gradient[:, None].to(result.dtype))

    for store in (torch.bfloat16, torch.float32):
        work = given.clone()
        known = (case.targets, inverse, offset, log_total, slope, entropy_slope, own_gradient)
        rows.products_gradient(work, V, *known, bias=None, softcap=None, store=store)
        judge.relative(f"products_gradient, {name_of(store)}", work.view(store)[:, :V], gradient(logits), gradient(logits32).to(store))

    if case.hidden.dtype != torch.float32:  # from the operands, for the float32 products above have errors of their own
        weight = case.weight.double().t()
        logits = torch.cat([hidden.double() @ weight for hidden in case.hidden.split(PIECE)]) * inverse[:, None].double()
        exact = Anchored.of(logits, case.targets, offset)
        for name, kept in (("sums only", None), ("bf16", torch.full_like(given, math.nan, dtype=torch.bfloat16))):
            found = anchored_gemm.anchored_products(case.hidden, case.weight, case.targets, inverse, offset, None, kept)
            exact.check(judge, f"anchored_products, {name}", found, None if kept is None else kept[:, :V], torchs)
            if kept is not None and kept.shape[1] > V:
                zeros = kept.new_zeros(1)
                judge.absolute("anchored_products: padding", kept[:, V:], zeros, zeros)


def check_targets(judge: Judge, case: Case) -> None:
    """What is made of the targets' rows of the weight."""
    g = torch.Generator(case.hidden.device).manual_seed(3)
    others, scale = torch.randn(2, case.hidden.shape[0], generator=g, device=case.hidden.device).unbind()
    sums = torch.randn(case.hidden.shape, generator=g, device=case.hidden.device)
    both = [(case.hidden.to(dtype), case.weight[case.targets].to(dtype)) for dtype in (torch.float64, torch.float32)]

    found = target_rows.target_products(case.hidden, case.weight, case.targets, None)
    exact, torchs = ((h * w).sum(1)[None] for h, w in both)
    judge.relative("target_products", found[None], exact, torchs, stored=torch.float32)

    exact, torchs = (scale[:, None].to(w) * (sums.to(w) - others[:, None].to(w) * w) for _, w in both)
    judge.relative("hidden_gradient", target_rows.hidden_gradient(sums, case.weight, case.targets, others, scale), exact, torchs)


def check_tokens(judge: Judge, case: Case, goal: Objective) -> None:
    """`token_objective` and the group advantages, on numbers per token and per completion."""
    given = RowArguments.of(case, goal)

    def by_autograd(batch: TokenBatch) -> tuple[Tensor, Tensor]:
        variable = batch.logprobs.detach().clone().requires_grad_()
        tokens = goal.evaluate(replace(batch, logprobs=variable))
        (tokens.loss * given.shares.to(variable.dtype)).sum().backward()
        return tokens.loss.detach(), variable.grad

    tokens, slopes = objective.token_objective(goal, given.batch, given.shares)
    both = zip(("loss", "slopes"), (tokens.loss, slopes), by_autograd(as_float64(given.batch)), by_autograd(given.batch), strict=True)
    for name, value, exact, torchs in both:
        judge.relative(f"token_objective: {name}", value[None].float(), exact[None], torchs[None])

    g = torch.Generator(case.mask.device).manual_seed(2)
    rewards = torch.randn(8 * case.hidden.shape[0], generator=g, device=case.mask.device)
    for scale, baseline in (("group", "mean"), ("none", "leave_one_out")):
        alone = baseline == "leave_one_out"
        found = advantages.group_advantages_of(rewards, 8, scale=scale, leave_one_out=alone, eps=1e-6, noise=1e-6)
        exact = group_advantages(rewards.double().cpu(), 8, scale=scale, baseline=baseline).to(found.device)
        judge.relative(f"group_advantages_of, {scale}", found[None], exact[None].double(), exact[None])
