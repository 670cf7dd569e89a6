"""The compiled CPU module: every instruction set this machine has, odd sizes, threads; all against float64.

Tolerances are bounds on the rounding of each entry, from what the kernels compute in float32 (see `exact_sweep`, `exact_gradient`).
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import cpu
from grpo_kernels.backends.base import ChunkRows, LogitSlopes, Sweep
from grpo_kernels.backends.cpu import CPUBackend
from grpo_kernels.backends.torch import TorchBackend

UNIT = 2.0**-24  # the largest relative error of one float32 rounding
EXP, TANH = 2e-7, 5e-7  # relative errors of the kernels' exp and tanh, tested below
LOWEST = -87.3  # distances are held here, where E is
FLOOR = 2e-38  # below this
FIRST = 100  # the vocabulary entry in row 0 of a tile

native = pytest.mark.skipif(cpu.import_error is not None, reason="no compiled module")
instruction_sets = pytest.mark.parametrize("instruction_set", CPUBackend.instruction_sets())
keeps = pytest.mark.parametrize("keep_distances", [False, True], ids=["exponentials", "distances"])
heads = pytest.mark.parametrize(
    ("bias", "softcap"), [(False, None), (True, None), (False, 5.0), (True, 5.0)], ids=["plain", "bias", "softcap", "both"]
)
# Columns in fours of vectors, single vectors and a remainder, for 4, 8 and 16 lanes; runs of 32 rows, whole and not; two and three threads.
shapes = pytest.mark.parametrize(("rows", "cols"), [(1, 1), (31, 3), (33, 93), (1024, 320), (2100, 263)])


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    saved = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(saved)


def test_the_module_was_built_where_there_is_a_compiler() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine, so no compiled module")
    assert cpu.import_error is None, cpu.import_error


# --- products to exponentials or distances


@dataclass(frozen=True)
class Products:
    tile: Tensor
    bias: Tensor | None
    softcap: float | None
    inverse_temperature: Tensor
    offset: Tensor
    targets: Tensor

    @classmethod
    def random(cls, rows: int, cols: int, bias: bool, softcap: float | None) -> Products:
        generator = torch.Generator().manual_seed(rows)
        return cls(
            torch.randn(rows, cols, generator=generator) * 4,
            torch.randn(rows, generator=generator) * 2 if bias else None,
            softcap,
            0.4 + 1.2 * torch.rand(cols, generator=generator),
            torch.randn(cols, generator=generator),
            torch.randint(-rows, 2 * rows, (cols,), generator=generator) + FIRST,  # some inside this tile, some not
        )

    @classmethod
    def simple(cls, tile: Tensor, bias: Tensor | None = None, softcap: float | None = None) -> Products:
        """Temperature 1, no offset, no target here."""
        cols = tile.shape[1]
        return cls(tile, bias, softcap, torch.ones(cols), torch.zeros(cols), torch.full((cols,), -1))

    @property
    def own(self) -> Tensor:
        return torch.arange(self.tile.shape[0])[:, None] + FIRST == self.targets

    @property
    def chunk(self) -> ChunkRows:
        return ChunkRows(torch.empty(len(self.targets), 0), self.targets, self.inverse_temperature)


@dataclass(frozen=True)
class Anchored:
    """What the kernel leaves, or what it should and how far it may be from that."""

    tile: Tensor
    sum: Tensor
    weighted: Tensor


Anchor = Callable[[Products, Tensor, Sweep, bool], None]  # products, the tile to work in, where the sums go, keep distances


def by_backend(backend: TorchBackend) -> Anchor:
    def anchor(products: Products, tile: Tensor, result: Sweep, keep_distances: bool) -> None:
        backend._anchor(
            tile, FIRST, products.bias, products.softcap, products.chunk, products.offset, result, keep_distances=keep_distances
        )

    return anchor


def anchored(products: Products, keep_distances: bool, anchor: Anchor) -> Anchored:
    """Runs inside a larger storage, and looks at the rest of it. The sums start at 1 and 2: they are added to."""
    rows, cols = products.tile.shape
    storage, sums = torch.full((rows + 2, cols + 5), 7.0), torch.full((2, cols + 5), 7.0, dtype=torch.float64)
    tile, total, weighted = storage[1:-1, 3:-2], sums[0, 3:-2], sums[1, 3:-2]
    tile.copy_(products.tile)
    total.fill_(1.0)
    weighted.fill_(2.0)
    anchor(products, tile, Sweep(total, weighted, None, None), keep_distances)
    result = Anchored(tile.clone(), total - 1, weighted - 2)
    tile.fill_(7.0)
    sums[:, 3:-2] = 7.0
    assert bool((storage == 7.0).all()), "wrote beyond its tile"
    assert bool((sums == 7.0).all()), "wrote beyond its sums"
    return result


def exact_sweep(products: Products, keep_distances: bool) -> tuple[Anchored, Anchored]:
    """The float64 result and its tolerance."""
    z = products.tile.double()
    if products.bias is not None:
        z = z + products.bias.double()[:, None]
    error = UNIT * z.abs() if products.bias is not None else torch.zeros_like(z)
    if products.softcap is not None:
        z = products.softcap * (z / products.softcap).tanh()
        # A relative error of tanh's argument makes no larger one of tanh: the bias's rounding, the quotient's, tanh itself, the product's.
        error = (3 * UNIT + TANH) * z.abs()
    x = z * products.inverse_temperature.double()
    d = x - products.offset.double()
    error = error * products.inverse_temperature.double() + UNIT * (x.abs() + d.abs())
    own = products.own
    e = torch.where(own, 0.0, d.exp())
    e_error = torch.where(own, 0.0, e * (error + EXP) * 1.01) + FLOOR
    # Float32 sums of 32 terms, of those, then float64: some 32 + rows / 32 roundings of random sign, whose sum stays below 16 units.
    # 1e-14: what adding to 1 and 2 loses.
    summation = 16 * UNIT
    return (
        Anchored(torch.where(own, 0.0, d) if keep_distances else e, e.sum(0), (e * d).sum(0)),
        Anchored(
            error if keep_distances else torch.where(own, 0.0, e_error),  # a target's exponential is 0 and nothing else
            e_error.sum(0) + summation * e.sum(0) + 1e-14,
            (e_error * d.abs() + e * error).sum(0) + (summation + UNIT) * (e * d.abs()).sum(0) + 1e-14,
        ),
    )


def assert_within(actual: Tensor, expected: Tensor, tolerance: Tensor, what: str) -> None:
    excess = ((actual.double() - expected).abs() / tolerance.clamp(min=1e-300)).nan_to_num(nan=math.inf).max()
    assert float(excess) <= 1, f"{what}: {float(excess):.3g} times its tolerance"


def assert_anchored(actual: Anchored, products: Products, keep_distances: bool) -> None:
    expected, tolerance = exact_sweep(products, keep_distances)
    tile, exact = actual.tile.double(), expected.tile
    if keep_distances:  # anything at the target; the torch backend does not hold them at LOWEST
        tile, exact = torch.where(products.own, 0.0, tile).clamp(min=LOWEST), exact.clamp(min=LOWEST)
    assert_within(tile, exact, tolerance.tile, "tile")
    assert_within(actual.sum, expected.sum, tolerance.sum, "sum")
    assert_within(actual.weighted, expected.weighted, tolerance.weighted, "weighted sum")


@native
@instruction_sets
@keeps
@heads
@shapes
def test_tile_against_float64(instruction_set: str, keep_distances: bool, bias: bool, softcap: float | None, rows: int, cols: int) -> None:
    products = Products.random(rows, cols, bias, softcap)
    with torch_threads(1):
        one = anchored(products, keep_distances, by_backend(CPUBackend(instruction_set)))
    with torch_threads(3):
        three = anchored(products, keep_distances, by_backend(CPUBackend(instruction_set)))
    assert_anchored(one, products, keep_distances)
    # Threads get multiples of 64 columns, so that each is worked on as by one thread.
    assert torch.equal(one.tile, three.tile)
    assert torch.equal(one.sum, three.sum)
    assert torch.equal(one.weighted, three.weighted)


@native
@instruction_sets
@keeps
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (False, 30.0), (True, 30.0)])
def test_the_target_is_left_out_of_the_sums(instruction_set: str, keep_distances: bool, bias: bool, softcap: float | None) -> None:
    """A probability near 1: the others sum to 7 exp(-60), the target's term is 1, and exp(-60) if tanh(-inf) = -1 were kept of it."""
    rows, cols = 8, 93
    tile = torch.full((rows, cols), -30.0 if softcap is None else -1e3)
    targets = torch.arange(cols) % rows
    tile[targets, torch.arange(cols)] *= -1
    products = Products.simple(tile, torch.zeros(rows) if bias else None, softcap)
    products = replace(products, offset=torch.full((cols,), 30.0), targets=targets + FIRST)
    sums = torch.zeros(2, cols, dtype=torch.float64)
    by_backend(CPUBackend(instruction_set))(products, tile, Sweep(sums[0], sums[1], None, None), keep_distances)
    exact = 7 * math.exp(-60)
    # The distance, a small integer, is exact but for tanh's error of the 30; far out that is one rounding: 30 UNIT in all.
    assert torch.allclose(sums[0], torch.full_like(sums[0], exact), rtol=3e-6, atol=0)
    assert torch.allclose(sums[1], torch.full_like(sums[1], -60 * exact), rtol=3e-6, atol=0)
    if not keep_distances:
        assert bool((tile[products.own] == 0).all())
        assert bool((tile[~products.own] > 0).all())


