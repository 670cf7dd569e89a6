"""The anchored GEMM of `grpo_kernels.triton_kernels`, both of its kernels, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from grpo_kernels.triton_kernels import anchored_gemm
from grpo_kernels.triton_kernels.anchored_gemm import anchored_products
from problems import DEVICE

ON_GPU = DEVICE == "cuda"


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    inverse_temperature: Tensor
    offset: Tensor
    bias: Tensor | None

    def kept(self) -> Tensor:
        """Filled with what a store that is left out would leave."""
        return torch.full((len(self.hidden), -(-len(self.weight) // 64) * 64), math.nan, dtype=torch.bfloat16, device=DEVICE)

    def logits(self) -> Tensor:
        z = self.hidden.double() @ self.weight.double().t()
        return (z if self.bias is None else z + self.bias.double()) * self.inverse_temperature.double()[:, None]

    def anchored(self) -> Inputs:
        """With the targets' logits, rounded to float32, as offsets."""
        x = self.logits().gather(1, self.targets.clamp(min=0)[:, None])[:, 0]
        return replace(self, offset=torch.where(self.targets >= 0, x.float(), self.offset))

    def run(self, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        return anchored_products(self.hidden, self.weight, self.targets, self.inverse_temperature, self.offset, self.bias, kept)


def make(rows: int, width: int, vocabulary: int, *, bias: bool = False, scale: float = 3.0, seed: int = 0) -> Inputs:
    """bfloat16. Logits of standard deviation `scale`, temperatures between 1/2 and 2, one target in four on another process."""
    g, dtype = torch.Generator().manual_seed(seed), torch.bfloat16
    inputs = Inputs(
        hidden=(torch.randn(rows, width, generator=g) * scale / width**0.5).to(DEVICE, dtype),
        weight=torch.randn(vocabulary, width, generator=g).to(DEVICE, dtype),
        targets=torch.where(torch.rand(rows, generator=g) < 0.25, -1, torch.randint(0, vocabulary, (rows,), generator=g)).to(DEVICE),
        inverse_temperature=(0.5 + 1.5 * torch.rand(rows, generator=g)).to(DEVICE),
        offset=torch.randn(rows, generator=g).to(DEVICE),
        bias=torch.randn(vocabulary, generator=g).to(DEVICE, dtype) if bias else None,
    )
    return inputs.anchored()


def exact(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials, their sums and the weighted sums in float64."""
    distance = (inputs.logits() - inputs.offset.double()[:, None]).clamp(max=61)
    here = (inputs.targets >= 0).nonzero()[:, 0]
    distance[here, inputs.targets[here]] = -math.inf
    exponential = distance.exp()
    return exponential, exponential.sum(1), (exponential * distance.clamp(min=-1e30)).sum(1)


def check(inputs: Inputs) -> None:
    """Products are off by a few units in the last place of logits of about 10, 1e-6 each; sums of them by less."""
    kept, vocabulary = inputs.kept(), len(inputs.weight)
    others, weighted = inputs.run(kept)
    exponential, exact_others, exact_weighted = exact(inputs)
    assert others.dtype == weighted.dtype == torch.float32
    torch.testing.assert_close(others.double(), exact_others, rtol=1e-5, atol=0.0)
    # The weighted sum's terms have both signs; its error is judged by what it is a sum of.
    size = (exponential * exponential.clamp(min=1e-300).log().abs()).sum(1)
    assert bool(((weighted.double() - exact_weighted).abs() <= 1e-5 * size).all())
    # Half a unit in bfloat16's last place is at most 2^-8; a conversion that truncates would be off by twice that.
    torch.testing.assert_close(kept[:, :vocabulary].double(), exponential, rtol=2**-8 + 1e-5, atol=1e-37)
    assert bool((kept[:, vocabulary:] == 0).all())
    forward_only = inputs.run(None)
    assert torch.equal(others, forward_only[0])
    assert torch.equal(weighted, forward_only[1])


@pytest.fixture(params=["descriptors", "pointers"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel in turn, where the one of descriptors can be had."""
    if request.param == "pointers":
        monkeypatch.setattr(anchored_gemm, "_describable", lambda t: False)
    return request.param


@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"),
    [(37, 48, 1000), (1, 64, 300), (40, 67, 300), (33, 7, 300), (5, 1, 70), (3, 16, 1)],
)
def test_against_float64(rows: int, width: int, vocabulary: int, kernel: str) -> None:
    """Vocabularies that are no multiple of any tile, of 1 too; rows, widths and strides likewise."""
    check(make(rows, width, vocabulary))


@pytest.mark.parametrize("vocabulary", [50257, 151936])
def test_real_vocabularies(vocabulary: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With wide tiles in the interpreter, whose time is per tile."""
    monkeypatch.setattr(anchored_gemm, "INTERPRETER", replace(anchored_gemm.INTERPRETER, columns=8192))
    check(make(3, 8, vocabulary))


@pytest.mark.parametrize("width", [64, 67])
def test_bias(width: int, kernel: str) -> None:
    check(make(20, width, 600, bias=True))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_epilogue_in_parts(parts: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts a tile is taken in, each column meets its own bias, target and place."""
    if ON_GPU:
        pytest.skip("other tilings than the chosen ones may not fit this GPU")
    monkeypatch.setattr(anchored_gemm, "INTERPRETER", replace(anchored_gemm.INTERPRETER, parts=parts))
    check(make(20, 16, 600, bias=True))


def test_no_rows(kernel: str) -> None:
    inputs = make(0, 16, 300)
    for sums in (inputs.run(inputs.kept()), inputs.run(None)):
        assert [t.shape for t in sums] == [(0,), (0,)]


def test_rows_of_a_wider_tensor(kernel: str) -> None:
    """Hidden states, weights and kept exponentials with a stride; the first two without 16-byte alignment, too."""
    inputs = make(20, 48, 300, bias=True)
    for before, after in ((16, 16), (3, 2)):
        hidden = torch.nn.functional.pad(inputs.hidden, (before, after), value=math.nan)[:, before : before + 48]
        weight = torch.nn.functional.pad(inputs.weight, (before, after), value=math.nan)[:, before : before + 48]
        check(replace(inputs, hidden=hidden, weight=weight, bias=inputs.bias.repeat_interleave(2)[::2]))


def test_wider_kept(kernel: str) -> None:
    """Padding of more than a tile is zeroed, and what lies beside `kept` is left alone."""
    inputs = make(5, 16, 70)
    whole = torch.full((7, 640), 9.0, dtype=torch.bfloat16, device=DEVICE)
    inputs.run(whole[:5, :576])
    assert bool((whole[:5, 70:576] == 0).all())
    assert bool((whole[:5, :70] != 9).all())
    assert bool((whole[5:] == 9).all())
    assert bool((whole[:, 576:] == 9).all())


def test_all_logits_low(kernel: str) -> None:
    """Logits of about -15: a column beyond the vocabulary, with a product of 0, would outweigh the whole row."""
    inputs = make(20, 32, 300, scale=0.1)
    check(replace(inputs, bias=torch.full((300,), -15.0, dtype=torch.bfloat16, device=DEVICE)).anchored())
    low = replace(inputs, hidden=torch.full_like(inputs.hidden, -15 / 32), weight=torch.ones_like(inputs.weight))
    check(replace(low, inverse_temperature=torch.ones_like(low.offset)).anchored())


def test_certain_target(kernel: str) -> None:
    """p_y -> 1: the sum of the others, of about 1e-15, has its own relative accuracy."""
    inputs = make(20, 32, 300, scale=1.0)
    targets = inputs.targets.clamp(min=0)
    hidden = (inputs.weight[targets].float() * 1.3).to(inputs.hidden.dtype)
    certain = replace(inputs, hidden=hidden, targets=targets, inverse_temperature=torch.full_like(inputs.offset, 1.5)).anchored()
    assert 0 < float(exact(certain)[1].min()) < 1e-15
    check(certain)


def test_extreme_rows(kernel: str) -> None:
    """A row far above its offset stays finite, and shows; its neighbours do not change."""
    inputs = make(20, 32, 300)
    offset = inputs.offset.clone()
    offset[3], offset[7], offset[11] = -200.0, -3e38, 3e38
    kept = inputs.kept()
    others, weighted = replace(inputs, offset=offset).run(kept)
    expected = inputs.run(None)
    assert bool(torch.isfinite(torch.stack([others, weighted])).all())
    assert bool(torch.isfinite(kept).all())
    assert bool((others[[3, 7]] >= math.exp(60)).all())
    assert others[11] == weighted[11] == 0
    rest = [i for i in range(20) if i not in (3, 7, 11)]
    assert torch.equal(others[rest], expected[0][rest])
    assert torch.equal(weighted[rest], expected[1][rest])


def test_nan_stays_in_its_row(kernel: str) -> None:
    inputs = make(20, 32, 300)
    hidden = inputs.hidden.clone()
    hidden[[4, 19], 5] = math.nan
    kept = inputs.kept()
    sums = torch.stack(replace(inputs, hidden=hidden).run(kept))
    expected = torch.stack(inputs.run(None))
    rest = [i for i in range(20) if i not in (4, 19)]
    assert bool(sums[:, [4, 19]].isnan().all())
    assert torch.equal(sums[:, rest], expected[:, rest])
    assert not bool(kept[rest].isnan().any())


def test_masked_tokens(kernel: str) -> None:
    """A bias of -inf gives exp 0 and no NaN; a row with nothing else has sums of 0."""
    inputs = make(20, 32, 300, bias=True)
    bias = inputs.bias.clone()
    bias[1::2] = -math.inf
    check(replace(inputs, bias=bias, targets=inputs.targets.clamp(min=0) // 2 * 2).anchored())
    others, weighted = replace(inputs, bias=torch.full_like(bias, -math.inf)).run(None)
    assert not bool(others.any() or weighted.any())


def test_deterministic(kernel: str) -> None:
    inputs = make(20, 32, 600)
    kept = [inputs.kept(), inputs.kept()]
    first, second = (inputs.run(k) for k in kept)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(*kept)


class Fitting:
    """In place of a kernel: one that needs more than the device has, except with `tiling`. Launches are counted."""

    def __init__(self, kernel: Any, tiling: anchored_gemm.Tiling | None, launches: list[str]) -> None:
        self.kernel, self.tiling, self.launches = kernel, tiling, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append(self.kernel.__name__)
            sizes = options["BLOCK_N"], options["BLOCK_V"], options["BLOCK_H"], options["num_stages"]
            if self.tiling is None or sizes != (self.tiling.rows, self.tiling.columns, self.tiling.width, self.tiling.stages):
                raise OutOfResources(300 << 10, 227 << 10, "shared memory")
            self.kernel[grid](*args, **options)

        return launch


def fit(tiling: anchored_gemm.Tiling | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    launches: list[str] = []
    for name in ("_descriptor_kernel", "_pointer_kernel"):
        monkeypatch.setattr(anchored_gemm, name, Fitting(getattr(anchored_gemm, name), tiling, launches))
    return launches


def test_smaller_tiles_where_the_chosen_ones_do_not_fit(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Triton may need more shared memory for the same kernel."""
    launches = fit(anchored_gemm.UNALIGNED, monkeypatch)
    with pytest.warns(UserWarning, match="uses its smallest tiles.*shared memory"):
        check(make(20, 64, 300, bias=True))
    assert len(launches) == 4  # stored and not
    assert launches[1::2] == ["_pointer_kernel"] * 2


def test_the_smallest_tiles_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, inputs = fit(None, monkeypatch), make(20, 64, 300)
    with pytest.warns(UserWarning, match="uses its smallest tiles"), pytest.raises(OutOfResources):
        inputs.run(None)
    assert len(launches) == 2
    monkeypatch.setattr(anchored_gemm, "_describable", lambda t: False)
    monkeypatch.setattr(anchored_gemm, "_vectorised", lambda t: False)
    monkeypatch.setattr(anchored_gemm, "INTERPRETER", anchored_gemm.UNALIGNED)
    with pytest.raises(OutOfResources):
        inputs.run(None)
    assert len(launches) == 3


def test_other_dtypes_and_layouts_are_refused() -> None:
    inputs = make(4, 16, 70)
    for wrong in (
        replace(inputs, hidden=inputs.hidden.half(), weight=inputs.weight.half()), replace(inputs, hidden=inputs.hidden.float()),
        replace(inputs, weight=inputs.weight.t().contiguous().t()), replace(inputs, hidden=inputs.hidden[:, :8]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="each bfloat16 with last stride 1"):
            wrong.run(None)
    with pytest.raises(ValueError, match="each bfloat16 with last stride 1"):
        inputs.run(inputs.kept().half())


def test_kernel_of_descriptors_only_where_tensor_maps_can_be_had() -> None:
    aligned = torch.empty(4, 64, dtype=torch.bfloat16)
    assert anchored_gemm._describable(aligned)
    assert anchored_gemm._describable(aligned[:, 8:24])
    assert not anchored_gemm._describable(aligned[:, 1:])
    assert not anchored_gemm._describable(torch.empty(4, 60, dtype=torch.bfloat16))
    assert not anchored_gemm._describable(aligned[:1].expand(4, 64))
    assert not anchored_gemm._describable(torch.empty(64, 8, dtype=torch.bfloat16).t())
