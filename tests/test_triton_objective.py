"""The objective's mathematics in Triton against `Objective.evaluate` and autograd through it."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective, RolloutCorrection
from grpo_kernels.token_batch import TokenBatch, TokenLoss
from problems import DEVICE, relative

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from grpo_kernels.triton_kernels.objective import computes, token_objective, token_settings, token_terms  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in Triton's interpreter

POLICIES = ("clip", "cispo", "sapo", "reinforce")
VALUES = ("loss", "ratio", "kl", "rollout_ratio", "policy_weight")
FLAGS = ("clipped_low", "clipped_high")


def tokens(
    logp: Tensor, old: Tensor, *, ref: Tensor | None = None, advantages: Tensor | None = None, weight: Tensor | None = None,
    entropy: Tensor | None = None, threshold: float | None = None,
) -> TokenBatch:  # fmt: skip
    """Advantage, weight and entropy 1 unless given."""
    n = logp.numel()
    ones = torch.ones(n, device=logp.device)
    return TokenBatch(
        logprobs=logp,
        old_logprobs=old,
        ref_logprobs=ref,
        rollout_logprobs=None,
        advantages=ones if advantages is None else advantages,
        entropy=ones if entropy is None else entropy,
        sequence_of_row=torch.arange(n, device=logp.device),
        lengths=ones.double(),
        policy_weight=ones if weight is None else weight,
        entropy_threshold=None if threshold is None else torch.tensor(threshold, dtype=torch.float64, device=logp.device),
    )


def random_tokens(n: int, seed: int, *, ref: bool = True, threshold: float | None = None, spread: float = 0.4) -> tuple[TokenBatch, Tensor]:
    """And their shares. Some tokens have advantage 0, some weight 0, some are on policy."""
    g = torch.Generator().manual_seed(seed)

    def some(fraction: float) -> Tensor:
        return (torch.rand(n, generator=g) >= fraction).float()

    logp = -3.0 * torch.randn(n, generator=g).abs()
    old = logp + spread * torch.randn(n, generator=g) * some(0.1)
    batch = tokens(
        logp, old, ref=logp + spread * torch.randn(n, generator=g) if ref else None,
        advantages=torch.randn(n, generator=g) * some(0.2), weight=2.0 * torch.rand(n, generator=g) * some(0.1),
        entropy=torch.rand(n, generator=g), threshold=threshold,
    )  # fmt: skip
    return moved(batch, DEVICE), torch.rand(n, generator=g).double().to(DEVICE) / n


def moved(batch: TokenBatch, to: str | torch.dtype) -> TokenBatch:
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "entropy", "policy_weight")
    if isinstance(to, str):
        names += ("sequence_of_row", "lengths", "entropy_threshold")
    values = {name: getattr(batch, name) for name in names}
    return replace(batch, **{name: value.to(to) for name, value in values.items() if value is not None})


def expected(objective: Objective, batch: TokenBatch, shares: Tensor) -> tuple[TokenLoss, Tensor]:
    """In the dtype of the batch, slopes by autograd."""
    logp = batch.logprobs.clone().requires_grad_()
    result = objective.evaluate(replace(batch, logprobs=logp))
    (slopes,) = torch.autograd.grad((result.loss * shares).sum(), logp, materialize_grads=True)
    return replace(result, loss=result.loss.detach()), slopes


def check(objective: Objective, *problems: tuple[TokenBatch, Tensor]) -> None:
    """Within twice float32 torch's own error, pooled over the problems; flags, and the zeros of losses and slopes, exactly."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for batch, shares in problems:
        (got, got_slopes), (torchs, torchs_slopes) = token_objective(objective, batch, shares), expected(objective, batch, shares)
        exact, exact_slopes = expected(objective, moved(batch, torch.float64), shares)
        for name in FLAGS:
            assert torch.equal(getattr(got, name), getattr(torchs, name)), name
        triples = {name: (getattr(got, name), getattr(torchs, name), getattr(exact, name)) for name in VALUES}
        for name, (ours, theirs, true) in {**triples, "slopes": (got_slopes, torchs_slopes, exact_slopes)}.items():
            assert ours.dtype == theirs.dtype, name
            assert ours.shape == theirs.shape, name
            if name in ("loss", "slopes"):
                assert torch.equal(ours == 0, true == 0), name
            if not true.any():
                assert not ours.any(), name
                continue
            errors.setdefault(name, []).append((relative(ours, true), relative(theirs, true)))
    for name, pairs in errors.items():
        ours, theirs = (sum(pair[i] ** 2 for pair in pairs) ** 0.5 for i in (0, 1))
        # A quarter of a unit in the last place is unavoidable.
        allowed = 2 * max(theirs, len(pairs) ** 0.5 * torch.finfo(torch.float32).eps / 4)
        assert ours <= allowed, f"{name}: {ours:.2e} > {allowed:.2e}"


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_combination_is_as_exact_as_torch(policy: str, kl: str, corrected: bool) -> None:
    objective = Objective(
        policy_loss=policy, kl=kl, kl_coef=0.3, kl_ratio_corrected=corrected, clip_high=0.28, sapo_tau_pos=0.7, sapo_tau_neg=1.5
    )
    check(objective, *(random_tokens(200, seed, threshold=0.3) for seed in range(2)))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_reference_and_threshold(policy: str) -> None:
    check(Objective(policy_loss=policy), *(random_tokens(200, seed, ref=False) for seed in range(2)))