@native
@instruction_sets
@keeps
def test_extreme_logits(instruction_set: str, keep_distances: bool) -> None:
    """Overflow becomes infinity (the caller redoes the row), very negative logits vanish, and the columns beside them are untouched."""
    tile = torch.zeros(8, 23)
    for first in (0, 16 if instruction_set != "generic" else 20):  # in a vector, and in the remainder
        tile[:, first], tile[:, first + 1], tile[:, first + 2] = 1e4, -1e4, -math.inf
    products = Products.simple(tile)
    result = anchored(products, keep_distances, by_backend(CPUBackend(instruction_set)))
    high, low = tile[0] > 0, tile[0] < 0
    assert int(high.sum()) == 2
    assert bool((result.sum[high] > 1e38).all())
    assert bool((result.sum[low].abs() < 1e-36).all())
    assert bool((result.weighted[low].abs() < 1e-34).all())
    others = ~(high | low)
    assert torch.equal(result.sum[others], torch.full((17,), 8.0, dtype=torch.float64))
    assert torch.equal(result.weighted[others], torch.zeros(17, dtype=torch.float64))
    assert torch.equal(result.tile[:, others], torch.full((8, 17), 0.0 if keep_distances else 1.0))


@native
@instruction_sets
@keeps
@heads
def test_nan_passes_through_the_tile(instruction_set: str, keep_distances: bool, bias: bool, softcap: float | None) -> None:
    products = replace(Products.random(40, 93, bias, softcap), targets=torch.full((93,), -1))
    clean = anchored(products, keep_distances, by_backend(CPUBackend(instruction_set)))
    at = torch.zeros(40, 93, dtype=torch.bool)
    for row, column in ((3, 0), (39, 66), (0, 92)):  # in four vectors, in one, in the remainder
        at[row, column] = True
    result = anchored(
        replace(products, tile=products.tile.masked_fill(at, math.nan)), keep_distances, by_backend(CPUBackend(instruction_set))
    )
    assert torch.equal(result.tile.isnan(), at)
    assert torch.equal(result.tile[~at], clean.tile[~at])
    for mine, theirs in ((result.sum, clean.sum), (result.weighted, clean.weighted)):
        assert torch.equal(mine.isnan(), at.any(0))
        assert torch.equal(mine[~at.any(0)], theirs[~at.any(0)])


