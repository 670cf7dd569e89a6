"""What gpu_acceptance.py compares on a GPU beside `contenders`: the bare products, ours forward alone, and the peers that have kernels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import contenders
import torch
import traffic_model
from acceptance_checks import BACKEND, Shape
from contenders import Inputs
from torch import Tensor

from grpo_kernels import linear_logprobs
from grpo_kernels.triton_kernels import rows

Run = Callable[[Inputs], Tensor]


def random_inputs(shape: Shape, length: int, device: torch.device) -> Inputs:
    """bfloat16, made on the device; logits have a standard deviation of 3."""
    N, H, V = shape
    batch = N // length
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(batch, length, H, generator=g, device=device, dtype=torch.bfloat16)
    weight = torch.randn(V, H, generator=g, device=device, dtype=torch.bfloat16).mul_(3 / H**0.5)
    targets = torch.randint(0, V, (batch, length), generator=g, device=device)
    now = (hidden.float() * weight[targets].float()).sum(-1) - math.log(V) - 4.5 * hidden.float().square().mean(-1)
    old, ref = (now + 0.1 * torch.randn(batch, length, generator=g, device=device) for _ in range(2))
    advantages = torch.randn(batch, generator=g, device=device)
    mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), targets, advantages, old, ref, mask)


def products_in_chunks(rows_at_once: int) -> Run:
    """The three products, in bfloat16, of a chunk of rows after the other: what a fused loss cannot do without."""

    @torch.no_grad()
    def run(inputs: Inputs) -> Tensor:
        hidden, weight = inputs.hidden.flatten(0, 1), inputs.weight
        buffer = hidden.new_empty(min(rows_at_once, hidden.shape[0]), weight.shape[0])
        hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.empty_like(weight)
        for start in range(0, hidden.shape[0], rows_at_once):
            h = hidden[start : start + rows_at_once]
            logits = torch.mm(h, weight.t(), out=buffer[: h.shape[0]])
            torch.mm(logits, weight, out=hidden_gradient[start : start + rows_at_once])
            torch.addmm(weight_gradient, logits.t(), h, beta=int(start > 0), out=weight_gradient)
        inputs.hidden.grad, weight.grad = hidden_gradient.view_as(inputs.hidden), weight_gradient
        return torch.zeros(())

    return run


def compiled_eager(dry: bool) -> Run:
    """contenders.eager's forward under torch.compile."""

    def forward(hidden: Tensor, weight: Tensor, inputs: Inputs) -> Tensor:
        logits = (hidden @ weight.t()).float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, inputs.targets.unsqueeze(-1)).squeeze(-1)
        return contenders._eager_objective(logprobs, inputs)

    compiled = torch.compile(forward, dynamic=False, backend="aot_eager" if dry else "inductor")

    def run(inputs: Inputs) -> Tensor:
        loss = compiled(inputs.hidden, inputs.weight, inputs)
        loss.backward()
        return loss.detach()

    return run


def liger_on_logits(dry: bool) -> Run:
    """Liger's Triton loss, with the head as a module has it: logits of every position, the last one of no use."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    if dry:
        raise ImportError("it needs a GPU")
    settings = {"temperature": 1.0, "beta": contenders.KL_COEF, "eps_low": contenders.CLIP, "eps_high": contenders.CLIP}

    def run(inputs: Inputs) -> Tensor:
        logits = torch.nn.functional.pad(inputs.hidden, (0, 0, 0, 1)) @ inputs.weight.t()
        policy = (logits, inputs.old, inputs.ref, inputs.targets, inputs.advantages, inputs.mask.long())
        loss = triton_grpo_loss(*policy, **settings, inplace=True, loss_type="dapo", reduce=True)[0]
        loss.backward()
        return loss.detach()

    return run


def arguments(function: Callable[..., object], known: dict[str, Any]) -> list[Any]:
    """Those of `function` by position, as an autograd function is called: what is known by its name, or the default.

    Raises:
        TypeError: one is neither.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without ctx
    for parameter in parameters:
        if parameter.name not in known and parameter.default is parameter.empty:
            raise TypeError(f"what to give as {parameter.name} is not known")
    return [known.get(parameter.name, parameter.default) for parameter in parameters]


