"""The Triton row kernels against float64 and against torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective, grpo_loss
from grpo_kernels.backends.base import ChunkRows, LogitSlopes, Sweep
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.logits import SelectedJob
from grpo_kernels.loss_rows import LossInputs, LossRows
from problems import DEVICE, relative

pytest.importorskip("triton", reason="triton is for Linux only")
from grpo_kernels.triton_kernels import computes, rows

NAMES = ("logp", "entropy", "complement")
# The interpreter computes in numpy both sides of what a `where` chooses from.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS = ("_row_statistics_kernel", "_row_gradient_kernel", "_row_loss_kernel", "_anchor_rows_kernel", "_products_gradient_kernel")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def heat(n: int) -> Tensor:
    """Temperatures whose inverse float32 holds, so that all precisions see the same ones."""
    return torch.tensor([1.0, 0.5, 2.0, 1.0], device=DEVICE).repeat(n // 4 + 1)[:n]


class Exact:
    """Of [N, V] logits in float64."""

    def __init__(self, logits: Tensor, targets: Tensor, temperature: Tensor) -> None:
        self.at = torch.arange(targets.numel(), device=targets.device)
        self.targets, self.inverse = targets, temperature.double().reciprocal()
        self.log_p = torch.log_softmax(logits.double() * self.inverse[:, None], 1)
        self.p = self.log_p.exp()
        self.logp = self.log_p[self.at, targets]
        self.entropy = -(self.p * self.log_p.clamp(min=-1e30)).sum(1)
        others = self.p.clone()
        others[self.at, targets] = 0.0
        self.complement = others.sum(1)

    def gradient(self, slope: Tensor, entropy_slope: Tensor | None) -> Tensor:
        c, e = slope.double()[:, None], 0.0 if entropy_slope is None else entropy_slope.double()[:, None]
        gradient = -self.p * (c + e * (self.log_p.clamp(min=-1e30) + self.entropy[:, None]))
        gradient[self.at, self.targets] += slope.double()
        at_target = slope.double() * self.complement
        if entropy_slope is not None:
            at_target -= entropy_slope.double() * self.logp.exp() * (self.logp.clamp(min=-1e30) + self.entropy)
        gradient[self.at, self.targets] = at_target
        return gradient * self.inverse[:, None]


def slots_of(mask: Tensor) -> Tensor:
    return torch.where(mask, mask.cumsum(0) - 1, -1)


def by_torch(
    logits: Tensor, targets: Tensor, mask: Tensor, temperature: Tensor, slope: Tensor, entropy_slope: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The statistics [5, N] and the gradient of the existing path; all [N]."""
    job = SelectedJob.of(logits, targets, mask, temperature, "torch")
    results = job.forward(logits)
    return results, job.backward(logits, results, slope, entropy_slope, overwrite=False)


def check(logits: Tensor, targets: Tensor, *, entropy: bool = True) -> None:
    """Statistics and gradients, in and out of place, of [N, V] logits that all count: at most twice torch's own error."""
    n = logits.shape[0]
    temperature, slope, entropy_slope = heat(n), randn(n, seed=5), randn(n, seed=6) if entropy else None
    exact = Exact(logits, targets, temperature)
    everything = torch.ones(n, dtype=torch.bool, device=DEVICE)
    theirs, their_gradient = by_torch(logits, targets, everything, temperature, slope, entropy_slope)
    inverse = temperature.reciprocal()
    statistics = rows.row_statistics(logits, slots_of(everything), targets, inverse)
    # Torch adds up in float64; float32 sums of distances up to 60 or so are rounded at 1e-6.
    for name, got, their, least in zip(NAMES, statistics, theirs, (5e-6, 5e-6, 1e-6), strict=False):
        want = getattr(exact, name)
        error, allowed = float((got.double() - want).abs().max()), 2 * max(float((their.double() - want).abs().max()), least)
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
    out = torch.full_like(logits, torch.nan)
    rows.row_gradient(logits, slots_of(everything), targets, inverse, statistics, slope, entropy_slope, out)
    want = exact.gradient(slope, entropy_slope)
    error, allowed = relative(out, want), 2 * max(relative(their_gradient, want), torch.finfo(logits.dtype).eps / 4)
    assert error <= allowed, f"gradient: {error:.2e} > {allowed:.2e}"
    rows.row_gradient(logits, slots_of(everything), targets, inverse, statistics, slope, entropy_slope, logits)
    assert torch.equal(logits, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [2, 1000, 9001])