@native
@instruction_sets
@keeps
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bias_of_minus_infinity(instruction_set: str, keep_distances: bool, softcap: float | None) -> None:
    """It takes an entry out of the softmax: nothing of it in the sums, no NaN, no gradient. A soft cap makes -softcap of it."""
    products = replace(Products.random(40, 93, True, softcap), targets=torch.full((93,), -1))
    assert products.bias is not None
    products.bias[17] = -math.inf
    backend = CPUBackend(instruction_set)
    result = anchored(products, keep_distances, by_backend(backend))
    if softcap is not None:
        assert_anchored(result, products, keep_distances)
        return
    left = torch.arange(40) != 17
    assert products.bias is not None
    without = replace(products, tile=products.tile[left], bias=products.bias[left])
    assert_anchored(replace(result, tile=result.tile[left]), without, keep_distances)
    if not keep_distances:
        assert bool(((result.tile[17] >= 0) & (result.tile[17] < FLOOR)).all())
        return
    distances, none = result.tile.clone(), torch.zeros(93)
    log_total = result.sum.log().float()
    backend._differentiate(distances, None, products.chunk, LogitSlopes(products.offset, log_total, none + 1, none + 1, none))
    # At most p |slope + log p| / T = 2e-38 (1 + 87.3 + 40) 1.6, the 40 a bound on log_total.
    assert bool((distances[17].abs() < 1e-35).all())
    assert bool((distances[left].abs().sum(0) > 0.1).all())


