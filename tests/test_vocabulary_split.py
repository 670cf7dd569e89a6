"""A vocabulary split over processes: `group=` against the same call in one process."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import Objective, backends, linear_grpo_loss, linear_logprobs
from grpo_kernels.backends.triton import unavailable
from problems import Problem, leaves, make, relative
from processes import in_processes

VOCABULARY, WIDTH, ROWS = 203, 24, 45
BACKENDS = [status.name for status in backends() if status.name == "torch" or (status.name == "cpu" and status.available)]
Answers = dict[str, Tensor | None]


def _unlikely() -> Problem:
    """In two rows the target is almost impossible, and it and the most likely token are the first and the last of the vocabulary."""
    p = make(ROWS, WIDTH, VOCABULARY, old=False, bias=True)
    apart = p.weight[-1] - p.weight[0]
    far = 200.0 * apart / apart.dot(apart)
    p.hidden[0], p.hidden[1] = far, -far
    p.targets[0], p.targets[1] = 0, VOCABULARY - 1
    p.mask[:2] = True
    return p


def _problem(name: str) -> Problem:
    heats = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) + 0.5
    shape = (ROWS, WIDTH, VOCABULARY)
    makers: dict[str, Any] = {
        "plain": lambda: make(*shape),
        "bias and softcap": lambda: make(*shape, bias=True, softcap=4.0),
        "entropy bonus": lambda: make(*shape, objective=Objective.grpo(entropy_coef=0.1), bias=True),
        "softcap, bonus, row temperatures": lambda: make(
            *shape, objective=Objective.dapo(entropy_coef=0.1), bias=True, softcap=4.0, temperature=heats
        ),
        "row temperatures": lambda: make(*shape, temperature=heats),
        "sequence ratio": lambda: make(*shape, objective=Objective.gspo(clip_low=0.2, clip_high=0.2, kl_coef=0.1), masked=0.0),
        "top entropy": lambda: make(*shape, objective=Objective.dapo(top_entropy=0.5)),
        "without old": lambda: make(*shape, old=False),
        "several chunks and tiles": lambda: make(1100, 8, 2300, objective=Objective.gspo(clip_low=0.2, clip_high=0.2), bias=True),
        "bfloat16": lambda: make(*shape, dtype=torch.bfloat16, bias=True),
        "bfloat16, softcap": lambda: make(*shape, dtype=torch.bfloat16, softcap=4.0),
        "float64": lambda: make(*shape, dtype=torch.float64, bias=True),
        "unlikely": _unlikely,
        "unlikely, softcap": lambda: replace(_unlikely(), softcap=150.0),
        "nothing counts": lambda: make(*shape, bias=True, masked=1.0),
        "no rows": lambda: make(0, WIDTH, VOCABULARY, bias=True),
    }
    return makers[name]()


NAMES = [
    "plain", "bias and softcap", "entropy bonus", "softcap, bonus, row temperatures", "row temperatures", "sequence ratio", "top entropy",
    "without old", "several chunks and tiles", "bfloat16", "bfloat16, softcap", "float64", "unlikely", "unlikely, softcap",
    "nothing counts", "no rows",
]  # fmt: skip


IN_INTERPRETER = ["bias and softcap", "bfloat16", "unlikely"]


def _splits(count: int, vocabulary: int) -> list[list[int]]:
    """Where the slices of `count` processes begin and end: uneven, and with slices of a single row."""
    middle = vocabulary * 3 // 5
    ends = {2: [[middle], [1]], 3: [[middle, middle + 1], [1, vocabulary - 1]]}
    return [[0, *some, vocabulary] for some in ends[count]]


def _slice(p: Problem, split: int) -> Problem:
    """This process's, of the split of that number."""
    rank = dist.get_rank()
    bounds = _splits(dist.get_world_size(), p.weight.shape[0])[split]
    own = slice(bounds[rank], bounds[rank + 1])
    return replace(p, weight=p.weight[own], bias=None if p.bias is None else p.bias[own])


def _loss(p: Problem, group: dist.ProcessGroup | None, backend: str, *, frozen: bool = False) -> Answers:
    hidden, weight, bias = leaves(p)
    for parameter in (weight, bias):
        if frozen and parameter is not None:
            parameter.requires_grad_(False)
    result = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, objective=p.objective, cu_seqlens=p.cu_seqlens, old_logprobs=p.old, ref_logprobs=p.ref,
        mask=p.mask, bias=bias, temperature=p.temperature, softcap=p.softcap, group=group, backend=backend,
    )  # fmt: skip
    (result.loss * 3.0).backward()
    fields = {name: getattr(result, name).detach() for name in ("loss", "logprobs", "entropy", "policy_weight")}
    return fields | _gradients(hidden, weight, bias)


def _logprobs(p: Problem, group: dist.ProcessGroup | None, backend: str) -> Answers:
    hidden, weight, bias = leaves(p)
    result = linear_logprobs(
        hidden, weight, p.targets, mask=p.mask, bias=bias, temperature=p.temperature, softcap=p.softcap, group=group, backend=backend
    )
    g = torch.Generator().manual_seed(5)
    upstream = [torch.randn(len(p.targets), generator=g, dtype=result.logprobs.dtype) for _ in range(2)]
    ((result.logprobs * upstream[0]).sum() + (result.entropy * upstream[1]).sum()).backward()
    return {"logprobs": result.logprobs.detach(), "entropy": result.entropy.detach()} | _gradients(hidden, weight, bias)


