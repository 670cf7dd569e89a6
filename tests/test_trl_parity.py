"""`linear_grpo_loss` against TRL's own loss, and Liger's fused one where it agrees with TRL: float32, loss and gradients to 1e-5."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("trl", reason="the peers extra is not installed: pip install '.[peers]'")

import torch
from torch import Tensor

from grpo_kernels import LossCounts, Objective, RolloutCorrection, linear_grpo_loss
from grpo_kernels.backends.torch import TorchBackend
from problems import relative
from trl_oracle import Batch, TRLLoss, linear_logprobs_and_entropies, rollout_ratio, trl_loss

TOLERANCE = 1e-5
TEMPERATURE = 0.7
MAX_LENGTH = 20  # of a completion, dr_grpo's constant
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
CLIPPING = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LEVELS = ("token", "sequence")

# ---------------------------------------------------------------------------------------------------------------------- the batch


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    batch: Batch


# By sequence. The drift of the policy since the rollout is a mean per token, the rollout engine's mismatch a sum over the sequence, so that
# ratios of both levels leave their bounds on both sides and VESPO's weights, which fall off with the product of ratios, stay far from 0.
# Row 4 is masked altogether; row 3 has advantage 0.
LENGTHS = (12, 5, 3, 9, 0, 4)
ADVANTAGES = (1.1, -0.8, 0.7, 0.0, 0.5, -1.3)
DRIFT = (0.05, -0.3, 0.4, -0.1, 0.0, 0.3)
MISMATCH = (0.3, 1.2, -0.9, 0.1, 0.0, -2.4)
SEED = 38  # one of those with which every variant has something to compare, as the tests of the tests below see to


@functools.cache
def problem(old: bool = True, per_token: bool = False) -> Problem:
    """Everything known of one batch. Not `old`: its first update, where the log-probabilities of the last rollout are the current ones.
    `per_token`: advantages that differ within a sequence, in sign too, a third of them 0."""
    g = torch.Generator().manual_seed(SEED)
    batch, length, width, vocabulary = len(LENGTHS), max(LENGTHS), 20, 97
    hidden = torch.randn(batch, length, width, generator=g) * (0.4 + 2.0 * torch.rand(batch, length, 1, generator=g)) / width**0.5
    weight = torch.randn(vocabulary, width, generator=g)
    targets = torch.randint(0, vocabulary, (batch, length), generator=g)
    mask = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    mask[0, 3] = False  # a hole, as the output of a tool is
    now, _ = linear_logprobs_and_entropies(hidden, weight, targets, TEMPERATURE)
    advantages = torch.tensor(ADVANTAGES)
    if per_token:
        advantages = (advantages[:, None] + torch.randn(mask.shape, generator=g)) * (torch.rand(mask.shape, generator=g) > 1 / 3)
    before = now - centred(0.3, mask, g) - torch.tensor(DRIFT)[:, None] if old else now
    scored = mask.clone()
    scored[0, 5] = scored[1, 2] = False  # tokens that vLLM could not score
    rollout = before - centred(0.5, scored, g) - torch.tensor(MISMATCH)[:, None] / scored.sum(-1, keepdim=True).clamp(min=1)
    rollout = torch.where(scored | ~mask, rollout, torch.nan)
    ref = now + 0.5 * torch.randn(batch, length, generator=g)
    return Problem(hidden, weight, targets, Batch(mask, advantages, before if old else None, ref, rollout))


def centred(scale: float, mask: Tensor, g: torch.Generator) -> Tensor:
    """Noise whose mean over each sequence is 0."""
    noise = scale * torch.randn(mask.shape, generator=g)
    return noise - (noise * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


# ------------------------------------------------------------------------------------------------------------------- the variants


@dataclass(frozen=True)
class Variant:
    """One setting in TRL's terms (`GRPOConfig` fields) and in ours (`Objective` fields), and what the batch gives with it."""

    trl: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    old: bool = True
    rollout: bool = False
    per_token: bool = False
    loss_types: tuple[str, ...] = LOSS_TYPES

    @property
    def problem(self) -> Problem:
        return problem(self.old, self.per_token)


