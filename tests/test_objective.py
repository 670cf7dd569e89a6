from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective, TokenBatch


def batch(logprobs: Tensor, **given: Any) -> TokenBatch:
    """Tokens of one sequence each, on policy with advantage 1 and entropy 1, unless given otherwise."""
    n = logprobs.numel()
    sequence = given.get("sequence", torch.arange(n))
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=given.get("old", logprobs.detach()),
        ref_logprobs=given.get("ref"),
        rollout_logprobs=given.get("rollout"),
        advantages=given.get("advantages", torch.ones(n)),
        entropy=given.get("entropy", torch.ones(n)),
        sequence_of_row=sequence,
        lengths=torch.bincount(sequence).double(),
        policy_weight=torch.ones(n),
        entropy_threshold=given.get("threshold"),
    )


def gradient(objective: Objective, logprob: float, ref: float) -> tuple[float, float]:
    """(KL value, d loss / d logp) of one token with advantage 0 on policy."""
    logp = torch.tensor([logprob], requires_grad=True)
    tokens = objective.evaluate(batch(logp, ref=torch.tensor([ref]), advantages=torch.zeros(1)))
    (slope,) = torch.autograd.grad(tokens.loss.sum(), logp)
    return tokens.kl.item(), slope.item()


@pytest.mark.parametrize(("kl", "value", "slope"), [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.367879, 0.632121)])
def test_kl_estimators_have_their_textbook_values(kl: str, value: float, slope: float) -> None:
    got = gradient(Objective(kl=kl, kl_coef=1.0), -1.0, -2.0)
    assert got == pytest.approx((value, slope), rel=1e-5)


def test_k3_keeps_its_digits_near_zero() -> None:
    value, _ = gradient(Objective(kl="k3", kl_coef=1.0), -1.0, -1.0 + 2**-10)
    d = 2.0**-10
    assert value == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-3)


def test_k3_stays_finite_for_any_reference() -> None:
    for ref in (90.0, 1e6, -1e6):
        value, slope = gradient(Objective(kl="k3", kl_coef=1.0), -1.0, ref)
        assert torch.isfinite(torch.tensor([value, slope])).all()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("clip_low is -0.1", {"clip_low": -0.1}),
        ("clip_low is 1.5", {"clip_low": 1.5}),
        ("clip_high is nan", {"clip_high": float("nan")}),
        ("kl is 'k4'", {"kl": "k4"}),
        ("kl_coef is -1", {"kl_coef": -1.0}),
        ("aggregation is 'mean'", {"aggregation": "mean"}),
        ("constant_length is None", {"aggregation": "constant"}),
        ("constant_length is nan", {"aggregation": "constant", "constant_length": float("nan")}),
        ("constant_length is 8, but", {"constant_length": 8}),
    ],
)
def test_bad_settings_are_named(message: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**arguments)
