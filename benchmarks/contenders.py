"""What the benchmark compares: callables that leave one loss and its two gradients on one `Inputs`.

All compute the same: DAPO's mean over tokens, clip 0.2, a k3 penalty of 0.04 against given reference log-probabilities, given old ones.
`check_agreement` makes sure of it: a benchmark of different computations is worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import Objective, backends, linear_grpo_loss

CLIP, KL_COEF, WEIGHT_SCALE = 0.2, 0.04, 0.05


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [B, T, H], requires grad
    weight: Tensor  # [V, H], requires grad
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]; ours also takes [B, T]
    old: Tensor | None  # [B, T]; None: on policy
    ref: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool

    @classmethod
    def random(cls, batch: int, length: int, width: int, vocabulary: int, spread: float = 0.1) -> Inputs:
        """float32; `spread` is how far old and reference log-probabilities scatter around the current ones, in nats."""
        generator = torch.Generator().manual_seed(0)
        noise = partial(torch.randn, generator=generator)
        hidden, weight = noise(batch, length, width), noise(vocabulary, width).mul_(WEIGHT_SCALE)
        targets = torch.randint(0, vocabulary, (batch, length), generator=generator)
        # For Gaussian weights log Z is close to this, which spares the set-up a matrix product.
        log_z = math.log(vocabulary) + 0.5 * (WEIGHT_SCALE * hidden).square().sum(-1)
        logprobs = (hidden * weight[targets]).sum(-1) - log_z
        old, ref = (logprobs + spread * noise(batch, length) for _ in range(2))
        return cls(hidden.requires_grad_(), weight.requires_grad_(), targets, noise(batch), old, ref, torch.ones_like(targets).bool())

    def to(self, dtype: torch.dtype) -> Inputs:
        """Other leaves with the same values, rounded."""
        hidden, weight = (t.detach().to(dtype, copy=True).requires_grad_() for t in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight)

    def cut(self, length: int) -> Inputs:
        """The first `length` tokens of each sequence; the weight is shared."""
        short = {k: t.detach()[:, :length].clone() for k, t in vars(self).items() if k != "weight" and t is not None and t.dim() > 1}
        return replace(self, **(short | {"hidden": short["hidden"].requires_grad_()}))


Contender = Callable[[Inputs], Tensor]  # forward and backward: returns the loss, and leaves hidden.grad and weight.grad


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def _eager_objective(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """The loss from log-probabilities [B, T], as GRPOTrainer._compute_loss writes it (with use_bias_correction_kl=False)."""
    old = logprobs.detach() if inputs.old is None else inputs.old
    ratio = torch.exp(logprobs - old)
    clipped, advantages = torch.clamp(ratio, 1 - CLIP, 1 + CLIP), inputs.advantages.unsqueeze(1)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    per_token = per_token + KL_COEF * (torch.exp(inputs.ref - logprobs) - (inputs.ref - logprobs) - 1)
    return (per_token * inputs.mask).sum() / inputs.mask.sum().clamp(min=1)


def eager(inputs: Inputs) -> Tensor:
    """Full logits and log_softmax in float32; in float64 for float64 inputs, which is the benchmark's truth."""
    logits = inputs.hidden @ inputs.weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits, -1).gather(-1, inputs.targets.unsqueeze(-1)).squeeze(-1)
    return _backward(_eager_objective(logprobs, inputs))


@torch.no_grad()
def products_full(inputs: Inputs) -> Tensor:
    hidden, weight = inputs.hidden.flatten(0, 1), inputs.weight
    logits = hidden @ weight.t()
    inputs.hidden.grad, weight.grad = (logits @ weight).view_as(inputs.hidden), logits.t() @ hidden
    return torch.zeros(())


@torch.no_grad()
def products_tiled(inputs: Inputs) -> Tensor:
    """On the tiles that the fused pass uses."""
    rows, tile = 320, 1024
    hidden, weight, vocabulary = inputs.hidden.flatten(0, 1), inputs.weight, inputs.weight.shape[0]
    buffer = hidden.new_empty(vocabulary, min(rows, hidden.shape[0]))
    hidden_gradient, weight_gradient = torch.zeros_like(hidden), torch.empty_like(weight)
    for r in range(0, hidden.shape[0], rows):
        h = hidden[r : r + rows]
        logits = buffer.view(-1)[: vocabulary * h.shape[0]].view(vocabulary, -1)
        for v in range(0, vocabulary, tile):
            torch.mm(weight[v : v + tile], h.t(), out=logits[v : v + tile])
            hidden_gradient[r : r + rows].addmm_(logits[v : v + tile].t(), weight[v : v + tile])
        for v in range(0, vocabulary, tile):
            if r:
                weight_gradient[v : v + tile].addmm_(logits[v : v + tile], h)
            else:
                torch.mm(logits[v : v + tile], h, out=weight_gradient[v : v + tile])
    inputs.hidden.grad, weight.grad = hidden_gradient.view_as(inputs.hidden), weight_gradient
    return torch.zeros(())