def test_a_reference_without_coefficient_is_only_reported() -> None:
    batch, shares = random_tokens(60, 3)
    check(Objective(), (batch, shares))
    without, slopes = token_objective(Objective(), replace(batch, ref_logprobs=torch.full_like(batch.logprobs, torch.nan)), shares)
    assert without.kl.isnan().all()
    assert without.loss.isfinite().all()
    assert slopes.isfinite().all()


@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_max_ratio_far_off_policy(spread: float) -> None:
    objective = Objective(max_ratio=2.0)
    batch, shares = random_tokens(200, 4, ref=False, spread=spread)
    assert ((batch.logprobs - batch.old_logprobs).exp() > 2.0)[batch.advantages < 0].any()
    check(objective, (batch, shares))


@pytest.mark.parametrize("n", [0, 1, 256, 1000])
def test_any_number_of_tokens(n: int) -> None:
    objective = Objective(kl_coef=0.1)
    batch, shares = random_tokens(n, 5)
    batch = replace(batch, advantages=batch.advantages + 1.0, policy_weight=batch.policy_weight + 1.0)
    if n:
        check(objective, (batch, shares))
    else:
        (got, slopes), (torchs, _) = token_objective(objective, batch, shares), expected(objective, batch, shares)
        assert slopes.shape == (0,)
        for name in VALUES + FLAGS:
            assert getattr(got, name).shape == (0,)
            assert getattr(got, name).dtype == getattr(torchs, name).dtype


def test_any_strides() -> None:
    objective = Objective(kl_coef=0.1, top_entropy=0.5)
    batch, shares = random_tokens(90, 6, threshold=0.4)
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "entropy", "policy_weight")
    strided = replace(batch, **{name: torch.stack([getattr(batch, name)] * 3, 1)[:, 1] for name in names})
    assert not strided.logprobs.is_contiguous()
    check(objective, (strided, torch.stack([shares] * 3, 1)[:, 1]))
    expanded = replace(batch, advantages=torch.ones((), device=DEVICE).expand(90))
    check(objective, (expanded, shares[:1].expand(90)))


def one(objective: Objective, log_ratio: float, advantage: float = 1.0, logp: float = 0.0) -> tuple[TokenLoss, float]:
    batch = tokens(
        torch.tensor([logp], device=DEVICE), torch.tensor([logp - log_ratio], device=DEVICE),
        advantages=torch.tensor([advantage], device=DEVICE),
    )  # fmt: skip
    result, slopes = token_objective(objective, batch, torch.ones(1, dtype=torch.float64, device=DEVICE))
    return result, slopes.item()


def bounded_at(bound: str, ratio: float) -> tuple[Objective, float]:
    """An objective whose bound is exactly there, and the advantage that pushes against it."""
    if bound == "clip_low":
        return Objective(clip_low=1.0 - ratio), -1.0
    if bound == "clip_high":
        return Objective(clip_high=ratio - 1.0), 1.0
    return Objective(clip_high=0.0, max_ratio=ratio), -1.0


@pytest.mark.parametrize(
    ("bound", "log_ratio"),
    [("clip_low", -0.1875), ("clip_low", 0.0), ("clip_high", 0.0), ("clip_high", 0.1875), ("max_ratio", 0.0), ("max_ratio", 0.1875)],
)
def test_on_a_bound_there_is_a_gradient(bound: str, log_ratio: float) -> None:
    ratio = one(Objective(), log_ratio)[0].ratio.item()
    objective, advantage = bounded_at(bound, ratio)
    result, slope = one(objective, log_ratio, advantage)
    assert slope == -advantage * ratio
    assert not result.clipped_low | result.clipped_high


