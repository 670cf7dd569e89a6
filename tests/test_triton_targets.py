"""The Triton kernels of the targets' rows of the weight, and of the scaled gradient, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from problems import DEVICE

pytest.importorskip("triton")
from grpo_kernels.triton_kernels import scaling
from grpo_kernels.triton_kernels.scaling import scaled
from grpo_kernels.triton_kernels.targets import hidden_gradient, target_products

HALF_UNIT = 2.0**-24  # of float32: the most by which one operation is off, relative to its result
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The interpreter computes NaN and infinity in numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight_of(width: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[50, width] whose row 0 is NaN: what a target of -1 would read, were it taken for 0."""
    weight = randn(50, width, seed=1).to(dtype)
    weight[0] = math.nan
    if layout == "strided":
        weight = torch.nn.functional.pad(weight, (3, 2), value=math.nan)[:, 3 : 3 + width]
    return weight.t().contiguous().t() if layout == "transposed" else weight


def targets_of(n: int) -> Tensor:
    """Every third is elsewhere."""
    targets = torch.randint(1, 50, (n,), generator=torch.Generator().manual_seed(2))
    targets[1::3] = -1
    return targets.to(DEVICE)


def hidden_of(n: int, width: int, dtype: torch.dtype, layout: str) -> Tensor:
    hidden = randn(n, width, seed=3).to(dtype)
    return hidden.t().contiguous().t() if layout == "transposed" else hidden


shapes = pytest.mark.parametrize(
    ("n", "width", "layout"),
    [
        (5, 1, "plain"),
        (5, 7, "strided"),
        (5, 64, "transposed"),
        (4, 1027, "plain"),
        (2, 1027, "strided"),
        (1, 64, "plain"),
        (0, 7, "plain"),
    ],
)


