"""`linear_logprobs`: log-probabilities, entropies and their gradients, against float64; and what it may not hold, round or refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Objective, backends, linear_grpo_loss, linear_logprobs
from grpo_kernels.backends.torch import TorchBackend
from grpo_kernels.reference import reference_logprobs
from problems import Problem, leaves, make, reference, relative, rows_per_chunk

AVAILABLE = [status.name for status in backends() if status.available]


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 600])
def test_against_float64(backend: str, dtype: torch.dtype, rows: int) -> None:
    p = make(rows, 32, 1500, dtype=dtype, temperature=0.8, logit_scale=10.0)
    result = linear_logprobs(p.hidden, p.weight, p.targets, temperature=0.8, backend=backend)
    assert result.logprobs.shape == (rows,)
    if rows:
        exact = reference(p, torch.float64)
        assert float((result.logprobs - exact.logprobs).abs().max()) < 2e-5
        # The entropy is a difference of numbers as large as the log-probability, which reaches -70 here; a sampled token's does not.
        assert ((result.entropy - exact.entropy).abs() < 1e-6 * (exact.logprobs.abs() + 10)).all()


def sampled(rows: int, width: int, vocabulary: int, seed: int = 0, **settings: Any) -> Problem:
    """Targets drawn from the policy, as a rollout's are. Of a target that is all but impossible the entropy has fewer digits: it is a
    difference of numbers as large as the log-probability."""
    p = make(rows, width, vocabulary, seed=seed, **settings)
    logits = p.hidden.double() @ p.weight.double().t() + (0.0 if p.bias is None else p.bias.double())
    logits = logits if p.softcap is None else p.softcap * torch.tanh(logits / p.softcap)
    logits = logits / (p.temperature[:, None] if isinstance(p.temperature, Tensor) else p.temperature)
    targets = torch.multinomial(torch.softmax(logits, -1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    return replace(p, targets=targets)


def slopes_of(rows: int, which: str, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Upstream gradients of log-probabilities and entropies."""
    slope, other = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed))
    if which == "most rows zero":
        keep = torch.arange(rows) % 9 == 4
        return slope * keep, other * keep
    return slope * (which != "entropy"), other * (which != "logprobs")


def ours(p: Problem, which: str = "both", *, frozen: tuple[int, ...] = (), backend: str = "auto") -> list[Tensor | None]:
    """Gradients of hidden, weight and bias; only the results with a slope take part, so that the others have no upstream at all."""
    tensors = [t if t is None or i not in frozen else t.detach() for i, t in enumerate(leaves(p))]
    hidden, weight, bias = tensors
    assert hidden is not None
    assert weight is not None
    result = linear_logprobs(
        hidden, weight, p.targets, mask=p.mask, bias=bias, temperature=p.temperature, softcap=p.softcap, backend=backend
    )
    slope, other = slopes_of(p.targets.numel(), which)
    parts = [r * s for r, s, name in ((result.logprobs, slope, "logprobs"), (result.entropy, other, "entropy")) if name == which or s.any()]
    torch.stack([part.sum() for part in parts]).sum().backward()
    return [None if t is None else t.grad for t in tensors]


def torchs(p: Problem, which: str, dtype: torch.dtype | None) -> list[Tensor | None]:
    """The same from full logits in `dtype`; None: in the problem's own."""
    hidden, weight, bias = leaves(p, dtype)
    common = torch.promote_types(hidden.dtype, weight.dtype)
    heat = p.temperature.to(common) if isinstance(p.temperature, Tensor) else p.temperature
    logprobs, entropy = reference_logprobs(
        hidden.to(common), weight.to(common), p.targets, bias=None if bias is None else bias.to(common), softcap=p.softcap, temperature=heat
    )
    slope, other = (s * p.mask for s in slopes_of(p.targets.numel(), which))
    (logprobs * slope.to(logprobs.dtype) + entropy * other.to(logprobs.dtype)).sum().backward()
    return [None if t is None else t.grad for t in (hidden, weight, bias)]