def ours(backend: str, kl_coef: float = KL_COEF) -> Contender:
    objective = Objective(clip_low=CLIP, clip_high=CLIP, kl_coef=kl_coef, aggregation="token")

    def run(inputs: Inputs) -> Tensor:
        given: dict[str, Any] = {"old_logprobs": inputs.old, "ref_logprobs": inputs.ref if kl_coef else None, "mask": inputs.mask}
        policy = (inputs.hidden, inputs.weight, inputs.targets, inputs.advantages)
        return _backward(linear_grpo_loss(*policy, objective=objective, backend=backend, **given).loss)

    return run


def trl() -> Contender:
    """What `add_fused_lm_head` of TRL 1.16 does off a GPU for GRPOTrainer: every position scored, entropy always computed."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE  # backward imports this module too: not while the clock runs

    def run(inputs: Inputs) -> Tensor:
        settings = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy"))
        rows, targets = inputs.hidden.flatten(0, 1), inputs.targets.flatten()
        logprobs = ChunkedLogProbFunction.apply(rows, inputs.weight, None, targets, *settings)[0].view(inputs.mask.shape)
        return _backward(_eager_objective(logprobs.masked_fill(~inputs.mask, 0), inputs))

    return run


def liger(chunk_size: int | None) -> Contender:
    """`chunk_size` is in sequences, 1 by default; None: the whole batch. compiled=True was measured to change nothing on a CPU."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def run(inputs: Inputs) -> Tensor:
        settings = {"beta": KL_COEF, "epsilon_low": CLIP, "epsilon_high": CLIP, "loss_type": "dapo", "temperature": 1.0, "compiled": False}
        module = LigerFusedLinearGRPOLoss(chunk_size=chunk_size or len(inputs.hidden), **settings)
        policy = (inputs.hidden, inputs.weight, inputs.targets, inputs.mask.long(), inputs.advantages)
        return _backward(module(*policy, ref_per_token_logps=inputs.ref, old_per_token_logps=inputs.old)[0])

    return run


FLOORS, LIGERS = ("3 products, [N, V]", "3 products, tiled"), ("Liger, chunk_size=1", "Liger, chunk_size=B")
EAGER, TRL = "eager, full logits", "TRL, chunked + entropy"
BACKENDS = {f"grpo_kernels ({status.name})": status.name for status in backends() if status.available}  # the preferred first
# Making one raises ImportError for a peer that is not installed, and imports nothing else, so that it alone takes memory.
FACTORIES: dict[str, Callable[[], Contender]] = {
    FLOORS[0]: lambda: products_full,
    FLOORS[1]: lambda: products_tiled,
    EAGER: lambda: eager,
    TRL: trl,
    LIGERS[0]: partial(liger, 1),
    LIGERS[1]: partial(liger, None),
    **{name: partial(ours, backend) for name, backend in BACKENDS.items()},
}


def relative_error(value: Tensor, truth: Tensor) -> float:
    """L2, in pieces: a [V, H] copy in float64 is a gigabyte."""
    pairs = zip(value.flatten(0, -2).split(4096), truth.flatten(0, -2).split(4096), strict=True)
    return math.sqrt(sum(float((a.double() - b).square().sum()) for a, b in pairs)) / float(truth.norm())


def gradient_errors(calls: dict[str, Contender], inputs: Inputs) -> dict[str, tuple[float, ...]]:
    """Relative errors of loss, hidden.grad and weight.grad against eager in float64 on the same rounded inputs."""
    exact = inputs.to(torch.float64)
    loss, hidden, weight = float(eager(exact)), exact.hidden.grad, exact.weight.grad
    errors = {"rounding alone": (0.0, *(relative_error(exactly.to(inputs.hidden.dtype), exactly) for exactly in (hidden, weight)))}
    for name, call in calls.items():
        inputs.hidden.grad = inputs.weight.grad = None
        off = abs(float(call(inputs)) / loss - 1)
        errors[name] = (off, relative_error(inputs.hidden.grad, hidden), relative_error(inputs.weight.grad, weight))
    return errors


def check_agreement(calls: dict[str, Contender]) -> str:
    """Raises where a contender computes something else: a small case in which padding, clipping and the KL all matter."""
    inputs = Inputs.random(16, 32, 64, 1000, spread=0.5)
    inputs = replace(inputs, mask=torch.arange(32) < torch.arange(2, 34, 2)[:, None])
    errors = gradient_errors(calls, inputs)
    for name, (loss, *gradients) in errors.items():
        if not (loss < 1e-4 and max(gradients) < 1e-3):
            raise RuntimeError(f"{name} computes something else: relative errors {loss:.1e} (loss), {gradients} (dH, dW)")
    worst = ", ".join(f"{max(column):.0e}" for column in zip(*errors.values(), strict=True))
    return f"All {len(calls)} agree with float64 on a small padded batch; largest relative errors of loss, dH, dW: {worst}"
