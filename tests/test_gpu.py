"""The same specification on an NVIDIA GPU, where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_kernels import Objective, linear_grpo_loss, linear_logprobs
from problems import Problem, make, reference, relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64, 1000), (300, 96, 50257), (1025, 128, 2053), (64, 64, 129920)])
def test_loss_and_gradients_against_float64(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    alone = {"masked": 0.0} if shape[0] == 1 else {}
    p: Problem = make(*shape, dtype=dtype, objective=Objective.grpo(kl_coef=0.04), old=False, **alone)
    hidden, weight = p.hidden.cuda().requires_grad_(), p.weight.cuda().requires_grad_()
    result = linear_grpo_loss(
        hidden, weight, p.targets.cuda(), p.advantages, objective=p.objective, cu_seqlens=p.cu_seqlens, ref_logprobs=p.ref, mask=p.mask
    )
    result.loss.backward()
    exact, torchs = reference(p, torch.float64), reference(p)
    for got, name in ((hidden.grad, "hidden_gradient"), (weight.grad, "weight_gradient")):
        allowed = 2 * max(relative(getattr(torchs, name), getattr(exact, name)), torch.finfo(dtype).eps / 4)
        assert relative(got.cpu(), getattr(exact, name)) <= allowed, name
    assert float((result.logprobs.cpu() - exact.logprobs)[result.computed.cpu()].abs().max()) <= 2e-5


def test_tf32_settings_do_not_matter() -> None:
    p = replace(make(64, 256, 5000, dtype=torch.float32))
    arguments = (p.hidden.cuda(), p.weight.cuda(), p.targets.cuda())
    plain = linear_logprobs(*arguments).logprobs
    torch.set_float32_matmul_precision("high")
    try:
        assert torch.equal(linear_logprobs(*arguments).logprobs, plain)
    finally:
        torch.set_float32_matmul_precision("highest")