def check_gradients(problems: list[Problem], which: str = "both", *, frozen: tuple[int, ...] = (), backend: str = "auto") -> None:
    """At most twice torch's own error in the same dtype, each the root mean square over the problems: one draw is luck."""
    squares = torch.zeros(2, 3, dtype=torch.float64)
    eps = [0.0] * 3
    for p in problems:
        exact = torchs(p, which, torch.float64)
        for row, answer in enumerate((ours(p, which, frozen=frozen, backend=backend), torchs(p, which, None))):
            for i, (got, wanted) in enumerate(zip(answer, exact, strict=True)):
                if row == 0:
                    assert (got is None) == (i in frozen or wanted is None)
                if got is not None and wanted is not None and i not in frozen:
                    assert got.dtype == (p.hidden, p.weight, p.bias)[i].dtype
                    squares[row, i] += relative(got, wanted) ** 2
                    eps[i] = torch.finfo(got.dtype).eps
    errors = (squares / len(problems)).sqrt()
    # A quarter of a unit in the last place, the rounding of the result itself, is unavoidable.
    allowed = 2 * torch.maximum(errors[1], torch.tensor(eps) / 4)
    assert (errors[0] <= allowed).all(), (errors[0].tolist(), allowed.tolist())
    assert (errors[0] > 0).any()


PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing masked": {"masked": 0.0},
    "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": torch.rand(70, generator=torch.Generator().manual_seed(2)) + 0.5},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "everything": {"bias": True, "softcap": 5.0, "temperature": torch.rand(70, generator=torch.Generator().manual_seed(2)) + 0.5},
    "bfloat16": {"dtype": torch.bfloat16, "bias": True},
    "float16": {"dtype": torch.float16},
    "bfloat16 hidden, float32 weight": {"dtype": torch.bfloat16, "weight_dtype": torch.float32},
    "float32 hidden, bfloat16 weight": {"weight_dtype": torch.bfloat16, "softcap": 5.0},
}


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("which", ["both", "logprobs", "entropy", "most rows zero"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_against_float64(name: str, which: str, backend: str) -> None:
    check_gradients([sampled(70, 33, 1003, seed, **PROBLEMS[name]) for seed in range(4)], which, backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (0, 1), (1, 2)])
def test_frozen_tensors(frozen: tuple[int, ...], backend: str) -> None:
    check_gradients([sampled(70, 33, 503, seed, bias=True) for seed in range(3)], frozen=frozen, backend=backend)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("which", ["both", "logprobs"])
def test_more_rows_than_a_chunk(which: str, backend: str) -> None:
    chunk = rows_per_chunk(517)
    check_gradients([sampled(2 * chunk + 1, 24, 517, masked=0.1)], which, backend=backend)


@pytest.mark.parametrize("which", ["both", "logprobs", "entropy", "most rows zero"])
def test_the_chunk_size_does_not_matter(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    p = make(120, 24, 333, bias=True)
    whole = ours(p, which)
    monkeypatch.setattr(TorchBackend, "rows_per_chunk", lambda *_, **__: 32)
    for got, expected in zip(ours(p, which), whole, strict=True):
        assert got is not None
        assert expected is not None
        assert relative(got, expected) < 3e-6  # float32 sums in another order


@pytest.mark.parametrize("backend", AVAILABLE)
def test_float64_is_exact(backend: str) -> None:
    p = make(40, 16, 301, dtype=torch.float64, bias=True, softcap=5.0)
    for got, exact in zip(ours(p, backend=backend), torchs(p, "both", torch.float64), strict=True):
        assert got is not None
        assert exact is not None
        assert relative(got, exact) < 1e-13


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_rows_change_nothing_whatever_they_hold(backend: str, poison: float) -> None:
    p = make(70, 24, 333, bias=True, temperature=torch.ones(70))
    off = ~p.mask
    hidden, targets, heats = p.hidden.clone(), p.targets.clone(), torch.ones(70)
    hidden[off], targets[off], heats[off] = poison, -100, poison
    dirty = replace(p, hidden=hidden, targets=targets, temperature=heats)
    results = [linear_logprobs(q.hidden, q.weight, q.targets, mask=q.mask, temperature=q.temperature, backend=backend) for q in (p, dirty)]
    assert torch.equal(results[0].logprobs, results[1].logprobs)
    assert torch.equal(results[0].entropy, results[1].entropy)
    assert not results[1].logprobs[off].any()
    for got, expected in zip(ours(dirty, backend=backend), ours(p, backend=backend), strict=True):
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)
    assert not expected.isnan().any()


@pytest.mark.parametrize("backend", AVAILABLE)
def test_only_rows_with_an_upstream_gradient_are_computed_again(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    seen: list[int] = []
    kind = TorchBackend if backend == "torch" else type(_backend(backend))
    real = kind.sweep

    def spy(self: Any, head: Any, rows: Any, *arguments: Any, **more: Any) -> Any:
        seen.append(rows.hidden.shape[0])
        return real(self, head, rows, *arguments, **more)

    monkeypatch.setattr(kind, "sweep", spy)
    p = make(90, 16, 200, masked=0.0)
    ours(p, "most rows zero", backend=backend)
    assert seen == [90, 10]


def _backend(name: str) -> Any:
    from grpo_kernels.backends import select_backend

    return select_backend(name, torch.device("cpu"))


def test_no_upstream_gradient_at_all() -> None:
    p = make(20, 16, 60)
    hidden, weight, _ = leaves(p)
    result = linear_logprobs(hidden, weight, p.targets)
    ((result.logprobs + result.entropy) * 0.0).sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_two_backwards_and_no_second_derivative() -> None:
    p = make(30, 16, 90)
    hidden, weight, _ = leaves(p)
    result = linear_logprobs(hidden, weight, p.targets)
    total = (result.logprobs + 0.5 * result.entropy).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, hidden, create_graph=True)
    total.backward(retain_graph=True)
    first = weight.grad.clone()
    total.backward()
    assert torch.equal(weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


def test_a_weight_that_changed_before_backward_is_an_error() -> None:
    """Backward computes the logits again: with a weight after an optimiser's step it would be silently wrong."""
    p = make(30, 16, 90, bias=True)
    for changed in range(3):
        tensors = leaves(p)
        result = linear_logprobs(*tensors[:2], p.targets, bias=tensors[2])
        with torch.no_grad():
            tensors[changed].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.logprobs.sum().backward()


class Largest(TorchDispatchMode):
    """The most elements any tensor had that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_of_rows_times_vocabulary(softcap: float | None) -> None:
    rows, vocabulary = 1500, 3000
    p = make(rows, 16, vocabulary, softcap=softcap)
    hidden, weight, _ = leaves(p)
    with Largest() as largest:
        result = linear_logprobs(hidden, weight, p.targets, softcap=softcap, backend="torch")
        (result.logprobs - 0.1 * result.entropy).sum().backward()
    chunk = rows_per_chunk(vocabulary)
    assert 0 < largest.elements <= max(chunk, 64) * vocabulary
    assert largest.elements < rows * vocabulary / 2, "the chunk holds all rows: the test shows nothing"


PEAK = """
import sys, torch
from grpo_kernels import linear_logprobs
torch.set_num_threads(1)
rows, width, vocabulary = 2500, 16, 24000
hidden = torch.randn(rows, width, requires_grad=True)
weight = torch.randn(vocabulary, width, requires_grad=True)
def run(rows, backend):
    result = linear_logprobs(hidden[:rows], weight, torch.arange(rows), backend=backend)
    (result.logprobs - 0.1 * result.entropy).sum().backward()
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
for backend in sys.argv[1:]:
    run(16, backend)
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS")
    run(rows, backend)
    print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of resident memory from Linux's /proc")
def test_memory_is_far_below_the_logits() -> None:
    """2,500 x 24,000 float32 logits are 240 MB; a chunk of 512 rows, 49 MB, and the weight's gradient, 1.5 MB, are not. 55 MB was seen."""
    run = subprocess.run([sys.executable, "-c", PEAK, *AVAILABLE], check=True, capture_output=True, text=True)
    peaks = [int(line) for line in run.stdout.split()]
    assert len(peaks) == len(AVAILABLE)
    assert max(peaks) < 100e6, peaks


@pytest.mark.parametrize("backend", AVAILABLE)
def test_tied_embeddings(backend: str) -> None:
    """The head's weight is the embedding as well, and has the sum of both gradients."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(90, 16, generator=g)
    tokens, targets = torch.randint(0, 90, (2, 40), generator=g)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        weight = table.detach().to(dtype).requires_grad_()
        hidden = torch.tanh(embedding(tokens, weight))
        if dtype == torch.float64:
            logprobs, entropy = reference_logprobs(hidden, weight, targets)
        else:
            result = linear_logprobs(hidden, weight, targets, backend=backend)
            logprobs, entropy = result.logprobs, result.entropy
        (logprobs.sum() + entropy.square().sum()).backward()
        gradients.append(weight.grad)
    assert relative(*gradients) < 5e-6  # float32 sums, 1.2e-6 was seen; either half alone would be an error near 1


def total_of_logprobs(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
    result = linear_logprobs(torch.nn.functional.gelu(hidden), weight, p.targets, mask=p.mask)
    return (result.logprobs * torch.linspace(-1, 1, p.targets.numel()) - 0.1 * result.entropy).sum()


def total_of_loss(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
    inner = torch.nn.functional.gelu(hidden)
    result = linear_grpo_loss(inner, weight, p.targets, p.advantages, objective=p.objective, old_logprobs=p.old, mask=p.mask)
    return result.loss * 3.0


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("function", [total_of_logprobs, total_of_loss])
@pytest.mark.parametrize("objective", [Objective.dapo(), Objective.dapo(entropy_coef=0.1)])
def test_gradient_checkpointing(function: Callable[..., Tensor], objective: Objective, use_reentrant: bool) -> None:
    """Equal bit for bit: the same is computed, once more."""
    p = make(40, 16, 90, objective=objective)
    answers = []
    for again in (True, False):
        hidden, weight, _ = leaves(p)
        total = checkpoint(function, hidden, weight, p, use_reentrant=use_reentrant) if again else function(hidden, weight, p)
        (total * total).backward()
        answers.append((total.detach(), hidden.grad, weight.grad))
    for got, expected in zip(*answers, strict=True):
        assert torch.equal(got, expected)
        assert got.any()


@pytest.mark.parametrize("backend", AVAILABLE)
def test_autocast_does_not_round_the_products(backend: str) -> None:
    """Neither in forward, nor in backward, which torch runs outside or inside of the context."""
    p = make(30, 64, 900, bias=True)
    plain = ours(p, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ours(p, backend=backend)
        inside = linear_logprobs(p.hidden, p.weight, p.targets, backend=backend)
    assert torch.equal(inside.logprobs, linear_logprobs(p.hidden, p.weight, p.targets, backend=backend).logprobs)
    assert inside.logprobs.dtype == torch.float32
    for got, expected in zip(cast, plain, strict=True):
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)


def test_autocast_is_off_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with out= are not cast whether it is or not; others may come."""
    seen = []
    for name in ("sweep", "add_distances"):
        real = getattr(TorchBackend, name)

        def spy(self: Any, *arguments: Any, real: Callable[..., Any] = real, **more: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return real(self, *arguments, **more)

        monkeypatch.setattr(TorchBackend, name, spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours(make(30, 16, 90), backend="torch")
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] * 3


def test_without_gradients_nothing_is_kept() -> None:
    p = make(30, 16, 90)
    expected = linear_logprobs(p.hidden, p.weight, p.targets)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            result = linear_logprobs(p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_(), p.targets)
        assert result.logprobs.grad_fn is None
        assert torch.equal(result.logprobs, expected.logprobs)
        assert torch.equal(result.entropy, expected.entropy)


def test_padded_shape_and_equality_with_packed() -> None:
    p = make(12, 16, 80)
    leaf = p.hidden.view(3, 4, 16).clone().requires_grad_()
    padded = linear_logprobs(leaf, p.weight, p.targets.view(3, 4))
    flat = p.hidden.clone().requires_grad_()
    packed = linear_logprobs(flat, p.weight, p.targets)
    assert torch.equal(padded.logprobs.view(-1), packed.logprobs)
    padded.entropy.sum().backward()
    packed.entropy.sum().backward()
    assert torch.equal(leaf.grad.view(12, 16), flat.grad)
    assert flat.grad.any()


def test_strided_targets_and_hidden() -> None:
    p = make(24, 16, 80)
    every_second = linear_logprobs(p.hidden[::2], p.weight, p.targets[::2])
    assert torch.allclose(every_second.logprobs, linear_logprobs(p.hidden, p.weight, p.targets).logprobs[::2], atol=1e-5)


BAD: dict[str, dict[str, Any]] = {
    "targets holds 20 at row 1": {"targets": torch.tensor([0, 20, 1, 2])},
    "targets has shape": {"targets": torch.zeros(3, dtype=torch.long)},
    "hidden has shape": {"hidden": torch.zeros(4)},
    "weight has shape": {"weight": torch.zeros(20, 7)},
    "bias has shape": {"bias": torch.zeros(19)},
    "mask has shape": {"mask": torch.ones(3, dtype=torch.bool)},
    "temperature is 0": {"temperature": 0.0},
    "temperature has shape": {"temperature": torch.ones(3)},
    "temperature holds nan at row 2": {"temperature": torch.tensor([1.0, 1.0, float("nan"), 1.0])},
    "softcap is -1": {"softcap": -1.0},
    "backend is 'gpu'": {"backend": "gpu"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    p = make(4, 8, 20)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**{"hidden": p.hidden, "weight": p.weight, "targets": p.targets, **BAD[message]})