def correction(mode: str, old: bool = True, low: float | None = None, high: float | None = 2.0) -> Variant:
    level, action = mode.split("_")
    return Variant(
        trl={"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high},
        ours={"rollout_correction": RolloutCorrection(level=level, mode=action, low=low, high=high)},
        old=old,
        rollout=True,
        # TRL refuses VESPO with the others when the trainer is made: it multiplies the tokens' ratios itself.
        loss_types=LOSS_TYPES if level == "token" else tuple(t for t in LOSS_TYPES if t != "vespo"),
    )


def together(*variants: Variant) -> Variant:
    return Variant(
        trl={key: value for v in variants for key, value in v.trl.items()},
        ours={key: value for v in variants for key, value in v.ours.items()},
        old=all(v.old for v in variants),
        rollout=any(v.rollout for v in variants),
        per_token=any(v.per_token for v in variants),
        loss_types=tuple(t for t in LOSS_TYPES if all(t in v.loss_types for v in variants)),
    )


PLAIN = Variant()
FIRST = Variant(old=False)
DELTA = Variant({"delta": 1.3}, {"max_ratio": 1.3}, loss_types=CLIPPING)
KL = Variant({"beta": 0.3, "use_bias_correction_kl": False}, {"kl_coef": 0.3})
KL_CORRECTED = Variant({"beta": 0.3, "use_bias_correction_kl": True}, {"kl_coef": 0.3, "kl_ratio_corrected": True})
OFF_POLICY = Variant({"off_policy_mask_threshold": 0.2}, {"off_policy_threshold": 0.2})
UNCORRECTED = Variant({"vllm_importance_sampling_correction": False}, rollout=True)
TOP_ENTROPY = Variant({"top_entropy_quantile": 0.3}, {"top_entropy": 0.3})
ENTROPY = Variant({"entropy_coef": 0.05}, {"entropy_coef": 0.05})
PER_TOKEN = Variant(per_token=True)
EVERYTHING = together(KL_CORRECTED, OFF_POLICY, TOP_ENTROPY, correction("token_truncate", low=0.5, high=1.5))

VARIANTS: dict[str, Variant] = {
    "plain": PLAIN,
    "first update": FIRST,
    "delta": DELTA,
    "kl": KL,
    "kl, first update": together(KL, FIRST),
    "kl corrected": KL_CORRECTED,
    "kl corrected, first update": together(KL_CORRECTED, FIRST),
    "token_truncate": correction("token_truncate"),
    "token_truncate, two bounds": correction("token_truncate", low=0.6, high=1.5),
    "token_truncate, first update": correction("token_truncate", old=False),
    "token_mask": correction("token_mask"),
    "token_mask, two bounds": correction("token_mask", low=0.6, high=1.5),
    "token_mask, first update": correction("token_mask", old=False),
    "sequence_truncate": correction("sequence_truncate"),
    "sequence_truncate, two bounds": correction("sequence_truncate", low=0.6, high=1.5),
    "sequence_truncate, first update": correction("sequence_truncate", old=False),
    "sequence_mask": correction("sequence_mask"),
    "sequence_mask, two bounds": correction("sequence_mask", low=0.2, high=1.5),
    "sequence_mask, first update": correction("sequence_mask", old=False),
    "off-policy by old": OFF_POLICY,
    "off-policy by rollout": together(OFF_POLICY, UNCORRECTED),
    "off-policy by rollout, first update": together(OFF_POLICY, UNCORRECTED, FIRST),
    "off-policy and token_truncate": together(OFF_POLICY, correction("token_truncate")),
    "top entropy": TOP_ENTROPY,
    "top entropy, one token": Variant({"top_entropy_quantile": 0.0}, {"top_entropy": 0.0}),
    "top entropy, first update": together(TOP_ENTROPY, FIRST),
    "entropy bonus": ENTROPY,
    "entropy bonus, first update": together(ENTROPY, FIRST),
    "entropy bonus, kl and sequence_mask": together(ENTROPY, KL_CORRECTED, correction("sequence_mask")),
    "advantages per token": PER_TOKEN,
    "advantages per token, off-policy and token_truncate": together(PER_TOKEN, OFF_POLICY, correction("token_truncate")),
    "advantages per token, sequence_mask, first update": together(PER_TOKEN, correction("sequence_mask", old=False)),
    "advantages per token, top entropy": together(PER_TOKEN, TOP_ENTROPY),
    "everything": EVERYTHING,
    "everything, delta": together(EVERYTHING, DELTA),
    "everything, first update": together(EVERYTHING, FIRST),
}
# Not the defaults, which both sides have in common.
TRL_SETTINGS = {
    "temperature": TEMPERATURE, "epsilon": 0.2, "epsilon_high": 0.25, "max_completion_length": MAX_LENGTH, "sapo_temperature_pos": 0.8,
    "sapo_temperature_neg": 1.4, "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5,
}  # fmt: skip
OUR_SETTINGS = {
    "clip_low": 0.2, "clip_high": 0.25, "sapo_tau_pos": 0.8, "sapo_tau_neg": 1.4, "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5,
    "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5,
}  # fmt: skip
CISPO_BOUND = 1.2  # TRL's epsilon_high of cispo bounds the ratio itself


def our_terms(loss_type: str, mask: Tensor, *, accumulation: int = 1, items: int | None = None) -> tuple[dict[str, Any], LossCounts]:
    """TRL's loss type as `Objective` fields, and what TRL divides by as counts.

    TRL averages over all sequences of the micro-batch, fully masked ones too, and divides by the number of micro-batches; `items` is for
    the window of one optimiser step.
    """
    sequences, tokens = mask.shape[0] * accumulation, int(mask.sum()) * accumulation
    fields: dict[str, Any] = {"policy_loss": loss_type if loss_type in ("cispo", "sapo", "vespo") else "clip"}
    if loss_type in ("grpo", "sapo"):
        fields["aggregation"] = "sequence"
    elif loss_type in ("dr_grpo", "luspo"):
        fields |= {"aggregation": "constant", "constant_length": MAX_LENGTH if loss_type == "dr_grpo" else 1}
    else:
        fields["aggregation"] = "token"
    if loss_type in ("dapo", "cispo", "vespo") and items is not None:
        tokens = items
    if loss_type == "cispo":
        fields["clip_high"] = CISPO_BOUND - 1.0
    return fields, LossCounts(tokens=tokens, sequences=sequences)


# --------------------------------------------------------------------------------------------------------------------- both sides


@dataclass(frozen=True)
class Answer:
    loss: float
    hidden_gradient: Tensor
    weight_gradient: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@functools.cache
def answer_of_trl(loss_type: str, level: str, name: str) -> Answer:
    return trl_answer(loss_type, level, VARIANTS[name])


def trl_answer(loss_type: str, level: str, variant: Variant, **more: Any) -> Answer:
    p = variant.problem
    settings = {**TRL_SETTINGS, "loss_type": loss_type, "importance_sampling_level": level, **variant.trl}
    if loss_type == "cispo":
        settings["epsilon_high"] = CISPO_BOUND
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    logprobs, entropies = linear_logprobs_and_entropies(hidden, weight, p.targets, TEMPERATURE)
    result = trl_loss(logprobs, entropies, p.batch if variant.rollout else replace(p.batch, rollout=None), **settings, **more)
    result.loss.backward()
    return Answer(float(result.loss.detach()), hidden.grad, weight.grad, result.metrics)


def our_answer(loss_type: str, level: str, variant: Variant, **more: Any) -> Answer:
    p = variant.problem
    fields, counts = our_terms(loss_type, p.batch.mask, **more)
    objective = Objective(**{**OUR_SETTINGS, "ratio_level": level, **fields, **variant.ours})
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    result = linear_grpo_loss(
        hidden, weight, p.targets, p.batch.advantages, objective=objective, old_logprobs=p.batch.old,
        ref_logprobs=p.batch.ref if objective.kl_coef else None, rollout_logprobs=p.batch.rollout if variant.rollout else None,
        mask=p.batch.mask, counts=counts, temperature=TEMPERATURE,
    )  # fmt: skip
    result.loss.backward()
    return Answer(float(result.loss.detach()), hidden.grad, weight.grad)


def check(ours: Answer, theirs: Answer) -> None:
    for name in ("hidden_gradient", "weight_gradient"):
        expected = getattr(theirs, name)
        assert float(expected.norm()) > 1e-3, f"{name} of the peer is (nearly) zero: nothing to compare"
        error = relative(getattr(ours, name), expected)
        assert error <= TOLERANCE, f"{name}: {error:.1e} from the peer's, norm {float(expected.norm()):.3g}"
    assert abs(ours.loss - theirs.loss) <= TOLERANCE * max(1.0, abs(theirs.loss)), f"loss {ours.loss}, the peer's {theirs.loss}"


CASES = [(loss_type, level, name) for name, variant in VARIANTS.items() for loss_type in variant.loss_types for level in LEVELS]


# --------------------------------------------------------------------------------------------------------------- the comparisons


@pytest.mark.parametrize(("loss_type", "level", "name"), CASES)
def test_loss_and_gradients_equal_trls(loss_type: str, level: str, name: str) -> None:
    check(our_answer(loss_type, level, VARIANTS[name]), answer_of_trl(loss_type, level, name))


@pytest.mark.parametrize(("loss_type", "level", "name"), CASES)
def test_loss_and_gradients_equal_trls_in_small_chunks(loss_type: str, level: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight rows: the first and the fourth sequence are longer than a chunk, the second and the third share one."""
    monkeypatch.setattr(TorchBackend, "rows_per_chunk", lambda *_, **__: 8)
    check(our_answer(loss_type, level, VARIANTS[name]), answer_of_trl(loss_type, level, name))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_pieces_of_a_step_are_weighted_as_trls(loss_type: str) -> None:
    """Three micro-batches a step, six a generation: 250 loss tokens in the generation are 125 in the step."""
    theirs = trl_answer(loss_type, "token", KL, accumulation=3, items=250, steps_per_generation=6)
    check(our_answer(loss_type, "token", KL, accumulation=3, items=125), theirs)


# ------------------------------------------------------------------------------------------------- that they compare something


@pytest.mark.parametrize(("loss_type", "level", "name"), [c for c in CASES if c[2] != "plain"])
def test_every_variant_changes_trls_answer(loss_type: str, level: str, name: str) -> None:
    got, plain = answer_of_trl(loss_type, level, name), answer_of_trl(loss_type, level, "plain")
    assert max(abs(got.loss - plain.loss), relative(got.hidden_gradient, plain.hidden_gradient)) > 100 * TOLERANCE


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_are_clipped_on_both_sides(level: str) -> None:
    for loss_type in CLIPPING:
        metrics = answer_of_trl(loss_type, level, "plain").metrics
        assert 0.0 < metrics["clip_ratio/low_mean"] < 0.5
        assert 0.0 < metrics["clip_ratio/high_mean"] < 0.5
    assert answer_of_trl("cispo", level, "plain").metrics["cispo_clip_ratio"] > 0.0


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_the_rollout_correction_cuts_some_on_both_sides_and_keeps_some(level: str, old: bool) -> None:
    p = problem(old)
    mask = p.batch.mask
    now, _ = linear_logprobs_and_entropies(p.hidden, p.weight, p.targets, TEMPERATURE)
    before = now if p.batch.old is None else p.batch.old
    ratio = rollout_ratio(before, p.batch.rollout, mask, mode=f"{level}_truncate", low=0.0, high=None)
    moving = ((p.batch.advantages != 0)[:, None] & mask) if level == "token" else ((p.batch.advantages != 0) & mask.any(-1))[:, None]
    assert bool((ratio[moving] > 2.0).any())
    assert bool((ratio[moving] < 0.2).any()) or level == "token"
    assert bool((ratio[moving] < 0.6).any())
    assert bool(((ratio[moving] > 0.6) & (ratio[moving] < 1.5)).any())


def test_the_off_policy_mask_drops_one_sequence_and_rollout_another() -> None:
    """By the drift, sequence 1 goes and 5 stays; by drift and mismatch together, the other way round."""
    p = problem()
    now, _ = linear_logprobs_and_entropies(p.hidden, p.weight, p.targets, TEMPERATURE)
    for behaviour, dropped in ((p.batch.old, 1), (p.batch.rollout, 5)):
        mean = ((behaviour - now).nan_to_num(nan=0.0) * p.batch.mask).sum(-1) / p.batch.mask.sum(-1).clamp(min=1)
        assert ((mean > 0.2) & (p.batch.advantages < 0)).nonzero().flatten().tolist() == [dropped]


# --------------------------------------------------------------------------------------------------- TRL's loss by literal values


def literal(logprobs: Tensor, advantages: list[float], *, mask: Tensor | None = None, **settings: Any) -> tuple[float, Tensor, TRLLoss]:
    """TRL's loss and its gradient in `logprobs`; `old` and `ref` are log-probabilities like `logprobs`."""
    batch = Batch(
        torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask,
        torch.tensor(advantages),
        old=settings.pop("old", None),
        ref=settings.pop("ref", None),
    )
    logprobs = logprobs.clone().requires_grad_()
    result = trl_loss(logprobs, torch.zeros_like(logprobs), batch, **settings)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return float(result.loss.detach()), gradient, result


FOUR_AND_ONE = torch.tensor([[True] * 4, [True] + [False] * 3])


@pytest.mark.parametrize(
    ("advantages", "settings", "expected"),
    [
        ([1.0, -1.0], {"loss_type": "grpo"}, 0.0),
        ([1.0, -1.0], {"loss_type": "dapo"}, -0.6),
        ([1.0, -1.0], {"loss_type": "dr_grpo", "max_completion_length": 8}, -0.1875),
        ([1.0, 1.0], {"loss_type": "dr_grpo", "max_completion_length": 8}, -0.3125),
        ([1.0, 1.0], {"loss_type": "luspo"}, -2.5),
    ],
)
def test_the_oracle_averages(advantages: list[float], settings: dict[str, Any], expected: float) -> None:
    """Lengths 4 and 1, ratio 1 (TRL issues 2995, 3138)."""
    loss, gradient, _ = literal(torch.full((2, 4), -1.0), advantages, mask=FOUR_AND_ONE, **settings)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert (gradient != 0).equal(FOUR_AND_ONE)
    if settings["loss_type"] == "dr_grpo":
        share = -torch.tensor(advantages)[:, None] / 16 * FOUR_AND_ONE
        torch.testing.assert_close(gradient, share)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.3, 1.0, -1.2, 0.0, "clip_ratio/high_mean"),
        (1.3, -1.0, 1.3, 1.3, None),
        (0.7, -1.0, 0.8, 0.0, "clip_ratio/low_mean"),
        (0.7, 1.0, -0.7, -0.7, None),
    ],
)
def test_the_oracle_clips(ratio: float, advantage: float, loss: float, gradient: float, clipped: str | None) -> None:
    """TRL issue 3144."""
    now = torch.tensor([[-1.0]])
    got, slope, result = literal(now, [advantage], old=now - torch.tensor(ratio).log(), loss_type="grpo")
    assert got == pytest.approx(loss, abs=1e-6)
    assert float(slope) == pytest.approx(gradient, abs=1e-6)
    for name in ("clip_ratio/high_mean", "clip_ratio/low_mean"):
        assert result.metrics[name] == (1.0 if name == clipped else 0.0)


