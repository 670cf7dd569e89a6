"""Random loss problems and how they are judged: against float64, by torch's own error in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels import LinearGRPOLoss, LossCounts, Objective, linear_grpo_loss
from grpo_kernels.reference import reference_grpo_loss


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    lengths: list[int]
    mask: Tensor
    old: Tensor | None
    ref: Tensor | None
    objective: Objective
    temperature: float = 1.0

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def sequence_of_row(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))

    def counts(self) -> LossCounts:
        return LossCounts.of(self.mask, self.sequence_of_row)


def split(rows: int, generator: torch.Generator) -> list[int]:
    """Sequences of 1 to 9 rows."""
    lengths = []
    while rows:
        lengths.append(min(rows, int(torch.randint(1, 10, (), generator=generator))))
        rows -= lengths[-1]
    return lengths


def make(
    rows: int, width: int, vocabulary: int, *, dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype | None = None,
    objective: Objective | None = None, old: bool = True, seed: int = 0, temperature: float = 1.0, masked: float = 0.2,
    logit_scale: float = 3.0,
) -> Problem:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    objective = objective or Objective.dapo()
    hidden = (torch.randn(rows, width, generator=g) * logit_scale * temperature / width**0.5).to(dtype)
    weight = torch.randn(vocabulary, width, generator=g).to(weight_dtype or dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    logits = hidden.double() @ weight.double().t() / temperature
    now = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].float()
    return Problem(
        hidden=hidden,
        weight=weight,
        targets=targets,
        advantages=torch.randn(rows, generator=g),
        lengths=split(rows, g),
        mask=torch.rand(rows, generator=g) >= masked,
        old=now + torch.randn(rows, generator=g) * 0.3 if old else None,
        ref=now + torch.randn(rows, generator=g) * 0.3 if objective.kl_coef else None,
        objective=objective,
        temperature=temperature,
    )


@dataclass
class Answer:
    loss: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor
    logprobs: Tensor
    entropy: Tensor


def fused(p: Problem, *, backend: str = "auto", upstream: float = 1.0, counts: LossCounts | None = None) -> tuple[Answer, LinearGRPOLoss]:
    hidden, weight = p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()
    result = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, objective=p.objective, cu_seqlens=p.cu_seqlens, old_logprobs=p.old, ref_logprobs=p.ref,
        mask=p.mask, counts=counts, temperature=p.temperature, backend=backend,
    )  # fmt: skip
    (result.loss * upstream).backward()
    return Answer(result.loss.detach(), hidden.grad, weight.grad, result.logprobs, result.entropy), result


def reference(p: Problem, dtype: torch.dtype | None = None) -> Answer:
    """The specification in `dtype`; None: in the problem's own, which is torch's own error in that dtype."""
    hidden = (p.hidden if dtype is None else p.hidden.to(dtype)).detach().requires_grad_()
    weight = (p.weight if dtype is None else p.weight.to(dtype)).detach().requires_grad_()
    cast = (lambda t: t) if dtype is None else (lambda t: None if t is None else t.to(dtype))
    common = torch.promote_types(hidden.dtype, weight.dtype)
    counts = p.counts()
    loss, logprobs, entropy = reference_grpo_loss(
        hidden.to(common), weight.to(common), p.targets, cast(p.advantages), objective=p.objective, sequence_of_row=p.sequence_of_row,
        mask=p.mask, tokens=counts.tokens, sequences=counts.sequences, old_logprobs=cast(p.old), ref_logprobs=cast(p.ref),
        temperature=p.temperature,
    )  # fmt: skip
    loss.backward()
    return Answer(loss.detach(), hidden.grad, weight.grad, logprobs.detach(), entropy.detach())


def relative(x: Tensor, exact: Tensor) -> float:
    """Relative L2 error. An all-zero x has error 1, so no tolerance below passes it."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())


def check_against_float64(*problems: Problem, backend: str = "auto") -> None:
    """Gradients, loss and log-probabilities within twice torch's own error in the same dtype.

    Errors are pooled (root mean square) over the problems: where a gradient is a few numbers, torch's error in one draw is luck.
    """
    answers = [(fused(p, backend=backend), reference(p, torch.float64), reference(p)) for p in problems]
    for name in ("hidden_gradient", "weight_gradient"):
        ours, torchs = [], []
        for (got, _), exact, theirs in answers:
            assert getattr(got, name).dtype == getattr(theirs, name).dtype
            ours.append(relative(getattr(got, name), getattr(exact, name)))
            torchs.append(relative(getattr(theirs, name), getattr(exact, name)))
        # A quarter of a unit in the last place, the rounding of the result itself, is unavoidable.
        unit = torch.finfo(getattr(answers[0][0][0], name).dtype).eps / 4
        error, allowed = _rms(ours), 2 * max(_rms(torchs), unit)
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
    for p, ((got, result), exact, theirs) in zip(problems, answers, strict=True):
        for name in ("logprobs", "entropy"):
            difference = getattr(got, name).double() - getattr(exact, name)
            assert float(difference[result.computed].abs().max()) <= 2e-5, name
        allowed = max(2 * abs(float(theirs.loss) - float(exact.loss)), 4e-7 * float(p.advantages.abs().mean()))
        assert abs(float(got.loss) - float(exact.loss)) <= allowed


def _rms(values: list[float]) -> float:
    return (sum(v * v for v in values) / len(values)) ** 0.5


def take(p: Problem, sequences: slice) -> Problem:
    """The rows of some sequences, in order."""
    bounds = p.cu_seqlens.tolist()
    first, last, _ = sequences.indices(len(p.lengths))
    rows = slice(bounds[first], bounds[last])
    return replace(
        p, hidden=p.hidden[rows], targets=p.targets[rows], advantages=p.advantages[rows], lengths=p.lengths[first:last], mask=p.mask[rows],
        old=None if p.old is None else p.old[rows], ref=None if p.ref is None else p.ref[rows],
    )  # fmt: skip