@native
@instruction_sets
def test_sums_of_a_large_vocabulary(instruction_set: str) -> None:
    """Equal terms round alike, so that a single float32 sum of a tile drifts by the square of its length: by 1e-5 of the total here.

    In runs of 32 it drifts by few roundings of the 32 + 32, and from tile to tile not at all.
    """
    tiles, rows, cols, logit = 16, 1024, 93, math.log(0.7)
    sums = torch.zeros(2, cols, dtype=torch.float64)
    for _ in range(tiles):
        products = Products.simple(torch.full((rows, cols), logit))
        by_backend(CPUBackend(instruction_set))(products, products.tile, Sweep(sums[0], sums[1], None, None), False)
    total = tiles * rows * products.tile[0].double()  # of the kernel's own terms: exp's error is not the matter here
    d = float(torch.tensor(logit))
    assert_within(sums[0], total, 16 * UNIT * total, "sum")
    assert_within(sums[1], total * d, 17 * UNIT * total * abs(d), "weighted sum")


@native
@instruction_sets
def test_exp_is_accurate_over_its_range(instruction_set: str) -> None:
    x = torch.linspace(-87.2, 87.9, 200_000).view(-1, 8).contiguous()
    result = anchored(Products.simple(x), False, by_backend(CPUBackend(instruction_set)))
    exact = x.double().exp()
    assert float(((result.tile.double() - exact) / exact).abs().max()) < EXP