@pytest.mark.parametrize(("ref", "plain", "corrected"), [(-2.0, 0.632121, 1.0), (-0.5, -0.648721, -0.5)])
def test_the_oracle_corrects_the_kl_gradient(ref: float, plain: float, corrected: float) -> None:
    """On policy, the corrected gradient is that of the reverse KL, logp - ref (TRL pull request 6503)."""
    for correct, expected in ((False, plain), (True, corrected)):
        settings = {"beta": 1.0, "use_bias_correction_kl": correct, "loss_type": "grpo"}
        _, gradient, _ = literal(torch.tensor([[-1.0]]), [0.0], ref=torch.tensor([[ref]]), **settings)
        assert float(gradient) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("steps", "accumulation"), [(1, 1), (4, 2), (8, 32)])
def test_the_oracle_adds_up_the_pieces_of_a_step(steps: int, accumulation: int) -> None:
    """Ratio 1, advantage 1, five tokens in each micro-batch: a step's losses add up to -1 (TRL issue 5619)."""
    settings = {"steps_per_generation": steps, "accumulation": accumulation, "items": 5 * steps, "loss_type": "dapo"}
    loss, _, _ = literal(torch.full((1, 5), -1.0), [1.0], **settings)
    assert loss * accumulation == pytest.approx(-1.0)