@pytest.mark.parametrize("entropy", [False, True])
def test_every_dtype(dtype: torch.dtype, vocabulary: int, entropy: bool) -> None:
    check((randn(5, vocabulary) * 4).to(dtype), randint(vocabulary, 5), entropy=entropy)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(50257, torch.bfloat16), (129920, torch.float32), (151936, torch.bfloat16), (151936, torch.float32)]
)
def test_real_vocabularies(vocabulary: int, dtype: torch.dtype) -> None:
    check((randn(2, vocabulary) * 3).to(dtype), torch.tensor([vocabulary - 1, 4096], device=DEVICE))


@pytest.mark.parametrize("vocabulary", [1000, 50257])
def test_all_logits_very_negative(vocabulary: int) -> None:
    """Columns outside of the vocabulary that were taken for logits of 0 would be all of the probability."""
    check(-15.0 + 0.1 * randn(2, vocabulary), randint(vocabulary, 2))


def test_a_vocabulary_of_one() -> None:
    logits, one = randn(2, 1), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    slots, ones = torch.arange(2, device=DEVICE), torch.ones(2, device=DEVICE)
    statistics = rows.row_statistics(logits, slots, one, ones)
    assert torch.equal(statistics[:4], torch.zeros_like(statistics[:4]))
    assert torch.equal(statistics[4], logits[:, 0])
    rows.row_gradient(logits, slots, one, ones, statistics, ones, ones, logits)
    assert torch.equal(logits, torch.zeros_like(logits))