def _gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Answers:
    return {"hidden gradient": hidden.grad, "weight gradient": weight.grad, "bias gradient": None if bias is None else bias.grad}


Work = dict[tuple[str, ...], Answers]


def _work() -> Work:
    """All that is asked of one process, by backend, kind of call, problem and the number of the split."""
    answers: Work = {}
    group = dist.group.WORLD
    for backend, name, split in itertools.product(BACKENDS, NAMES, range(2)):
        part = _slice(_problem(name), split)
        answers[backend, "loss", name, str(split)] = _loss(part, group, backend)
        answers[backend, "logprobs", name, str(split)] = _logprobs(part, group, backend)
    part = _slice(_problem("bias and softcap"), 0)
    for backend in BACKENDS:
        answers[backend, "frozen"] = _loss(part, group, backend, frozen=True)
    outside = replace(part, targets=torch.full_like(part.targets, VOCABULARY))
    with pytest.raises(ValueError, match=rf"must be in \[0, {VOCABULARY}\)"):  # of all processes, and raised on all of them
        _logprobs(outside, group, "torch")
    return answers


def _triton_work() -> Work:
    answers: Work = {}
    for name in IN_INTERPRETER:
        part = _slice(_problem(name), 0)
        # Each its own way to the first product, as where only one of them was tuned: the chunks must be the same.
        os.environ["GRPO_KERNELS_GEMM1"] = ("library", "anchored")[dist.get_rank()]
        answers["loss", name] = _loss(part, dist.group.WORLD, "triton")
        answers["logprobs", name] = _logprobs(part, dist.group.WORLD, "triton")
    return answers


@pytest.fixture(scope="module")
def triton_run() -> list[Work]:
    return in_processes(2, _triton_work, seconds=300)


@pytest.fixture(scope="module", params=[2, 3])
def run(request: pytest.FixtureRequest) -> list[Work]:
    return in_processes(request.param, _work)


def _check(got: list[Answers], expected: Answers, dtype: torch.dtype, bfloat16_tolerance: float = 1e-3) -> None:
    """Whole on every process but for the gradients of weight and bias, whose slices make up the whole."""
    for name, exact in expected.items():
        shares = [answers[name] for answers in got]
        if exact is None:
            assert all(share is None for share in shares), name
            continue
        tensors = [share for share in shares if share is not None]
        assert len(tensors) == len(got), name
        whole = [torch.cat(tensors)] if name in ("weight gradient", "bias gradient") else tensors
        # A gradient is rounded to the parameter's dtype at the end, where another order of the sums may tip it.
        tolerance = bfloat16_tolerance if name.endswith("gradient") and dtype == torch.bfloat16 else 2e-6
        for value in whole:
            assert value.dtype == exact.dtype
            assert value.shape == exact.shape
            if exact.any():
                assert relative(value, exact) < tolerance, name
            else:
                assert not value.any(), name


@pytest.mark.parametrize("call", ["loss", "logprobs"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_split_vocabulary_gives_the_result_of_a_whole_one(backend: str, name: str, call: str, run: list[Work]) -> None:
    p = _problem(name)
    expected = _loss(p, None, backend) if call == "loss" else _logprobs(p, None, backend)
    for split in range(2):
        _check([work[backend, call, name, str(split)] for work in run], expected, p.hidden.dtype)


@pytest.mark.skipif(unavailable(torch.device("cpu")) is not None, reason="kernels run on CPU tensors in Triton's interpreter only")
@pytest.mark.parametrize("call", ["loss", "logprobs"])
@pytest.mark.parametrize("name", IN_INTERPRETER)
def test_split_vocabulary_on_tritons_kernels(name: str, call: str, triton_run: list[Work]) -> None:
    """Of bfloat16, E and the row scales are rounded before the products: to 2^-9, and by other sums than the whole's."""
    p = _problem(name)
    expected = _loss(p, None, "torch") if call == "loss" else _logprobs(p, None, "torch")
    _check([work[call, name] for work in triton_run], expected, p.hidden.dtype, bfloat16_tolerance=5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_head_of_a_split_vocabulary(backend: str, run: list[Work]) -> None:
    expected = _loss(_problem("bias and softcap"), None, backend, frozen=True)
    assert expected["weight gradient"] is None
    _check([work[backend, "frozen"] for work in run], expected, torch.float32)


@pytest.mark.parametrize("name", ["unlikely", "unlikely, softcap"])
def test_unlikely_rows_are_unlikely_and_across_processes(name: str) -> None:
    """What the problem is there for: the row is done again with its maximum, which is on another process than the target."""
    p = _problem(name)
    logprobs = _logprobs(p, None, "torch")["logprobs"]
    assert logprobs is not None
    assert float(logprobs[:2].max()) < -100
    assert p.targets[:2].tolist() == [0, VOCABULARY - 1]
    logits = p.hidden[:2] @ p.weight.t()
    assert logits.argmax(1).tolist() == [VOCABULARY - 1, 0]


def _fail_on_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("of the second process")
    dist.barrier()


def test_failure_in_one_process_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match=r"process 1 failed(.|\n)*of the second process"):
        in_processes(2, _fail_on_second)