@pytest.mark.parametrize("dtype", DTYPES)
@shapes
@pytest.mark.parametrize("with_bias", [False, True])
def test_target_products(n: int, width: int, layout: str, dtype: torch.dtype, with_bias: bool) -> None:
    hidden, weight, targets = hidden_of(n, width, dtype, layout), weight_of(width, dtype, layout), targets_of(n)
    bias = randn(50, seed=4).to(dtype) if with_bias else None
    products = target_products(hidden, weight, targets, bias)
    assert products.dtype == torch.float64
    assert products.shape == (n,)
    here = targets >= 0
    assert not products[~here].any()
    terms = hidden[here].double() * weight[targets[here]].double()
    exact = terms.sum(1) if bias is None else terms.sum(1) + bias[targets[here]].double()
    # A product of two halves is exact in float32; only float32's own are rounded, and nothing that comes after.
    allowed = HALF_UNIT * terms.abs().sum(1) if dtype == torch.float32 else torch.zeros_like(exact)
    assert bool(((products[here] - exact).abs() <= allowed + 1e-14 * terms.abs().sum(1)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@shapes
def test_hidden_gradient(n: int, width: int, layout: str, dtype: torch.dtype) -> None:
    weight, targets = weight_of(width, dtype, layout), targets_of(n)
    sums, others, scale = randn(n, width, seed=5), randn(n, seed=6), randn(n, seed=7)
    entries = torch.where(targets[:, None] >= 0, weight[targets.clamp(min=1)].double(), 0.0)
    exact = scale.double()[:, None] * (sums.double() - others.double()[:, None] * entries)
    size = scale.double().abs()[:, None] * (sums.double().abs() + 2 * (others.double()[:, None] * entries).abs())
    gradient = hidden_gradient(sums, weight, targets, others, scale)
    assert gradient.data_ptr() == sums.data_ptr()
    assert gradient.shape == (n, width)
    assert bool(((gradient.double() - exact).abs() <= 3 * HALF_UNIT * size).all())


def test_another_rows_nan_stays_there() -> None:
    weight, targets = weight_of(64, torch.bfloat16, "plain"), torch.tensor([0, 3, -1], device=DEVICE)
    hidden, ones = hidden_of(3, 64, torch.bfloat16, "plain"), torch.ones(3, device=DEVICE)
    assert target_products(hidden, weight, targets, None).isnan().tolist() == [True, False, False]
    assert hidden_gradient(randn(3, 64), weight, targets, ones, ones).isnan().any(1).tolist() == [True, False, False]


def test_tensors_that_a_kernel_would_misread_are_refused() -> None:
    weight, targets, rows = weight_of(64, torch.float32, "plain"), targets_of(4), randn(4)
    hidden = randn(4, 64)
    for bias in (randn(100)[::2], randn(49)):
        with pytest.raises(ValueError, match="got bias of"):
            target_products(hidden, weight, targets, bias)
    with pytest.raises(ValueError, match="got targets of"):
        target_products(hidden, weight, targets.int(), None)
    with pytest.raises(ValueError, match="got weighted_rows of"):
        hidden_gradient(randn(4, 128)[:, ::2], weight, targets, rows, rows)
    with pytest.raises(ValueError, match="got scale of"):
        hidden_gradient(hidden, weight, targets, rows, rows.double())


def gradients(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Contiguous of more than a block, of one element, of none; and views without the last positions or some columns. With their wholes."""
    whole, deep, flat = randn(3, 2051).to(dtype), randn(3, 4, 4101).to(dtype), randn(3, 70).to(dtype)
    one, none = randn(1).to(dtype), randn(0, 7).to(dtype)
    return [(whole, whole), (one, one), (none, none), (deep[:, :-1], deep), (flat[:, 1:65], flat), (deep[1:2, :, :64], deep)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_scaled(dtype: torch.dtype, in_place: bool) -> None:
    factor = torch.tensor(0.3, device=DEVICE)
    for gradient, whole in gradients(dtype):
        before, all_before = gradient.clone(), whole.clone()
        result = scaled(gradient, factor, dtype, in_place=in_place)
        # The float32 product, rounded once more where it is stored in half precision.
        assert torch.equal(result, (before.float() * factor).to(dtype))
        if in_place:
            assert result is gradient
            gradient.copy_(before)  # and beside it nothing has changed
        else:
            assert result.is_contiguous()
        assert torch.equal(whole, all_before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scaled_to_another_dtype(dtype: torch.dtype, factor: float) -> None:
    """The product is rounded once: float32 times the factor, not the rounded gradient times it. Never in place."""
    for gradient, _ in gradients(torch.float32):
        before, scalar = gradient.clone(), torch.tensor(factor, device=DEVICE)
        result = scaled(gradient, scalar, dtype, in_place=True)
        assert result.dtype == dtype
        assert torch.equal(result, (before * scalar).to(dtype))
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_one_leaves_the_bits(dtype: torch.dtype) -> None:
    """Of NaN with a payload, signed zeros and subnormal numbers too: all 16-bit numbers there are, and as many of float32."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int64, device=DEVICE)
    bits = (bits * 65537 if dtype == torch.float32 else bits).to(integer)
    gradient = bits.clone().view(dtype)
    assert scaled(gradient, torch.ones((), device=DEVICE), dtype, in_place=True) is gradient
    assert torch.equal(gradient.view(integer), bits)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's stores are counted")
@pytest.mark.parametrize(
    ("factor", "in_place", "writes"), [(1.0, True, False), (1.0, False, True), (0.3, True, True), (math.nan, True, True)]
)
def test_a_factor_of_one_writes_nothing(factor: float, in_place: bool, writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[object] = []

    def stored(x: Any, dtype: Any) -> Any:  # of every store, just before it
        stores.append(x)
        return x.to(dtype)

    monkeypatch.setattr(scaling, "stored", stored)
    scaled(randn(64), torch.tensor(factor, device=DEVICE), torch.float32, in_place=in_place)
    assert bool(stores) == writes


@pytest.mark.parametrize("in_place", [False, True])
def test_nan_and_infinity(in_place: bool) -> None:
    """A factor of NaN, as of a diverged loss, must be seen, and 0 times infinity."""
    assert scaled(randn(70), torch.tensor(math.nan, device=DEVICE), torch.float32, in_place=in_place).isnan().all()
    gradient = torch.tensor([1.0, math.nan, math.inf], device=DEVICE)
    assert scaled(gradient.clone(), torch.tensor(2.0, device=DEVICE), torch.float32, in_place=in_place).isnan().tolist() == [
        False,
        True,
        False,
    ]
    assert scaled(gradient, torch.tensor(0.0, device=DEVICE), torch.float32, in_place=in_place).isnan().tolist() == [False, True, True]
