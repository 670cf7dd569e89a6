"""Random loss problems and how they are judged: against float64, by torch's own error in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, LossCounts, Objective, linear_grpo_loss
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.head import Head
from grpo_kernels.reference import reference_grpo_loss, reference_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton kernels run; on the CPU in its interpreter


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
    temperature: float | Tensor = 1.0
    rollout: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths], device=self.mask.device).cumsum(0)

    @property
    def sequence_of_row(self) -> Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=self.mask.device)
        return torch.arange(len(self.lengths), device=self.mask.device).repeat_interleave(lengths)

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
    objective: Objective | None = None, old: bool = True, seed: int = 0, temperature: float | Tensor = 1.0, masked: float = 0.2,
    logit_scale: float = 3.0, bias: bool = False, softcap: float | None = None, spread: float = 0.3,
) -> Problem:  # fmt: skip
    """`spread`: the standard deviation of the old, reference and rollout log-probabilities around the current ones."""
    g = torch.Generator().manual_seed(seed)
    objective = objective or Objective.dapo()
    heat = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    hidden = (torch.randn(rows, width, generator=g) * logit_scale * heat / width**0.5).to(dtype)
    weight = torch.randn(vocabulary, width, generator=g).to(weight_dtype or dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    offsets = torch.randn(vocabulary, generator=g).to(weight.dtype) if bias else None
    now, _ = reference_logprobs(
        hidden.double(), weight.double(), targets, bias=None if offsets is None else offsets.double(), softcap=softcap,
        temperature=temperature,
    )  # fmt: skip
    now = now.float()
    return Problem(
        hidden=hidden,
        weight=weight,
        targets=targets,
        advantages=torch.randn(rows, generator=g),
        lengths=split(rows, g),
        mask=torch.rand(rows, generator=g) >= masked,
        old=now + torch.randn(rows, generator=g) * spread if old else None,
        ref=now + torch.randn(rows, generator=g) * spread if objective.kl_coef else None,
        objective=objective,
        temperature=temperature,
        rollout=now + torch.randn(rows, generator=g) * spread if objective.rollout_correction else None,
        bias=offsets,
        softcap=softcap,
    )


def rows_per_chunk(vocabulary: int) -> int:
    """Of the CPU's backends, for very many rows."""
    return TorchBackend(torch.device("cpu")).rows_per_chunk(Head(torch.empty(vocabulary, 1)), 1 << 20, "exponentials", weight_gradient=True)


@dataclass
class Answer:
    loss: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor | None
    logprobs: Tensor
    entropy: Tensor


def leaves(p: Problem, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden, weight and bias as leaves of a graph; None: in their own dtypes."""
    tensors = (p.hidden, p.weight, p.bias)
    hidden, weight, bias = (None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors)
    return hidden, weight, bias


def fused(
    p: Problem, *, backend: str = "auto", upstream: float = 1.0, counts: LossCounts | None = None, **more: Any
) -> tuple[Answer, GRPOLoss]:
    hidden, weight, bias = leaves(p)
    result = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, objective=p.objective, cu_seqlens=p.cu_seqlens, old_logprobs=p.old, ref_logprobs=p.ref,
        rollout_logprobs=p.rollout, mask=p.mask, counts=counts, bias=bias, temperature=p.temperature, softcap=p.softcap,
        backend=backend, **more,
    )  # fmt: skip
    (result.loss * upstream).backward()
    bias_gradient = None if bias is None else bias.grad
    return Answer(result.loss.detach(), hidden.grad, weight.grad, bias_gradient, result.logprobs, result.entropy), result


def reference(p: Problem, dtype: torch.dtype | None = None) -> Answer:
    """The specification in `dtype`; None: in the problem's own, which is torch's own error in that dtype."""
    hidden, weight, bias = leaves(p, dtype)
    cast = (lambda t: t) if dtype is None else (lambda t: None if t is None else t.to(dtype))
    common = torch.promote_types(hidden.dtype, weight.dtype)
    counts = p.counts()
    heat = p.temperature.to(common) if isinstance(p.temperature, Tensor) else p.temperature
    logprobs, entropy = reference_logprobs(
        hidden.to(common), weight.to(common), p.targets, bias=None if bias is None else bias.to(common), softcap=p.softcap,
        temperature=heat,
    )  # fmt: skip
    loss = reference_grpo_loss(
        logprobs, entropy, cast(p.advantages), objective=p.objective, sequence_of_row=p.sequence_of_row, mask=p.mask, tokens=counts.tokens,
        sequences=counts.sequences, old_logprobs=cast(p.old), ref_logprobs=cast(p.ref), rollout_logprobs=cast(p.rollout),
    )  # fmt: skip
    loss.backward()
    bias_gradient = None if bias is None else bias.grad
    return Answer(loss.detach(), hidden.grad, weight.grad, bias_gradient, logprobs.detach(), entropy.detach())


def relative(x: Tensor, exact: Tensor) -> float:
    """Relative L2 error. An all-zero x has error 1, so no tolerance below passes it."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())


def check_against_float64(*problems: Problem, backend: str = "auto") -> None:
    """Gradients, loss and log-probabilities within twice torch's own error in the same dtype.

    Errors are pooled (root mean square) over the problems: where a gradient is a few numbers, torch's error in one draw is luck.
    """
    answers = [(fused(p, backend=backend), reference(p, torch.float64), reference(p)) for p in problems]
    names = ["hidden_gradient", "weight_gradient", "bias_gradient"]
    for name in names if problems[0].bias is not None else names[:2]:
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
        # Log-probabilities near -16 are rounded by up to 1e-6 in float32, and so are log-ratios. Some losses are multiples of logp.
        scale = 10 if p.objective.policy_loss in ("cispo", "vespo", "reinforce") else 1
        allowed = max(2 * abs(float(theirs.loss) - float(exact.loss)), 1e-6 * scale * float(p.advantages.abs().mean()))
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
        rollout=None if p.rollout is None else p.rollout[rows],
    )  # fmt: skip