# --------------------------------------------------------------------------------------------------------------------- Liger's loss


LIGER_VARIANTS = ("plain", "kl", "kl corrected", "delta", "token_truncate, two bounds", "sequence_mask, two bounds")
# Not luspo, which Liger averages over padding too, and of sequence ratios those that it accepts.
LIGER_CASES = [
    (loss_type, level, name)
    for loss_type, level, name in CASES
    if name in LIGER_VARIANTS and loss_type != "luspo" and (level == "token" or loss_type not in ("cispo", "sapo", "vespo"))
]


@pytest.mark.parametrize(("loss_type", "level", "name"), LIGER_CASES)
def test_loss_and_gradients_equal_ligers(loss_type: str, level: str, name: str) -> None:
    pytest.importorskip("liger_kernel", reason="the peers extra is not installed: pip install '.[peers]'")
    check(our_answer(loss_type, level, VARIANTS[name]), liger_answer(loss_type, level, VARIANTS[name]))


def liger_answer(loss_type: str, level: str, variant: Variant) -> Answer:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    p, settings = variant.problem, {**TRL_SETTINGS, **variant.trl}
    bound, beta = CISPO_BOUND if loss_type == "cispo" else settings["epsilon_high"], settings.get("beta", 0.0)
    own_names = ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    module = LigerFusedLinearGRPOLoss(
        beta=beta, compiled=False, use_ref_model=bool(beta), epsilon_low=settings["epsilon"], epsilon_high=bound, loss_type=loss_type,
        max_completion_length=MAX_LENGTH, importance_sampling_level=level, temperature=TEMPERATURE, delta=settings.get("delta"),
        use_bias_correction_kl=settings.get("use_bias_correction_kl", False), **{name: settings[name] for name in own_names},
    )  # fmt: skip
    factor = None
    if variant.rollout:
        factor = rollout_ratio(
            p.batch.old, p.batch.rollout, p.batch.mask, mode=settings["vllm_importance_sampling_mode"],
            low=settings["vllm_importance_sampling_clip_min"], high=settings["vllm_importance_sampling_clip_max"],
        )  # fmt: skip
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    loss, _ = module(
        hidden, weight, p.targets, p.batch.mask.long(), p.batch.advantages, ref_per_token_logps=p.batch.ref if beta else None,
        old_per_token_logps=p.batch.old, vllm_is_ratio=factor,
    )  # fmt: skip
    loss.backward()
    return Answer(float(loss.detach()), hidden.grad, weight.grad)
