"""The same specification on an NVIDIA GPU, where there is one. Minutes in all: `pytest -m gpu`. Of the other tests, those of Triton's
kernels (test_triton_*, test_anchored_gemm) run there too, on the device instead of in the interpreter."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import grpo_loss, linear_grpo_loss, linear_logprobs, selected_logprobs
from problems import Problem, fused, leaves, make, reference, relative
from test_linear_loss import OBJECTIVES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")]


def on_gpu(p: Problem) -> Problem:
    tensors = {field.name: getattr(p, field.name) for field in fields(p)}
    return replace(p, **{name: value.cuda() for name, value in tensors.items() if isinstance(value, Tensor)})


def check(p: Problem) -> None:
    """Gradients within twice torch's own error on the CPU in the same dtype, log-probabilities to 2e-5."""
    got, result = fused(on_gpu(p))
    exact, torchs = reference(p, torch.float64), reference(p)
    for name in ("hidden_gradient", "weight_gradient"):
        allowed = 2 * max(relative(getattr(torchs, name), getattr(exact, name)), torch.finfo(getattr(exact, name).dtype).eps / 4, 1e-7)
        if p.hidden.dtype != torch.float32:
            allowed = max(allowed, torch.finfo(p.hidden.dtype).eps / 2)
        assert relative(getattr(got, name).cpu(), getattr(exact, name)) <= allowed, name
    computed = result.computed.cpu()
    assert float((result.logprobs.cpu() - exact.logprobs)[computed].abs().max()) <= 2e-5


@pytest.mark.parametrize(
    ("dtype", "gemm1"), [(torch.float32, "library"), (torch.float16, "library"), (torch.bfloat16, "library"), (torch.bfloat16, "anchored")]
)
@pytest.mark.parametrize("shape", [(1, 64, 1000), (300, 96, 50257), (1025, 128, 2053), (64, 64, 129920), (4097, 64, 3000), (40, 67, 999)])
def test_shapes(dtype: torch.dtype, gemm1: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_KERNELS_GEMM1", gemm1)
    alone = {"masked": 0.0} if shape[0] == 1 else {}
    check(make(*shape, dtype=dtype, objective=OBJECTIVES["grpo_kl3"], old=False, **alone))


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name: str, old: bool) -> None:
    check(make(120, 48, 3001, objective=OBJECTIVES[name], old=old))


@pytest.mark.parametrize("name", ["dapo", "entropy"])
@pytest.mark.parametrize("settings", [{"bias": True}, {"softcap": 5.0}, {"temperature": torch.linspace(0.5, 1.5, 90)}])
def test_heads(name: str, settings: dict[str, Any]) -> None:
    check(make(90, 32, 2000, objective=OBJECTIVES[name], **settings))


def test_the_logits_level() -> None:
    p = make(90, 32, 2000)
    exact = reference(p, torch.float64)
    hidden, weight, _ = (None if t is None else t.cuda().detach().requires_grad_() for t in leaves(p))
    q = on_gpu(p)
    logits = hidden @ weight.t()
    grpo_loss(
        logits, q.targets, q.advantages, objective=p.objective, old_logprobs=q.old, mask=q.mask, overwrite_logits=True
    ).loss.backward()
    assert relative(hidden.grad.cpu(), exact.hidden_gradient) < 1e-5
    assert relative(weight.grad.cpu(), exact.weight_gradient) < 1e-5
    chosen = selected_logprobs((q.hidden @ q.weight.t())[None], q.targets[None])
    assert float((chosen.logprobs[0].cpu() - exact.logprobs).abs().max()) < 1e-4


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    p = make(40, 32, 2000, dtype=torch.bfloat16)
    tensors = {field.name: getattr(p, field.name) for field in fields(p)}
    q = replace(p, **{name: value.to("cuda:1") for name, value in tensors.items() if isinstance(value, Tensor)})
    assert relative(fused(q)[0].weight_gradient.cpu(), fused(on_gpu(p))[0].weight_gradient.cpu()) < 1e-6


def test_kernels_and_torch_agree() -> None:
    q = on_gpu(make(300, 96, 5000, dtype=torch.bfloat16))
    ours, torchs = fused(q, backend="triton")[0], fused(q, backend="torch")[0]
    assert relative(ours.weight_gradient, torchs.weight_gradient) < 5e-3
    assert float((ours.logprobs - torchs.logprobs).abs().max()) < 1e-5


def test_a_support() -> None:
    p = make(90, 32, 2000, masked=0.0)
    q = on_gpu(p)
    support = (q.hidden @ q.weight.t()).topk(20, 1).indices
    here = linear_logprobs(p.hidden, p.weight, p.targets, support=support.cpu())
    assert torch.allclose(linear_logprobs(q.hidden, q.weight, q.targets, support=support).logprobs.cpu(), here.logprobs, atol=1e-5)


def test_torch_compile() -> None:
    q = on_gpu(make(90, 32, 2000))
    objective = OBJECTIVES["dapo"]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_grpo_loss(hidden, weight, q.targets, q.advantages, objective=objective, mask=q.mask).loss

    hidden, weight, _ = leaves(q)
    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(hidden, weight), (hidden, weight))
    for a, b in zip(compiled, expected, strict=True):
        assert relative(a, b) < 1e-6


def test_tf32_settings_do_not_matter() -> None:
    q = on_gpu(make(64, 256, 5000))
    plain = linear_logprobs(q.hidden, q.weight, q.targets).logprobs
    torch.set_float32_matmul_precision("high")
    try:
        assert torch.equal(linear_logprobs(q.hidden, q.weight, q.targets).logprobs, plain)
    finally:
        torch.set_float32_matmul_precision("highest")