def test_a_certain_target_keeps_the_digits_of_its_complement() -> None:
    logits = randn(6, 5000)
    targets = randint(5000, 6)
    logits[torch.arange(6), targets] = torch.tensor([12.0, 20.0, 30.0, 40.0, 60.0, 80.0], device=DEVICE)
    exact = Exact(logits, targets, torch.ones(6, device=DEVICE))
    slots, ones = torch.arange(6, device=DEVICE), torch.ones(6, device=DEVICE)
    statistics = rows.row_statistics(logits, slots, targets, ones)
    # Between 1e-2 and 1e-31. float64's own log-softmax has lost the log-probability of the last ones.
    torch.testing.assert_close(statistics[2].double(), exact.complement, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(-statistics[0].double(), torch.log1p(exact.complement / (1 - exact.complement)), rtol=1e-5, atol=0.0)
    mass = -(exact.p * exact.log_p)
    mass[torch.arange(6), targets] = torch.log1p(exact.complement / (1 - exact.complement)) * (1 - exact.complement)
    torch.testing.assert_close(statistics[1].double(), mass.sum(1), rtol=1e-4, atol=0.0)
    rows.row_gradient(logits, slots, targets, ones, statistics, ones, None, logits)
    torch.testing.assert_close(logits[torch.arange(6), targets].double(), exact.complement, rtol=1e-5, atol=0.0)


def test_unlikely_targets() -> None:
    """p_y = 1e-26, 1e-30 and e^-200, the last two redone with the row's maximum as the offset, and a target of -inf."""
    logits = randn(5, 3000)
    targets = randint(3000, 5)
    depth = torch.tensor([0.0, 52.0, 61.0, 192.0, torch.inf], device=DEVICE)
    logits[torch.arange(5), targets] -= depth
    check(logits[:4].clone(), targets[:4])
    slots, ones, slope = torch.arange(5, device=DEVICE), torch.ones(5, device=DEVICE), randn(5, seed=1)
    statistics = rows.row_statistics(logits, slots, targets, ones)
    assert torch.equal(statistics[4, :2], logits[torch.arange(2), targets[:2]])
    assert torch.equal(statistics[4, 2:], logits[2:].amax(1))
    assert statistics[0, 4] == -math.inf
    assert statistics[2, 4] == 1.0
    out = torch.empty_like(logits)
    rows.row_gradient(logits, slots, targets, ones, statistics, slope, slope, out)
    assert bool(out.isfinite().all())
    exact = Exact(logits, targets, ones)
    assert relative(out, exact.gradient(slope, slope)) <= 1e-6
    assert abs(float(statistics[1, 4]) - float(exact.entropy[4])) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_minus_infinity_is_a_token_that_cannot_be(dtype: torch.dtype) -> None:
    logits = (randn(4, 5000) * 3).to(dtype)
    targets = randint(5000, 4)
    never = randn(4, 5000, seed=3) > 0
    never[torch.arange(4), targets] = False
    logits[never] = -math.inf
    check(logits, targets)
    assert torch.equal(logits[never], torch.zeros_like(logits[never]))


def test_nan_and_infinity_stay_in_their_rows() -> None:
    logits, targets = randn(5, 5000), randint(5000, 5)
    targets[2] = 17
    slots, ones, slope = torch.arange(5, device=DEVICE), torch.ones(5, device=DEVICE), randn(5, seed=1)
    clean = rows.row_statistics(logits, slots, targets, ones)
    wanted = torch.empty_like(logits)
    rows.row_gradient(logits, slots, targets, ones, clean, slope, None, wanted)
    logits[1, 4999], logits[2, 17], logits[3, 0] = math.nan, math.nan, math.inf
    statistics = rows.row_statistics(logits, slots, targets, ones)
    slope[3] = 0.0  # as of a loss that was clamped; the NaN must be seen all the same
    rows.row_gradient(logits, slots, targets, ones, statistics, slope, None, logits)
    bad, good = slice(1, 4), torch.tensor([0, 4], device=DEVICE)
    assert bool(statistics[:4, bad].isnan().all())
    assert bool(logits[bad].isnan().all())
    assert torch.equal(statistics[:, good], clean[:, good])
    assert torch.equal(logits[good], wanted[good])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_masked_row_is_never_read_and_its_gradient_is_zero(dtype: torch.dtype, inplace: bool) -> None:
    logits = (randn(6, 4500) * 3).to(dtype)
    mask = torch.tensor([True, False, True, True, False, True], device=DEVICE)
    logits[~mask] = math.nan
    slots, n = slots_of(mask), 4
    targets, ones, slope = randint(4500, n), torch.ones(n, device=DEVICE), randn(n, seed=1)
    slope[1] = 0.0
    exact = Exact(logits[mask], targets, ones).gradient(slope, None)
    statistics = rows.row_statistics(logits, slots, targets, ones)
    out = logits if inplace else torch.full_like(logits, math.nan)
    rows.row_gradient(logits, slots, targets, ones, statistics, slope, None, out)
    still = ~mask
    still[2] = True
    assert torch.equal(out[still], torch.zeros_like(out[still]))
    assert relative(out[mask], exact) <= 2 * torch.finfo(dtype).eps


def test_no_rows_one_row_and_none_that_counts() -> None:
    nothing, empty = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.empty(0, device=DEVICE)
    assert rows.row_statistics(randn(0, 7), nothing, nothing, empty).shape == (5, 0)
    rows.row_gradient(randn(0, 7), nothing, nothing, empty, torch.empty(5, 0, device=DEVICE), empty, None, randn(0, 7))
    check(randn(1, 7), randint(7, 1))
    logits = torch.full((3, 7), math.nan, device=DEVICE)
    slots = torch.full((3,), -1, device=DEVICE)
    assert rows.row_statistics(logits, slots, nothing, empty).shape == (5, 0)
    rows.row_gradient(logits, slots, nothing, empty, torch.empty(5, 0, device=DEVICE), empty, None, logits)
    assert torch.equal(logits, torch.zeros_like(logits))
    for store in (None, torch.bfloat16):
        others, weighted = rows.anchor_rows(randn(0, 64), 60, nothing, empty, empty, bias=None, softcap=None, store=store)
        assert others.shape == weighted.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_slice_of_padded_rows_is_not_copied(dtype: torch.dtype, inplace: bool) -> None:
    """logits[:, :-1]; and rows that lie in a wider tensor, at odd places."""
    for whole, cut in (((2, 4, 1008), (slice(None), slice(-1))), ((2, 3, 1008), (slice(None), slice(None), slice(3, 1004)))):
        full = (randn(*whole) * 3).to(dtype)
        before = full.clone()
        logits = full[cut]
        vocabulary, n = logits.shape[-1], 6
        targets, ones, slope = randint(vocabulary, n), torch.ones(n, device=DEVICE), randn(n, seed=1)
        slots = torch.arange(n, device=DEVICE)
        exact = Exact(logits.reshape(-1, vocabulary), targets, ones)
        statistics = rows.row_statistics(logits, slots, targets, ones)
        torch.testing.assert_close(statistics[0].double(), exact.logp, rtol=0.0, atol=1e-5)
        out = logits if inplace else torch.empty_like(logits)
        rows.row_gradient(logits, slots, targets, ones, statistics, slope, None, out)
        assert relative(out.reshape(-1, vocabulary), exact.gradient(slope, None)) <= 2 * torch.finfo(dtype).eps
        outside = torch.ones_like(full, dtype=torch.bool)
        outside[cut] = False
        assert torch.equal(full[outside], before[outside])
        assert inplace or torch.equal(full, before)


def test_seventy_thousand_rows() -> None:
    """More than the 65535 programs of a grid's other dimensions."""
    slots = torch.full((70_000,), -1, device=DEVICE)
    at = torch.tensor([0, 65_535, 65_536, 69_999], device=DEVICE)
    slots[at] = torch.arange(4, device=DEVICE)
    logits, targets, ones = randn(70_000, 3), randint(3, 4), torch.ones(4, device=DEVICE)
    statistics = rows.row_statistics(logits, slots, targets, ones)
    torch.testing.assert_close(statistics[0].double(), Exact(logits[at], targets, ones).logp, rtol=0.0, atol=1e-6)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...]]]:
    """Launches' grids and arguments, in place of launches."""
    launches: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launches.append((grid, args))

    for name in KERNELS:
        monkeypatch.setattr(rows, name, Recorder())
    return launches


