from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective, RolloutCorrection, TokenBatch, kl_estimate, top_entropy_threshold


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
        ("policy_loss is 'ppo'; it must be one of 'clip', .* or a function of a TokenBatch", {"policy_loss": "ppo"}),
        ("ratio_level is 'group'", {"ratio_level": "group"}),
        ("max_ratio is 1.1; it must be finite and at least 1.2", {"max_ratio": 1.1}),
        ("max_ratio is 3.0, but policy_loss is 'sapo'", {"max_ratio": 3.0, "policy_loss": "sapo"}),
        ("sapo_tau_pos is 0", {"sapo_tau_pos": 0.0}),
        ("entropy_coef is inf", {"entropy_coef": float("inf")}),
        ("entropy_coef is True", {"entropy_coef": True}),
        ("top_entropy is 1.5", {"top_entropy": 1.5}),
        ("off_policy_threshold is -1", {"off_policy_threshold": -1.0}),
        ("rollout_correction is 'token'", {"rollout_correction": "token"}),
        ("rollout_correction.level is 'sequence'", {"policy_loss": "vespo", "rollout_correction": RolloutCorrection("sequence")}),
    ],
)
def test_bad_settings_are_named(message: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("rollout_correction.level is 'batch'", {"level": "batch"}),
        ("rollout_correction.mode is 'clip'", {"mode": "clip"}),
        ("rollout_correction.high is nan", {"high": float("nan")}),
        ("rollout_correction.low is 3.0 and .high 2.0", {"low": 3.0}),
        ("both None", {"high": None}),
    ],
)
def test_bad_corrections_are_named(message: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**arguments)


def token(objective: Objective, ratios: list[float], advantages: list[float]) -> tuple[list[float], list[float]]:
    """Losses and slopes of the tokens of one sequence with these ratios, all log-probabilities -1."""
    logp = torch.full((len(ratios),), -1.0, requires_grad=True)
    old = -1.0 - torch.tensor(ratios).log()
    sequence = torch.zeros(len(ratios), dtype=torch.int64)
    tokens = objective.evaluate(batch(logp, old=old, advantages=torch.tensor(advantages), sequence=sequence))
    (slopes,) = torch.autograd.grad(tokens.loss.sum(), logp)
    return tokens.loss.tolist(), slopes.tolist()


@pytest.mark.parametrize(
    ("objective", "ratios", "advantages", "losses", "slopes"),
    [
        # sigmoid(0) = 1/2: the value is 2 / tau and the slope of r is 1 on policy, as PPO's.
        (Objective.sapo(sapo_tau_neg=1.0), [1.0, 1.0], [1.0, -1.0], [-2.0, 2.0], [-1.0, 1.0]),
        (Objective.cispo(max_weight=2.0), [3.0, 0.5], [1.0, -1.0], [2.0, -0.5], [-2.0, 0.5]),
        (Objective.reinforce(), [3.0, 0.5], [1.0, -2.0], [1.0, -2.0], [-1.0, 2.0]),
        # Geometric mean of 4 and 1/4 is 1; both tokens share the slope of the sum of the losses.
        (Objective.gspo(clip_low=0.5, clip_high=0.5), [4.0, 0.25], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]),
        # log r = 1 is clipped to 0.4 for A > 0, -1 is not: exp(-0.3). The clipped token has no slope.
        (Objective.gmpo(), [math.e, 1 / math.e], [1.0, 1.0], [-math.exp(-0.3)] * 2, [0.0, -math.exp(-0.3)]),
        # w = 4 x 1/4 = 1, phi(1) = 1: REINFORCE.
        (Objective.vespo(), [4.0, 0.25], [1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]),
        # w = 2: phi = 2^2 e^(3 (1 - 2)).
        (Objective.vespo(), [2.0, 1.0], [1.0, 1.0], [4 * math.exp(-3)] * 2, [-4 * math.exp(-3)] * 2),
    ],
)
def test_policy_losses_have_their_textbook_values(
    objective: Objective, ratios: list[float], advantages: list[float], losses: list[float], slopes: list[float]
) -> None:
    got = token(objective, ratios, advantages)
    assert got[0] == pytest.approx(losses, rel=1e-5)
    assert got[1] == pytest.approx(slopes, rel=1e-5, abs=1e-7)


def test_the_entropy_threshold_is_the_quantile() -> None:
    entropy = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(1001) % 3 > 0
    for fraction in (0.0, 0.2, 0.5, 0.7, 1.0):
        threshold = top_entropy_threshold(entropy, mask, fraction=fraction)
        assert threshold == pytest.approx(float(torch.quantile(entropy[mask].double(), 1 - fraction)), abs=1e-9)
    assert top_entropy_threshold(entropy, torch.zeros(1001, dtype=torch.bool), fraction=0.5) == math.inf
    # 0.3 x 10 is 3.0000000000000004 in floating point; the fourth value must still be in.
    values = torch.arange(11.0)
    assert int((values >= top_entropy_threshold(values, fraction=0.7)).sum()) == 8


def test_an_objective_survives_a_copy_and_a_pickle() -> None:
    objective = Objective.dapo(rollout_correction=RolloutCorrection("token", "mask", high=3.0))
    for twin in (copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
        assert twin == objective
        assert Objective.of_key(twin.key) == objective


def test_numpy_numbers_are_numbers() -> None:
    assert Objective(clip_low=np.float32(0.25)) == Objective(clip_low=0.25)
    assert Objective.dr_grpo(constant_length=np.int64(5)).constant_length == 5


def test_an_unknown_kl_estimate_is_named() -> None:
    with pytest.raises(ValueError, match="kl is 'K1'; it must be one of 'k1', 'k2', 'k3'"):
        kl_estimate("K1", torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("mask", "message"), [([1, 0], "mask has type list"), (torch.ones(2), "dtype torch.float32"), (torch.ones(3) > 0, "shape \\(3,\\)")]
)
def test_a_bad_mask_of_the_threshold_is_named(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_entropy_threshold(torch.zeros(2), mask, fraction=0.5)