def verl_logprobs() -> Run:
    """verl's kernel, whose arguments have changed their order and their defaults between versions: log-probabilities [B, T]."""
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    settings: dict[str, Any] = {"temperature": 1.0, "reduction": "none"}
    arguments(LinearCrossEntropy.forward, settings | dict.fromkeys(("hidden", "weight", "labels")))  # a version unlike these is left out

    def run(inputs: Inputs) -> Tensor:
        policy = {"hidden": inputs.hidden.flatten(0, 1), "weight": inputs.weight, "labels": inputs.targets.flatten()}
        return LinearCrossEntropy.apply(*arguments(LinearCrossEntropy.forward, settings | policy))[0].view(inputs.mask.shape)

    return run


def verl() -> Run:
    logprobs = verl_logprobs()

    def run(inputs: Inputs) -> Tensor:
        loss = contenders._eager_objective(logprobs(inputs).float(), inputs)
        loss.backward()
        return loss.detach()

    return run


def trl_logprobs() -> Run:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    settings = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy"))

    def run(inputs: Inputs) -> Tensor:
        return ChunkedLogProbFunction.apply(inputs.hidden.flatten(0, 1), inputs.weight, None, inputs.targets.flatten(), *settings)[0]

    return run


def eager_logprobs(inputs: Inputs) -> Tensor:
    logits = (inputs.hidden @ inputs.weight.t()).float()
    return torch.log_softmax(logits, -1).gather(-1, inputs.targets.unsqueeze(-1))


def one_product(inputs: Inputs) -> Tensor:
    return inputs.hidden.flatten(0, 1) @ inputs.weight.t()


def ours_forward(inputs: Inputs) -> Tensor:
    return linear_logprobs(inputs.hidden, inputs.weight, inputs.targets, mask=inputs.mask, backend=BACKEND).logprobs


COMPILED = "torch.compile"


def peers(dry: bool) -> dict[str, Callable[[], Run]]:
    """Forward and backward. Making one raises ImportError where it is not installed. The first to be cut come last: Liger's fused loss
    runs longest, and to compile takes so long that it is done for one shape only."""
    return {
        "eager": lambda: contenders.eager,
        "TRL, chunked": contenders.trl,
        "Liger, on logits": lambda: liger_on_logits(dry),
        "verl": verl,
        "Liger, fused linear": lambda: contenders.liger(1),
        COMPILED: lambda: compiled_eager(dry),
    }


FORWARD_PEERS: dict[str, Callable[[], Run]] = {"eager": lambda: eager_logprobs, "TRL, chunked": trl_logprobs, "verl": verl_logprobs}
# Bytes per logit of those that hold all logits: bfloat16, and float32 logits, log-probabilities and their gradient; Liger's are overwritten
# by their gradient, with a copy of them if it must be contiguous.
FULL_LOGITS = {"eager": 14, COMPILED: 14, "Liger, on logits": 6}


def library_forward(inputs: Inputs) -> Tensor:
    """float32 products of 2048 rows at a time, and the sums of their rows."""
    hidden, V = inputs.hidden.flatten(0, 1), inputs.weight.shape[0]
    ones = torch.ones(hidden.shape[0], device=hidden.device)
    work = torch.empty(min(2048, hidden.shape[0]), traffic_model.padded(V), device=hidden.device)
    for h, targets, scale in zip(hidden.split(2048), inputs.targets.flatten().split(2048), ones.split(2048), strict=True):
        chunk = work[: h.shape[0]]
        if h.device.type == "cuda":
            torch.mm(h, inputs.weight.t(), out_dtype=torch.float32, out=chunk[:, :V])
        else:
            torch.mm(h.float(), inputs.weight.float().t(), out=chunk[:, :V])
        offset = (h.float() * inputs.weight[targets].float()).sum(1)
        rows.anchor_rows(chunk, V, targets, scale, offset, bias=None, softcap=None, store=None)
    return work