@pytest.mark.parametrize("softcap", [20, np.float32(20.0), np.int64(20), 20.0])
def test_any_number_is_a_softcap(softcap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a float as an argument, compiles an int in, and refuses numpy's."""
    launches = recorded(monkeypatch)
    x, f, i = torch.empty(2, 64), torch.empty(2), torch.empty(2, dtype=torch.int64)
    rows.anchor_rows(x, 64, i, f, f, bias=None, softcap=softcap, store=None)
    rows.products_gradient(x, 64, i, f, f, f, f, f, f, bias=None, softcap=softcap, store=torch.float32)
    for _, arguments in launches:
        assert [argument for argument in arguments if type(argument) is float] == [20.0]
    assert len(launches) == 2


def test_grids_have_one_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch)
    n = 70_000
    x, f, i, statistics = torch.empty(n, 64), torch.empty(n), torch.empty(n, dtype=torch.int64), torch.empty(5, n)
    rows.row_statistics(x, i, i, f)
    rows.row_gradient(x.view(2, n // 2, 64), i, i, f, statistics, f, None, x.view(2, n // 2, 64))
    run_row_loss(x, i, i, f, Objective.dapo(), f, f, out=x)
    rows.anchor_rows(x, 64, i, f, f, bias=None, softcap=None, store=None)
    rows.products_gradient(x, 64, i, f, f, f, f, f, f, bias=None, softcap=None, store=torch.float32)
    assert [grid for grid, _ in launches] == [(n,)] * 5


def test_rows_beyond_two_to_the_31_elements() -> None:
    """Two rows of a tensor of 4.3 GB, of which a CPU's memory is only reserved."""
    far, vocabulary = 2**31 + 16, 1000
    logits = torch.empty(far + vocabulary, dtype=torch.bfloat16, device=DEVICE).as_strided((2, vocabulary), (far, 1))
    logits.copy_(randn(2, vocabulary))
    check(logits, randint(vocabulary, 2))
    deep = logits.view(2, 1, vocabulary)
    deep.copy_(randn(2, 1, vocabulary))
    targets, ones = randint(vocabulary, 2), torch.ones(2, device=DEVICE)
    statistics = rows.row_statistics(deep, torch.arange(2, device=DEVICE), targets, ones)
    torch.testing.assert_close(statistics[0].double(), Exact(deep[:, 0], targets, ones).logp, rtol=0.0, atol=1e-5)


# The fused loss.


def run_row_loss(
    logits: Tensor, slots: Tensor, targets: Tensor, inverse: Tensor, objective: Objective, advantages: Tensor, shares: Tensor,
    *, out: Tensor | None, **more: Any,
) -> Any:  # fmt: skip
    given: dict[str, Any] = {
        "policy_weight": torch.ones_like(advantages), "old_logprobs": None, "ref_logprobs": None, "entropy_threshold": None,
        "bonus": torch.zeros_like(shares),
    }  # fmt: skip
    return rows.row_loss(logits, slots, targets, inverse, objective, advantages=advantages, shares=shares, out=out, **(given | more))


def of_rows(loss_rows: LossRows, logits: Tensor, targets: Tensor, temperature: Tensor, out: Tensor | None) -> Any:
    index = loss_rows.index
    slots = slots_of(loss_rows.moves().reshape(-1))
    return run_row_loss(
        logits, slots, targets.reshape(-1)[index], temperature.reshape(-1)[index].reciprocal(), loss_rows.objective, loss_rows.advantages,
        loss_rows.shares, out=out, policy_weight=loss_rows.policy_weight, old_logprobs=loss_rows.old, ref_logprobs=loss_rows.ref,
        entropy_threshold=loss_rows.entropy_threshold, bonus=loss_rows.bonus,
    )  # fmt: skip


OBJECTIVES = {
    "grpo": Objective.grpo(kl_coef=0.04),
    "dapo": Objective.dapo(),
    "dual clip": Objective(max_ratio=1.3),
    "dr_grpo": Objective.dr_grpo(constant_length=20, kl_coef=0.1, kl="k1"),
    "k2": Objective.grpo(kl="k2", kl_coef=0.5),
    "ratio-corrected": Objective.grpo(kl_coef=0.5, kl_ratio_corrected=True),
    "cispo": Objective.cispo(max_weight=1.1),
    "sapo": Objective.sapo(),
    "reinforce": Objective.reinforce(),
    "rloo": Objective.rloo(kl_coef=0.1),
    "entropy bonus": Objective.dapo(entropy_coef=0.1),
    "top entropy": Objective.dapo(top_entropy=0.5),
}


@pytest.mark.parametrize(
    ("name", "old", "dtype"),
    [(name, True, torch.float32) for name in OBJECTIVES]
    + [(name, False, torch.float32) for name in ("dual clip", "cispo", "sapo", "ratio-corrected")]
    + [(name, True, torch.bfloat16) for name in ("grpo", "entropy bonus")],
)
def test_the_fused_loss_against_torch(name: str, old: bool, dtype: torch.dtype) -> None:
    objective, shape, vocabulary = OBJECTIVES[name], (2, 12 if name == "top entropy" else 4), 1100  # it drops half of the rows
    assert computes(objective)
    logits = (randn(*shape, vocabulary) * 3).to(dtype)
    targets = randint(vocabulary, *shape)
    temperature = heat(shape[0] * shape[1]).view(shape)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.2
    truth = Exact(logits.reshape(-1, vocabulary), targets.reshape(-1), temperature.reshape(-1))
    now = truth.logp.float().view(shape)
    advantages = randn(*shape, seed=2)
    advantages[0, 1] = 0.0
    given: dict[str, Any] = {
        "objective": objective, "mask": mask, "old_logprobs": now + 0.3 * randn(*shape, seed=3) if old else None,
        "ref_logprobs": now + 0.3 * randn(*shape, seed=4) if objective.kl_coef else None,
        "entropy_threshold": float(truth.entropy.median()) - 1e-3 if objective.top_entropy < 1 else None,
    }  # fmt: skip

    def torchs(leaf: Tensor) -> tuple[Any, Tensor]:
        leaf = leaf.clone().requires_grad_()
        result = grpo_loss(leaf, targets, advantages, temperature=temperature, backend="torch", **given)
        result.loss.backward()
        assert leaf.grad is not None
        return result, leaf.grad

    (exact, gradient), (theirs, their_gradient) = torchs(logits.double()), torchs(logits)
    loss_rows = LossRows.of(targets, LossInputs(advantages=advantages, **given))
    out = torch.full_like(logits, math.nan)
    statistics, tokens = of_rows(loss_rows, logits, targets, temperature, out)
    if name == "grpo":  # without a gradient, and in place
        forward, forward_tokens = of_rows(loss_rows, logits, targets, temperature, None)
        assert torch.equal(statistics, forward)
        assert torch.equal(tokens.loss, forward_tokens.loss)
        of_rows(loss_rows, logits, targets, temperature, logits)
        assert torch.equal(logits, out)
    error, allowed = relative(out, gradient), 2 * max(relative(their_gradient, gradient), torch.finfo(dtype).eps / 4)
    assert error <= allowed, f"gradient: {error:.2e} > {allowed:.2e}"
    assert torch.equal(out[~loss_rows.moves()], torch.zeros_like(out[~loss_rows.moves()]))
    loss = (tokens.loss * loss_rows.shares).sum() - (statistics[1] * loss_rows.bonus).sum()
    true_loss = float(exact.loss.detach())
    assert abs(float(loss) - true_loss) <= max(2 * abs(float(theirs.loss.detach()) - true_loss), 1e-5)
    fields = loss_rows.fields(statistics[0], statistics[1], tokens)
    for field in ("logprobs", "entropy", "ratio", "kl", "rollout_ratio", "policy_weight"):
        torch.testing.assert_close(fields[field].double(), getattr(exact, field).double(), rtol=2e-5, atol=1e-5, msg=field)
    for field in ("clipped_low", "clipped_high", "computed"):
        assert torch.equal(fields[field], getattr(exact, field)), field


def test_the_fused_loss_of_hard_rows() -> None:
    """Rows in place of several blocks: a target 200 nats down, one of -inf without advantage, NaN, and a masked row of NaN."""
    n, vocabulary = 5, 9000
    logits, targets, ones = randn(n, vocabulary), randint(vocabulary, n), torch.ones(4, device=DEVICE)
    mask = torch.tensor([True, True, False, True, True], device=DEVICE)
    logits[0, targets[0]] -= 200.0
    logits[1, targets[1]] = -math.inf
    logits[2:4] = math.nan
    advantages = torch.tensor([1.0, 0.0, 1.0, 2.0], device=DEVICE)
    shares = torch.full((4,), 0.25, dtype=torch.float64, device=DEVICE)
    exact = Exact(logits, targets, torch.ones(n, device=DEVICE))
    want = exact.gradient(torch.tensor([-0.25, 0.0, 0.0, 0.0, -0.5], device=DEVICE), None)
    statistics, tokens = run_row_loss(logits, slots_of(mask), targets[mask], ones, Objective.reinforce(), advantages, shares, out=logits)
    assert relative(logits[[0, 4]], want[[0, 4]]) <= 1e-6
    assert torch.equal(logits[1:3], torch.zeros_like(logits[1:3]))
    assert bool(logits[3].isnan().all())
    torch.testing.assert_close(statistics[0, [0, 3]].double(), exact.logp[[0, 4]], rtol=1e-6, atol=0.0)
    assert tokens.loss[1] == 0.0
    assert bool(tokens.loss[2].isnan())


# Chunks of products.


def chunk(n: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products whose unused columns are NaN, targets of which one is elsewhere, inverse temperatures and offsets."""
    padded = -(-vocabulary // 64) * 64
    products = torch.full((n, padded), math.nan, device=DEVICE)
    products[:, :vocabulary] = 3 * randn(n, vocabulary, seed=seed)
    targets = randint(vocabulary, n, seed=seed + 1)
    targets[1] = -1
    inverse = heat(n).reciprocal()
    offset = products[torch.arange(n), targets.clamp(min=0)] * inverse
    return products, targets, inverse, offset


def swept(
    products: Tensor, bias: Tensor | None, softcap: float | None, targets: Tensor, inverse: Tensor, offset: Tensor, *, keep_distances: bool
) -> Sweep:
    """What the torch backend makes of the products [n, V], in their dtype."""
    tile = products.t().contiguous()
    sums = torch.zeros(products.shape[0], dtype=torch.float64, device=products.device)
    result = Sweep(sums, sums.clone(), tile, None)
    backend, given = TorchBackend(products.device), ChunkRows(products, targets, inverse.to(products.dtype))
    backend._anchor(
        tile, 0, None if bias is None else bias.to(products.dtype), softcap, given, offset.to(products.dtype), result,
        keep_distances=keep_distances,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("store", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("vocabulary", "with_bias", "softcap"), [(1000, False, None), (1024, True, None), (9001, True, 20.0), (50257, False, None)]
)
def test_anchor_rows(vocabulary: int, with_bias: bool, softcap: float | None, store: torch.dtype | None) -> None:
    products, targets, inverse, offset = chunk(4, vocabulary)
    bias = randn(vocabulary, seed=7) if with_bias else None
    used = products[:, :vocabulary].clone()
    exact = swept(used.double(), bias, softcap, targets, inverse, offset, keep_distances=False)
    theirs = swept(used, bias, softcap, targets, inverse, offset, keep_distances=False)
    others, weighted = rows.anchor_rows(products, vocabulary, targets, inverse, offset, bias=bias, softcap=softcap, store=store)
    # Torch adds up in float64.
    for name, got in (("others", others), ("weighted", weighted)):
        want = getattr(exact, name)
        assert relative(got, want) <= 2 * max(relative(getattr(theirs, name), want), 2e-7), name
    if store is None:
        assert torch.equal(products[:, :vocabulary], used)
        return
    kept = products.view(store)[:, : products.shape[1]]
    assert torch.equal(kept[:, vocabulary:], torch.zeros_like(kept[:, vocabulary:]))
    here = targets >= 0
    assert torch.equal(kept[here, targets[here]], torch.zeros_like(kept[here, targets[here]]))
    assert exact.kept is not None
    assert theirs.kept is not None
    want = exact.kept.t()
    assert relative(kept[:, :vocabulary], want) <= 2 * max(relative(theirs.kept.t().to(store), want), torch.finfo(store).eps / 4)


@pytest.mark.parametrize("store", [None, torch.bfloat16, torch.float32])
def test_anchor_rows_says_which_rows_to_redo(store: torch.dtype | None) -> None:
    products, targets, inverse, offset = chunk(6, 5000)
    offset[0] -= 300.0
    offset[2] = -math.inf
    products[3, 4999] = math.nan
    products[4, :2500] = -math.inf
    offset[4] = 0.0
    want = torch.exp(products[4, :5000].double() * inverse[4] - offset[4])
    want[targets[4]] = 0.0
    others, weighted = rows.anchor_rows(products, 5000, targets, inverse, offset, bias=None, softcap=None, store=store)
    for row in (0, 2):
        assert math.exp(60.0) <= float(others[row]) < math.inf
        assert bool(weighted[row].isfinite())
        assert store is None or bool(products.view(store)[row, :5056].isfinite().all())
    assert bool(others[3].isnan())
    assert bool(weighted[3].isnan())
    torch.testing.assert_close(others[4].double(), want.sum(), rtol=1e-5, atol=0.0)
    assert bool(weighted[4].isfinite())
    assert store is None or torch.equal(products.view(store)[4, :2500], torch.zeros_like(products.view(store)[4, :2500]))


@pytest.mark.parametrize("store", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "with_bias", "softcap"), [(1000, False, None), (1024, True, 20.0), (9001, True, 5.0)])
def test_products_gradient(vocabulary: int, with_bias: bool, softcap: float | None, store: torch.dtype) -> None:
    products, targets, inverse, offset = chunk(4, vocabulary)
    products[2, :40] = -math.inf if softcap is None else -1e3  # a soft cap makes a number of -inf
    bias = randn(vocabulary, seed=7) if with_bias else None
    used = products[:, :vocabulary].clone()
    log_total, slope, entropy_slope, target_gradient = 8.0 + randn(4, seed=8), randn(4, seed=9), randn(4, seed=10), randn(4, seed=11)

    def differentiated(dtype: torch.dtype) -> Tensor:
        distances = swept(used.to(dtype), bias, softcap, targets, inverse, offset, keep_distances=True).kept
        assert distances is not None
        slopes = LogitSlopes(*(t.to(dtype) for t in (offset, log_total, slope, entropy_slope, target_gradient)))
        given = ChunkRows(distances, targets, inverse.to(dtype))
        TorchBackend(distances.device)._differentiate(distances, softcap, given, slopes)
        here = (targets >= 0).nonzero()[:, 0]
        distances[targets[here], here] = slopes.target_gradient[here]
        return distances.t()

    rows.products_gradient(
        products, vocabulary, targets, inverse, offset, log_total, slope, entropy_slope, target_gradient, bias=bias, softcap=softcap,
        store=store,
    )  # fmt: skip
    got, want = products.view(store)[:, : products.shape[1]], differentiated(torch.float64)
    assert torch.equal(got[:, vocabulary:], torch.zeros_like(got[:, vocabulary:]))
    allowed = 2 * max(relative(differentiated(torch.float32).to(store), want), torch.finfo(store).eps / 4)
    assert relative(got[:, :vocabulary], want) <= allowed