@pytest.mark.parametrize(("bound", "log_ratio"), [("clip_low", -0.1875), ("clip_high", 0.1875), ("max_ratio", 0.1875)])
def test_one_unit_outside_of_a_bound_there_is_none(bound: str, log_ratio: float) -> None:
    ratio = one(Objective(), log_ratio)[0].ratio
    inside = torch.nextafter(ratio, torch.ones_like(ratio)).item()
    objective, advantage = bounded_at(bound, inside)
    result, slope = one(objective, log_ratio, advantage)
    assert slope == 0.0
    assert result.loss.item() == -advantage * inside
    assert result.clipped_low.item() is (bound == "clip_low")
    assert result.clipped_high.item() is (bound != "clip_low")


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("policy", ["clip", "sapo"])
def test_log_ratios_are_held_at_20(policy: str, sign: float) -> None:
    objective = Objective(policy_loss=policy, sapo_tau_neg=1e-3, sapo_tau_pos=1e-3)
    advantage = -sign  # the side that PPO does not clip
    ratio = torch.tensor(20.0 * sign, dtype=torch.float64).exp().item()
    at, slope = one(objective, 20.0 * sign, advantage)
    assert at.ratio.item() == pytest.approx(ratio, rel=1e-6)
    if policy == "clip":
        assert slope == pytest.approx(-advantage * ratio, rel=1e-6)
    elif sign < 0:
        assert slope == pytest.approx(-advantage * ratio, rel=1e-3)
    beyond, slope = one(objective, 20.00001 * sign, advantage)
    assert slope == 0.0
    assert beyond.ratio.item() == at.ratio.item()
    assert beyond.loss.item() == at.loss.item()