@native
@instruction_sets
def test_tanh_is_accurate_over_its_range(instruction_set: str) -> None:
    """A soft cap of 1 at temperature 1 with no offset keeps tanh itself; 0.625 is where its two formulas meet."""
    magnitude = torch.cat(
        [
            torch.logspace(-37.9, 2, 100_000),
            torch.linspace(0.5, 0.75, 50_000),
            torch.linspace(0, 12, 100_000)[1:],
            torch.tensor([1e4, 3e38, math.inf]),
        ]
    )
    x = torch.cat([magnitude, -magnitude[:-1], torch.zeros(9)])  # -inf is how a target is left out
    x = x[: len(x) // 9 * 9].view(-1, 9).contiguous()
    assert int((x == 0).sum()) >= 1
    result = anchored(Products.simple(x, softcap=1.0), True, by_backend(CPUBackend(instruction_set)))
    exact = x.double().tanh()
    assert_within(result.tile, exact, TANH * exact.abs(), "tanh")


@native
def test_float64_tiles_stay_in_float64() -> None:
    products = Products.random(40, 9, True, 5.0)
    assert products.bias is not None
    tile, sums = products.tile.double(), torch.zeros(2, 9, dtype=torch.float64)
    chunk = ChunkRows(torch.empty(9, 0), products.targets, products.inverse_temperature.double())
    result = Sweep(sums[0], sums[1], None, None)
    CPUBackend()._anchor(tile, FIRST, products.bias.double(), 5.0, chunk, products.offset.double(), result, keep_distances=False)
    expected, _ = exact_sweep(products, False)
    for mine, exact in ((tile, expected.tile), (sums[0], expected.sum), (sums[1], expected.weighted)):
        assert torch.allclose(mine, exact, rtol=1e-12, atol=1e-12)


# --- distances to gradients


@dataclass(frozen=True)
class Distances:
    tile: Tensor
    softcap: float | None
    inverse_temperature: Tensor
    slopes: LogitSlopes

    @classmethod
    def random(cls, rows: int, cols: int, softcap: float | None, entropy: bool) -> Distances:
        generator = torch.Generator().manual_seed(rows)
        products = Products.random(rows, cols, True, softcap)
        exact, _ = exact_sweep(replace(products, targets=torch.full((cols,), -1)), True)
        tile = exact.tile.float()
        if softcap is None:
            tile[rows // 2, ::2] = LOWEST  # with a log_total above 0, p is below its floor
        log_total = exact.tile.logsumexp(0).float()
        slope, entropy_slope = torch.randn(2, cols, generator=generator)
        slopes = LogitSlopes(products.offset, log_total, slope, entropy_slope * entropy, torch.zeros(cols))
        return cls(tile, softcap, products.inverse_temperature, slopes)


Differentiate = Callable[[Distances, Tensor], None]


def differentiate_by(backend: TorchBackend) -> Differentiate:
    def differentiate(distances: Distances, tile: Tensor) -> None:
        chunk = ChunkRows(torch.empty(tile.shape[1], 0), torch.full((tile.shape[1],), -1), distances.inverse_temperature)
        backend._differentiate(tile, distances.softcap, chunk, distances.slopes)

    return differentiate


def gradient(distances: Distances, differentiate: Differentiate) -> Tensor:
    rows, cols = distances.tile.shape
    storage = torch.full((rows + 2, cols + 5), 7.0)
    tile = storage[1:-1, 3:-2]
    tile.copy_(distances.tile)
    differentiate(distances, tile)
    result = tile.clone()
    tile.fill_(7.0)
    assert bool((storage == 7.0).all()), "wrote beyond its tile"
    return result


def exact_gradient(distances: Distances) -> tuple[Tensor, Tensor]:
    """The float64 result and its tolerance, from the same float32 distances."""
    slopes, inverse_temperature, d = distances.slopes, distances.inverse_temperature.double(), distances.tile.double()
    log_p = d - slopes.log_total.double()
    p = log_p.exp()
    p_error = p * (UNIT * log_p.abs() + EXP) * 1.01 + FLOOR
    entropy_part = slopes.entropy_slope.double() * log_p
    factor = slopes.slope.double() + entropy_part
    factor_error = UNIT * (2 * entropy_part.abs() + factor.abs())  # log p, its product, the sum
    bracket, bracket_error = torch.ones_like(d), torch.zeros_like(d)
    if distances.softcap is not None:
        square = ((d + slopes.offset.double()) / (distances.softcap * inverse_temperature)) ** 2
        bracket = 1 - square
        # d + offset, softcap / T, its inverse, the product: four roundings, twice that for the square, and its own; then the difference.
        bracket_error = UNIT * (9 * square + bracket.abs())
    exact = -p * factor * inverse_temperature * bracket
    error = p_error * (factor * bracket).abs() + p * factor_error * bracket.abs() + p * factor.abs() * bracket_error
    return exact, inverse_temperature * error * 1.01 + 3 * UNIT * exact.abs()  # three products


capped = pytest.mark.parametrize("softcap", [None, 5.0])
entropies = pytest.mark.parametrize("entropy", [False, True])


@native
@instruction_sets
@capped
@entropies
@shapes
def test_gradient_against_float64(instruction_set: str, softcap: float | None, entropy: bool, rows: int, cols: int) -> None:
    distances = Distances.random(rows, cols, softcap, entropy)
    with torch_threads(1):
        one = gradient(distances, differentiate_by(CPUBackend(instruction_set)))
    with torch_threads(3):
        three = gradient(distances, differentiate_by(CPUBackend(instruction_set)))
    assert_within(one, *exact_gradient(distances), "gradient")
    assert torch.equal(one, three)


@native
@capped
def test_the_gradient_formula_is_that_of_autograd(softcap: float | None) -> None:
    """c log p_y + e H of the softmax in float64 against the kernels' two passes: the formula itself, its signs and its factors."""
    generator = torch.Generator().manual_seed(1)
    products = Products.random(50, 21, True, softcap)
    products = replace(products, targets=torch.randint(0, 50, (21,), generator=generator) + FIRST)
    by_logp, by_entropy = torch.randn(2, 21, generator=generator)
    assert products.bias is not None
    z = products.tile.double().requires_grad_()
    x = z + products.bias.double()[:, None]
    x = (x if softcap is None else softcap * (x / softcap).tanh()) * products.inverse_temperature.double()
    log_p = x.log_softmax(0)
    entropy = -(log_p.exp() * log_p).sum(0)
    own = products.own
    ((by_logp * log_p[own.t().nonzero()[:, 1], torch.arange(21)]).sum() + (by_entropy * entropy).sum()).backward()
    result = anchored(products, True, by_backend(CPUBackend()))
    log_total = (x.detach().logsumexp(0) - products.offset.double()).float()
    slope = by_logp + by_entropy * entropy.detach().float()
    slopes = LogitSlopes(products.offset, log_total, slope, by_entropy, torch.zeros(21))
    mine = gradient(Distances(result.tile, softcap, products.inverse_temperature, slopes), differentiate_by(CPUBackend()))
    assert z.grad is not None
    # Distances of up to 30 are off by 30 UNIT = 2e-6 relative to p, factors that cancel by as much of their terms (|log p| < 30).
    assert torch.allclose(mine.double()[~own], z.grad[~own], rtol=2e-5, atol=1e-7)


@native
@instruction_sets
@capped
def test_nan_passes_through_the_gradient(instruction_set: str, softcap: float | None) -> None:
    distances = Distances.random(40, 93, softcap, True)
    clean = gradient(distances, differentiate_by(CPUBackend(instruction_set)))
    at = torch.zeros(40, 93, dtype=torch.bool)
    for row, column in ((3, 0), (39, 66), (0, 92)):
        at[row, column] = True
    result = gradient(replace(distances, tile=distances.tile.masked_fill(at, math.nan)), differentiate_by(CPUBackend(instruction_set)))
    assert torch.equal(result.isnan(), at)
    assert torch.equal(result[~at], clean[~at])
    log_total = distances.slopes.log_total.masked_fill(at.any(0), math.nan)  # a row whose sums were NaN
    slopes = replace(distances.slopes, log_total=log_total)
    result = gradient(replace(distances, slopes=slopes), differentiate_by(CPUBackend(instruction_set)))
    assert torch.equal(result.isnan(), at.any(0).expand(40, -1))


# --- what is refused


@native
def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="not available on this machine: mmx"):
        anchored(Products.random(2, 2, False, None), False, by_backend(CPUBackend("mmx")))
    with pytest.raises(ValueError, match="not available on this machine: mmx"):
        gradient(Distances.random(2, 2, None, False), differentiate_by(CPUBackend("mmx")))


BAD_COLUMNS = {
    "too short": torch.zeros(8),
    "a matrix": torch.zeros(9, 1),
    "strided": torch.zeros(18)[::2],
    "of another type": torch.zeros(9, dtype=torch.float16),
    "on another device": torch.zeros(9, device="meta"),
}
bad_columns = pytest.mark.parametrize("bad", BAD_COLUMNS.values(), ids=BAD_COLUMNS.keys())


@native
@bad_columns
@pytest.mark.parametrize("name", ["bias", "inverse_temperature", "offset", "targets", "others", "weighted"])
def test_what_the_tile_kernel_does_not_take(name: str, bad: Tensor) -> None:
    cols = 9
    dtypes = {"targets": torch.int64, "others": torch.float64, "weighted": torch.float64}
    arguments = {
        key: torch.zeros(cols, dtype=dtypes.get(key, torch.float32))
        for key in ("bias", "inverse_temperature", "offset", "targets", "others", "weighted")
    }
    tile = torch.zeros(cols, cols)  # as many rows, so that one set of bad tensors serves the bias too

    def call() -> None:
        CPUBackend()._anchor(
            tile,
            0,
            arguments["bias"],
            None,
            ChunkRows(torch.empty(cols, 0), arguments["targets"], arguments["inverse_temperature"]),
            arguments["offset"],
            Sweep(arguments["others"], arguments["weighted"], None, None),
            keep_distances=False,
        )

    call()
    before = tile.clone()
    arguments[name] = bad if bad.dtype == torch.float16 else bad.to(dtypes.get(name, torch.float32))
    if bad.stride() == (2,):
        arguments[name] = torch.zeros(2 * cols, dtype=dtypes.get(name, torch.float32))[::2]
    with pytest.raises(ValueError, match=f"got {name} of"):
        call()
    assert torch.equal(tile, before)


@native
@bad_columns
@pytest.mark.parametrize("name", ["inverse_temperature", "offset", "log_total", "slope", "entropy_slope"])
def test_what_the_gradient_kernel_does_not_take(name: str, bad: Tensor) -> None:
    distances = Distances.random(5, 9, None, False)
    if name == "inverse_temperature":
        distances = replace(distances, inverse_temperature=bad)
    else:
        distances = replace(distances, slopes=replace(distances.slopes, **{name: bad}))
    with pytest.raises(ValueError, match=f"got {name} of"):
        gradient(distances, differentiate_by(CPUBackend()))


@native
@pytest.mark.parametrize("tile", [torch.zeros(9, 5).t(), torch.zeros(5, 18)[:, ::2]], ids=["columns", "strided"])
def test_tiles_that_are_not_dense_are_refused(tile: Tensor) -> None:
    products, distances = Products.random(5, 9, False, None), Distances.random(5, 9, None, False)
    sums = torch.zeros(2, 9, dtype=torch.float64)
    with pytest.raises(ValueError, match="got tile of"):
        by_backend(CPUBackend())(products, tile, Sweep(sums[0], sums[1], None, None), False)
    with pytest.raises(ValueError, match="got tile of"):
        differentiate_by(CPUBackend())(distances, tile)


# --- the same, elsewhere


class AnchoredTile(ctypes.Structure):
    """`AnchoredTile` of csrc/cpu/anchored_tile.h."""

    _fields_ = [
        ("tile", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride", "first_row")),
        ("bias", ctypes.c_void_p),
        ("softcap", ctypes.c_float),
        ("keep_distances", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("inverse_temperature", "offset", "targets", "sum", "weighted_sum")),
    ]


class LogitGradient(ctypes.Structure):
    """`LogitGradient` of csrc/cpu/logit_gradient.h."""

    _fields_ = [
        ("tile", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride")),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("inverse_temperature", "offset", "log_total", "slope", "entropy_slope")),
    ]


@pytest.fixture(scope="module")
def sixteen_lanes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The AVX-512 build's text (16 floats per vector) compiled for whatever this machine has, where it may have no AVX-512 itself."""
    compiler = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("wide")
    source, library = folder / "wide.cpp", folder / "wide.so"
    source.write_text(
        "#define GRPO_FUNCTION(name) name##_wide\n#define GRPO_LANES 16\n"
        '#include "anchored_tile_kernel.h"\n#include "logit_gradient_kernel.h"\n'
        'extern "C" void run_tile(const grpo::AnchoredTile* a) { grpo::anchored_tile_wide(*a, 0, a->cols); }\n'
        'extern "C" void run_gradient(const grpo::LogitGradient* a) { grpo::logit_gradient_wide(*a, 0, a->cols); }\n'
    )
    include = Path(__file__).parents[1] / "csrc" / "cpu"
    command = [compiler, "-std=gnu++17", "-O2", "-Wno-psabi", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


WIDE_COLUMNS = 16 * 4 + 16 + 3


@keeps
@heads
def test_sixteen_lanes_of_the_tile_kernel(sixteen_lanes: ctypes.CDLL, keep_distances: bool, bias: bool, softcap: float | None) -> None:
    def anchor(products: Products, tile: Tensor, result: Sweep, keep_distances: bool) -> None:
        columns = (products.inverse_temperature, products.offset, products.targets, result.others, result.weighted)
        arguments = AnchoredTile(
            tile.data_ptr(),
            *tile.shape,
            tile.stride(0),
            FIRST,
            None if products.bias is None else products.bias.data_ptr(),
            products.softcap or 0.0,
            keep_distances,
            *(tensor.data_ptr() for tensor in columns),
        )
        sixteen_lanes.run_tile(ctypes.byref(arguments))

    products = Products.random(70, WIDE_COLUMNS, bias, softcap)
    assert_anchored(anchored(products, keep_distances, anchor), products, keep_distances)


@capped
@entropies
def test_sixteen_lanes_of_the_gradient_kernel(sixteen_lanes: ctypes.CDLL, softcap: float | None, entropy: bool) -> None:
    def differentiate(distances: Distances, tile: Tensor) -> None:
        slopes = distances.slopes
        columns = (distances.inverse_temperature, slopes.offset, slopes.log_total, slopes.slope, slopes.entropy_slope)
        arguments = LogitGradient(
            tile.data_ptr(), *tile.shape, tile.stride(0), distances.softcap or 0.0, *(tensor.data_ptr() for tensor in columns)
        )
        sixteen_lanes.run_gradient(ctypes.byref(arguments))

    distances = Distances.random(70, WIDE_COLUMNS, softcap, entropy)
    assert_within(gradient(distances, differentiate), *exact_gradient(distances), "gradient")


@native
@keeps
@heads
def test_the_compiled_and_the_torch_tile_agree(keep_distances: bool, bias: bool, softcap: float | None) -> None:
    products = Products.random(100, 37, bias, softcap)
    mine = anchored(products, keep_distances, by_backend(CPUBackend()))
    theirs = anchored(products, keep_distances, by_backend(TorchBackend(torch.device("cpu"))))
    assert_anchored(theirs, products, keep_distances)
    _, tolerance = exact_sweep(products, keep_distances)
    elsewhere = ~products.own if keep_distances else torch.ones_like(products.own)
    # Each may be off by its tolerance.
    assert_within(mine.tile[elsewhere], theirs.tile[elsewhere].double(), 2 * tolerance.tile[elsewhere], "tile")
    assert_within(mine.sum, theirs.sum, 2 * tolerance.sum, "sum")
    assert_within(mine.weighted, theirs.weighted, 2 * tolerance.weighted, "weighted sum")


@native
@capped
@entropies
def test_the_compiled_and_the_torch_gradient_agree(softcap: float | None, entropy: bool) -> None:
    distances = Distances.random(100, 37, softcap, entropy)
    mine = gradient(distances, differentiate_by(CPUBackend()))
    theirs = gradient(distances, differentiate_by(TorchBackend(torch.device("cpu"))))
    exact, tolerance = exact_gradient(distances)
    assert_within(theirs, exact, tolerance, "torch")
    assert_within(mine, theirs.double(), 2 * tolerance, "gradient")