def test_exponential_and_k3_are_exact_to_their_rounding() -> None:
    """With old = ref = 0 the differences are exact, so that the errors are those of the functions alone."""
    x = torch.cat([torch.linspace(-20, 20, 1023), torch.linspace(-0.5, 0.5, 501), torch.tensor([1e-8, -1e-6, 1e-4, 1e-3])]).to(DEVICE)
    zero = torch.zeros_like(x)
    result, slopes = token_objective(Objective(kl_coef=1.0), tokens(-x, zero, ref=zero, advantages=zero), torch.ones_like(x))
    d = x.double()

    def worst(got: Tensor, true: Tensor) -> float:
        return ((got.double() - true).abs() / true.abs())[true != 0].max().item()

    assert worst(result.ratio, torch.exp(-d)) < 1.5e-7
    assert worst(-slopes, torch.expm1(d)) < 2e-7
    # float64's own expm1(d) - d has no digits left at 1e-8.
    near = d.square() * (0.5 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    k3 = torch.where(d.abs() < 0.01, near, torch.expm1(d) - d)
    assert worst(result.kl[d.abs() < 0.34], k3[d.abs() < 0.34]) < 2e-7
    assert worst(result.kl, k3) < 1.2e-6


@pytest.mark.parametrize(("kl", "corrected"), [("k1", False), ("k2", True), ("k3", False), ("k3", True)])
@pytest.mark.parametrize("policy", POLICIES)
def test_values_that_are_not_finite(policy: str, kl: str, corrected: bool) -> None:
    """NaN and inf come through, or do not, as in evaluate. But a token without advantage or weight has no policy slope at all, where
    autograd's 0 * NaN depends on the kind of the loss."""
    inf, nan = torch.inf, torch.nan
    logprobs = [-inf, -30.0, -1.0, nan]
    every = itertools.product(logprobs, logprobs, [-inf, -1.0, nan], [-1.0, 0.0, 1.0], [0.0, 1.0], [0.0, 0.5, nan])
    logp, old, ref, advantages, weight, entropy = (torch.tensor(column, device=DEVICE) for column in zip(*every, strict=True))
    objective = Objective(policy_loss=policy, kl=kl, kl_coef=0.5, kl_ratio_corrected=corrected)
    batch = tokens(logp, old, ref=ref, advantages=advantages, weight=weight, entropy=entropy, threshold=0.5)
    shares = torch.ones_like(logp)
    (got, slopes), (want, want_slopes) = token_objective(objective, batch, shares), expected(objective, batch, shares)
    counts = (advantages != 0) & (weight != 0) & (entropy >= 0.5)
    only_kl = replace(batch, advantages=torch.zeros_like(logp))
    _, kl_slopes = expected(replace(objective, policy_loss="reinforce"), only_kl, shares)
    for name in (*VALUES, *FLAGS):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=0, equal_nan=True, msg=name)
    torch.testing.assert_close(slopes, torch.where(counts, want_slopes, kl_slopes), rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_token_without_weight_or_advantage_is_exactly_zero(policy: str) -> None:
    logp = torch.full((3,), -torch.inf, device=DEVICE)
    batch = tokens(
        logp, logp.clone(), advantages=torch.tensor([0.0, 1.0, 1.0], device=DEVICE), weight=torch.tensor([1.0, 0.0, 1.0], device=DEVICE),
        entropy=torch.tensor([1.0, 1.0, 0.0], device=DEVICE), threshold=0.5,
    )  # fmt: skip
    result, slopes = token_objective(Objective(policy_loss=policy), batch, torch.ones(3, device=DEVICE))
    assert result.loss.tolist() == [0.0, 0.0, 0.0]
    assert slopes.tolist() == [0.0, 0.0, 0.0]
    assert result.policy_weight.tolist() == [1.0, 0.0, 0.0]


@triton.jit
def _scalar_kernel(
    out, logp_ptr, advantage_ptr, low, high, max_ratio, tau_pos, tau_neg, kl_coef,
    POLICY: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    HAS_MAX_RATIO: tl.constexpr, KL_RATIO_CORRECTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    logp = tl.load(logp_ptr + token)
    loss, slope, ratio, kl, clipped_low, clipped_high, weight = token_terms(
        logp, None, None, None, tl.load(advantage_ptr + token), 1.0, None, low, high, max_ratio, tau_pos, tau_neg, kl_coef,
        POLICY, KL, HAS_OLD, HAS_REF, HAS_THRESHOLD, HAS_MAX_RATIO, KL_RATIO_CORRECTED,
    )  # fmt: skip
    tl.store(out + 7 * token, loss)
    tl.store(out + 7 * token + 1, slope)
    tl.store(out + 7 * token + 2, ratio)
    tl.store(out + 7 * token + 3, kl)
    tl.store(out + 7 * token + 4, clipped_low.to(tl.float32))
    tl.store(out + 7 * token + 5, clipped_high.to(tl.float32))
    tl.store(out + 7 * token + 6, weight)


@pytest.mark.parametrize("policy", POLICIES)
def test_scalars_and_no_old_log_probabilities(policy: str) -> None:
    """As a row kernel calls it: one token per program, and nothing in the place of what is not there."""
    objective = Objective(policy_loss=policy)
    logp = torch.tensor([-1.0, -0.5, -torch.inf], device=DEVICE)
    advantages = torch.tensor([2.0, -3.0, 1.0], device=DEVICE)
    out = torch.empty(3, 7, device=DEVICE)
    _scalar_kernel[(3,)](out, logp, advantages, **token_settings(objective, old=False, ref=False, threshold=False))
    want, slopes = expected(objective, tokens(logp, logp.clone(), advantages=advantages), torch.ones_like(logp))
    columns = (want.loss, slopes, want.ratio, want.kl, want.clipped_low, want.clipped_high, want.policy_weight)
    torch.testing.assert_close(out, torch.stack([column.float() for column in columns], 1), equal_nan=True)


def test_coefficients_are_runtime_floats() -> None:
    """An int would be compiled in: a schedule of coefficients would then compile a kernel per step."""
    objective = Objective(clip_low=0, clip_high=1, max_ratio=3, sapo_tau_pos=1, sapo_tau_neg=2, kl_coef=1)
    settings = token_settings(objective, old=True, ref=True, threshold=False)
    numbers = {name: value for name, value in settings.items() if name.islower()}
    assert numbers == {"low": 1.0, "high": 2.0, "max_ratio": 3.0, "tau_pos": 1.0, "tau_neg": 2.0, "kl_coef": 1.0}
    assert all(type(value) is float for value in numbers.values())
    annotations = inspect.get_annotations(token_terms.fn)
    assert not annotations.keys() & numbers.keys()
    assert annotations.keys() == settings.keys() - numbers.keys()
    other = token_settings(replace(objective, clip_low=0.5, kl_coef=0.25, max_ratio=2.5), old=True, ref=True, threshold=False)
    assert {name: value for name, value in other.items() if name.isupper()} == {
        name: value for name, value in settings.items() if name.isupper()
    }


@pytest.mark.parametrize(
    ("objective", "answer"),
    [
        (Objective.dapo(kl_coef=0.1), True),
        (Objective.cispo(), True),
        (Objective.sapo(top_entropy=0.2), True),
        (Objective.rloo(), True),
        (Objective.gspo(), False),
        (Objective.gmpo(), False),
        (Objective.vespo(), False),
        (Objective.dapo(rollout_correction=RolloutCorrection()), False),
        (Objective.dapo(off_policy_threshold=0.1), False),
        (Objective(policy_loss=lambda batch: -batch.logprobs), False),
    ],
)
def test_computes(objective: Objective, answer: bool) -> None:
    assert computes(objective) is answer
