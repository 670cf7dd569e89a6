"""Acceptance on an NVIDIA GPU in at most 8 minutes, with no network: correctness, bandwidth, time and memory beside what was predicted.

    python benchmarks/gpu_acceptance.py             # writes benchmarks/results/gpu_acceptance_<device>.json and .txt; $OUT: there instead
    python benchmarks/gpu_acceptance.py --dry-run   # the same on a CPU, in Triton's interpreter, at tiny shapes: its times mean nothing

Sections have deadlines: what does not fit is cut, and named. One that raises is reported, and the others go on, unless the device is lost.
The exit status is 1 if a result is wrong, a section raised, or correctness was cut; a missed speed target or a peer that is not installed
does not change it. Times are medians of CUDA events in interleaved rounds on random normal data, warm: of the row kernels the device's
alone, of the losses what a caller sees, the host's included. `benchmarks/traffic_model.py` makes the predictions.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and "--dry-run" in sys.argv:  # both are read when torch and triton are imported
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import argparse
import faulthandler
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # a checkout need not be installed

import acceptance_checks as checks
import contenders
import torch
import traffic_model
from acceptance_checks import BACKEND, OBJECTIVES, Case, Judge, RowArguments, Shape, name_of
from contenders import Inputs, relative_error
from gpu_contenders import (
    COMPILED,
    FORWARD_PEERS,
    FULL_LOGITS,
    Run,
    library_forward,
    one_product,
    ours_forward,
    peers,
    products_in_chunks,
    random_inputs,
)
from torch import Tensor
from traffic_model import STRATEGIES, Strategy

from grpo_kernels import Objective
from grpo_kernels.backends import select_backend
from grpo_kernels.backends.base import Keep
from grpo_kernels.head import Head
from grpo_kernels.triton_kernels import rows
from grpo_kernels.triton_kernels.selection import OVERRIDE, first_product

LIMIT = 470  # seconds, for a kernel that hangs


@dataclass(frozen=True)
class Sizes:
    """What is run. seconds: of each section, all in all less than 8 minutes."""

    correctness: tuple[Shape, ...]
    row_kernels: tuple[int, int]  # rows, V
    losses: tuple[Shape, ...]  # the first has the target
    strategies: tuple[Shape, ...]
    length: int  # tokens of a sequence
    rounds: int
    seconds: dict[str, float]


FULL = Sizes(
    correctness=((1, 64, 1000), (128, 4096, 151936), (300, 96, 50257), (1025, 128, 2053), (64, 64, 129920)),
    row_kernels=(4096, 151936),
    losses=((4096, 4096, 131072), (16384, 2048, 151936), (8192, 1024, 151936), (32768, 4096, 151936)),
    strategies=((8192, 1024, 32000), (8192, 2048, 32000), (8192, 2048, 151936), (8192, 4096, 151936), (8192, 8192, 128256)),
    length=2048,
    rounds=10,
    seconds={"header": 10, "correctness": 170, "row_kernels": 30, "losses": 180, "strategies": 40},
)
DRY = Sizes(  # a minute and less; the time is there for a machine that is busy
    correctness=((1, 16, 70), (5, 24, 203)),
    row_kernels=(2, 200),
    losses=((4, 16, 130), (2, 24, 70)),
    strategies=((2, 16, 70),),
    length=2,
    rounds=1,
    seconds={"header": 10, "correctness": 120, "row_kernels": 40, "losses": 200, "strategies": 40},
)


@dataclass
class Section:
    """rows: what is reported, one figure or check each. left_out, cut: in words. failures: what makes the exit status 1.
    clocks: at its end, the device still warm."""

    name: str
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    clocks: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def is_late(self, what: str, reserve: float = 0.0) -> bool:
        """Whether the deadline is less than `reserve` seconds away; `what` is then noted as cut."""
        if time.monotonic() + reserve <= self.deadline:
            return False
        self.cut.append(what)
        return True


@dataclass(frozen=True)
class Bench:
    """Where everything runs. model: the device of the predictions, None where there is no such."""

    device: torch.device
    model: traffic_model.Device | None
    sizes: Sizes
    dry: bool

    def predicted(self, milliseconds: Callable[[traffic_model.Device], float]) -> float | None:
        return None if self.model is None else milliseconds(self.model)


def progress(*text: object) -> None:
    print(time.strftime("%H:%M:%S"), *text, file=sys.stderr, flush=True)


@contextmanager
def chosen(strategy: Strategy | None) -> Iterator[None]:
    """GEMM 1 by this strategy, whatever the selection table says; None: by the table."""
    before = os.environ.pop(OVERRIDE, None)
    if strategy is not None:
        os.environ[OVERRIDE] = strategy
    try:
        yield
    finally:
        os.environ.pop(OVERRIDE, None)
        if before is not None:
            os.environ[OVERRIDE] = before


def named(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


# Errors


class DeviceLost(RuntimeError):
    """The CUDA context is gone: every further call would raise the same."""


def is_lost(error: Exception) -> bool:
    """Whether `error` says that the device is lost, or the device does: a launch by Triton reports it in other words."""
    if "out of memory" not in str(error) and (isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)):
        return True
    return torch.cuda.is_initialized() and not answers()


def answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def attempt(section: Section, what: str, call: Callable[[], object], notes: list[str] | None = None) -> bool:
    """Runs it; an exception goes into `notes`, the failures of the section by default, and the section goes on.

    Raises:
        DeviceLost: nothing can go on. Always a failure as well.
    """
    try:
        call()
    except DeviceLost:
        raise  # it is noted already
    except Exception as error:
        lost = is_lost(error)
        text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if lost or notes is None:
            traceback.print_exc()
            section.failures.append(text)
        else:
            notes.append(text)
        if lost:
            raise DeviceLost(text) from error
        return False
    return True


# Memory


def release(bench: Bench) -> None:
    if bench.device.type == "cuda":
        with suppress(RuntimeError):  # of a lost device: whoever uses it next is told
            torch.cuda.empty_cache()


def free_bytes(bench: Bench) -> float:
    """What can be allocated: what is free, and what torch keeps but does not use."""
    if bench.device.type != "cuda":
        return math.inf
    return 0.9 * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def fits(bench: Bench, notes: list[str], what: str, needed: float) -> bool:
    """Whether there is memory for it; `what` is noted otherwise."""
    free = free_bytes(bench)
    if needed > free:
        notes.append(f"{what}: it needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} can be had")
    return needed <= free


# Header


def query_nvidia_smi() -> dict[str, str]:
    """Clocks, power and throttle reasons; nothing where nvidia-smi is not there, or answers something else."""
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # newer and older drivers
        names = ["driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu", reasons]
        with suppress(Exception):  # whatever it is, the clocks are not worth a run
            device = f"GPU-{torch.cuda.get_device_properties().uuid}"
            command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "-i", device]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            values = [value.strip() for value in answer.splitlines()[0].split(",")]
            return dict(zip([*names[:-1], "throttle_reasons"], values, strict=True))
    return {}


def run_header(bench: Bench, section: Section) -> None:
    installed = {}
    for package in ("torch", "triton", "transformers", "trl", "liger-kernel", "verl"):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "-"
    git, commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"], "-"
    with suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "-"
    head = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "python": platform.python_version(), **installed, "dry_run": bench.dry}
    head["predictions_assume"] = "no device: there are none" if bench.model is None else str(bench.model)
    section.rows.append(head)
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        head |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
        operand = torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16)
        for _ in range(400):  # half a second and more of products, queued, so that the clocks are those under load
            torch.mm(operand, operand)
        head |= query_nvidia_smi()
        torch.cuda.synchronize()
    else:
        head["device"] = "CPU, Triton's interpreter"


# Correctness


def run_correctness(bench: Bench, section: Section) -> None:
    """Every launcher and operator at every shape, in bfloat16 and float32. A check that raises is a failure, and the others go on."""
    for wanted in bench.sizes.correctness:
        shape = narrowed(bench, section, wanted)
        if shape is None:
            continue
        for dtype in (torch.bfloat16, torch.float32):
            where = f"{named(shape)} {name_of(dtype)}"
            if not section.is_late(where):
                progress("correctness", where)
                attempt(section, where, partial(check_shape, bench, section, shape, dtype, where))
                release(bench)


def narrowed(bench: Bench, section: Section, shape: Shape) -> Shape | None:
    """The shape, or as much of its width as there is memory for: most is the weight's, in float64. None, and cut, if not even a
    sixteenth fits."""
    N, H, V = shape
    for width in (H, H // 2, H // 4, H // 8, H // 16):
        if checks.bytes_needed((N, width, V)) <= free_bytes(bench):
            if width < H:
                section.left_out.append(f"{named(shape)}, for want of memory: {named((N, width, V))} is checked instead")
            return N, width, V
    fits(bench, section.cut, named(shape), checks.bytes_needed(shape))
    return None


def check_shape(bench: Bench, section: Section, shape: Shape, dtype: torch.dtype, where: str) -> None:
    check_case(section, Case.random(shape, dtype, bench.device), where)


def check_case(section: Section, case: Case, where: str) -> None:
    logits = checks.products(case.hidden, case.weight, torch.ones_like(case.temperature)).to(case.hidden.dtype)
    # float32 operands have no anchored GEMM, and an entropy in the loss needs the logits: both are the library's.
    anchored = case.hidden.dtype != torch.float32

    def check(name: str, call: Callable[[Judge], None], strategy: Strategy | None = None) -> None:
        at = f"{where}, {name}" + (f", {strategy}" if strategy else "")
        if section.is_late(at):
            return
        judge = Judge(at)
        with chosen(strategy):
            attempt(section, at, lambda: call(judge))
        section.rows += [asdict(c) | {"passed": c.passed} for c in judge.checks]
        section.failures += [f"{c.name}, {c.where}: error {c.error:.2e}, allowed {c.allowed:.2e}" for c in judge.checks if not c.passed]

    def check_objective(name: str, goal: Objective) -> None:
        check(name, lambda judge: checks.check_rows(judge, case, goal, logits))
        check(name, lambda judge: checks.check_logits(judge, case, goal, logits))
        check(name, lambda judge: checks.check_tokens(judge, case, goal))
        for strategy in STRATEGIES if anchored and not goal.entropy_coef else STRATEGIES[:1]:
            check(name, lambda judge: checks.check_linear(judge, case, goal), strategy)

    check("chunk", lambda judge: checks.check_products(judge, case))
    check("targets", lambda judge: checks.check_targets(judge, case))
    for name, goal in OBJECTIVES.items():
        check_objective(name, goal)


# Measuring


DELAY = 4_000_000  # cycles: 2 ms at 2 GHz, and a launcher takes 0.1 to 0.25 ms of the host


@dataclass(frozen=True)
class Sample:
    """peak: bytes over what was allocated before the call; None on a CPU. waited: the device may have waited for the host."""

    milliseconds: float
    peak: int | None
    waited: bool = False


@dataclass(frozen=True)
class Contestant:
    """ours: what it raises is a failure; of others it is noted, and they are left out. prepare: before each run, off the clock.
    device_only: the host's part is not measured. useful: operations, or bytes, of the job and not of the method. predicted: milliseconds.
    predicted_peak: bytes, without inputs and gradients."""

    name: str
    call: Callable[[], object]
    ours: bool = False
    prepare: Callable[[], object] = lambda: None
    device_only: bool = False
    useful: float = 0.0
    predicted: float | None = None
    predicted_peak: float | None = None


def measure(bench: Bench, contestant: Contestant) -> Sample:
    if bench.device.type != "cuda":
        start = time.perf_counter()
        contestant.call()
        return Sample(1e3 * (time.perf_counter() - start), None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if contestant.device_only:
        torch.cuda._sleep(DELAY)  # so that all is launched before the first event is reached
    began.record()
    contestant.call()
    ended.record()
    waited = not contestant.device_only or began.query()
    torch.cuda.synchronize()
    return Sample(began.elapsed_time(ended), torch.cuda.max_memory_allocated() - before, waited)


WARM_ROUNDS = 3  # at least, even if it gets a little late
GRACE = 10.0  # seconds: so late
SLOW = 8  # times the fastest: such a contestant runs in no more than WARM_ROUNDS


def compete(
    bench: Bench, section: Section, where: str, contestants: list[Contestant], inspect_result: Callable[[Contestant], None] | None = None
) -> dict[str, list[Sample]]:
    """Warm, interleaved, in an order that alternates; at least one round, and as many as fit before the deadline. `inspect_result` is
    called after the first run, which compiles. Who raises is out, with the samples that it has."""
    warm: dict[str, float] = {}

    def warm_up(c: Contestant) -> None:
        c.prepare()
        c.call()
        if inspect_result is not None:
            inspect_result(c)
        c.prepare()
        milliseconds = measure(bench, c).milliseconds
        c.prepare()
        warm[c.name] = milliseconds

    def race(c: Contestant) -> None:
        c.prepare()
        samples[c.name].append(measure(bench, c))

    def survives(c: Contestant, run: Callable[[Contestant], None]) -> bool:
        if attempt(section, f"{where}: {c.name}", partial(run, c), None if c.ours else section.left_out):
            return True
        release(bench)  # only then: fresh memory is slow, and would be measured
        return False

    for c in contestants:
        if not section.is_late(f"{where}: {c.name}", WARM_ROUNDS * sum(warm.values()) / 1e3):
            progress(section.name, where, "warm-up:", c.name)
            survives(c, warm_up)
    running = [c for c in contestants if c.name in warm]
    samples: dict[str, list[Sample]] = {c.name: [] for c in running}
    for round_ in range(bench.sizes.rounds):
        reserve = -GRACE if round_ < WARM_ROUNDS else 0.0
        if round_ and section.is_late(f"{where}: rounds {round_ + 1} to {bench.sizes.rounds}", reserve):
            break
        for c in list(reversed(running) if round_ % 2 else running):
            if (round_ < WARM_ROUNDS or warm[c.name] < SLOW * min(warm.values())) and not survives(c, race):
                running.remove(c)
    return {name: values for name, values in samples.items() if values}


def spread(samples: list[Sample]) -> dict[str, float]:
    times = [s.milliseconds for s in samples]
    return {"ms": median(times), "ms_min": min(times), "ms_max": max(times), "runs": len(times)}


# Row kernels


def run_row_kernels(bench: Bench, section: Section) -> None:
    """GB/s of compulsory bytes, and their share of a device copy's in the same rounds."""
    for dtype in (torch.bfloat16, torch.float32):
        where = f"{named(bench.sizes.row_kernels)} {name_of(dtype)}"
        needed = (3 if dtype == torch.bfloat16 else 5) * math.prod(bench.sizes.row_kernels) * 4  # logits and products, each twice
        if not section.is_late(where) and fits(bench, section.left_out, where, needed):
            attempt(section, where, partial(race_row_kernels, bench, section, where, dtype))
            release(bench)


COPY, ROW_LOSS = "device copy", "row_loss, in place"


def race_row_kernels(bench: Bench, section: Section, where: str, dtype: torch.dtype) -> None:
    contestants = row_contestants(bench, dtype)
    samples = compete(bench, section, where, contestants)
    times = {name: spread(values) for name, values in samples.items()}
    rates = {c.name: c.useful / times[c.name]["ms"] / 1e6 for c in contestants if c.name in times}
    for c in contestants:
        if c.name in rates and COPY in rates:
            figures = {**times[c.name], "predicted_ms": c.predicted, "gb_s": rates[c.name], "of_copy": rates[c.name] / rates[COPY]}
            waited = sum(sample.waited for sample in samples[c.name])
            section.rows.append({"kernel": c.name, "where": where, **figures, "waited_for_host": waited})


def row_contestants(bench: Bench, dtype: torch.dtype) -> list[Contestant]:
    """`useful` is in bytes here: those that a kernel cannot do without. What is written over is restored before each run."""
    count, V = bench.sizes.row_kernels
    case, goal = Case.without_head(count, V, bench.device), OBJECTIVES["dapo + kl"]
    given = RowArguments.of(case, goal)
    logits = (torch.randn(count, V, generator=torch.Generator(bench.device).manual_seed(1), device=bench.device) * 3).to(dtype)
    work, size = logits.clone(), logits.element_size()
    whole, slope = float(logits.numel() * size), case.advantages / count
    statistics = torch.zeros(5, count, device=bench.device)

    def restore() -> None:
        work.copy_(logits)

    def gradient_in_place() -> None:
        rows.row_gradient(work, given.slots, given.targets, given.inverse_temperature, statistics, slope, None, work)

    def entry(name: str, call: Callable[[], object], reads: int, writes: int, prepare: Callable[[], object] = restore) -> Contestant:
        predicted = bench.predicted(lambda d: 1e3 * traffic_model.row_kernel_bytes(count, V, size, d, reads=reads, writes=writes) / d.copy)
        return Contestant(name, call, name != COPY, prepare, True, (1 + writes) * whole, predicted)

    entries = [
        entry(COPY, restore, 1, 1),
        entry("row_statistics", lambda: statistics.copy_(checks.row_statistics(logits, given)), 1, 0),  # first: the gradient needs them
        entry("row_gradient, in place", gradient_in_place, 1, 1),
        entry(ROW_LOSS, lambda: checks.row_loss(work, given, goal, work), 2, 1),
    ]
    if dtype != torch.float32:
        return entries
    width = traffic_model.padded(V)
    products = torch.randn(count, width, generator=torch.Generator(bench.device).manual_seed(1), device=bench.device) * 3
    chunk, offset = products.clone(), products.gather(1, case.targets[:, None])[:, 0]

    def anchor(name: str, store: torch.dtype | None, stored: int) -> Contestant:
        moved = traffic_model.anchor_rows_bytes(count, width, stored)
        known = (chunk, V, case.targets, given.inverse_temperature, offset)
        predicted = bench.predicted(lambda d: 1e3 * moved / d.copy)
        call = partial(rows.anchor_rows, *known, bias=None, softcap=None, store=store)
        return Contestant(name, call, True, lambda: chunk.copy_(products), True, moved, predicted)

    return [*entries, anchor("anchor_rows, to bf16", torch.bfloat16, 2), anchor("anchor_rows, sums only", None, 0)]


# Losses


WHOLE, CHUNKED, ONE = "3 GEMMs, whole", "3 GEMMs, in chunks", "1 GEMM"
DEFAULT = "ours, default"
OURS: dict[str, Strategy | None] = {DEFAULT: None} | {f"ours, {strategy}": strategy for strategy in STRATEGIES}


def rows_per_chunk(bench: Bench, strategy: Strategy | None, inputs: Inputs, keep: Keep) -> int:
    """As the backend chooses them; the weight has a gradient unless nothing is kept."""
    head, backend = Head.of(inputs.weight, None, None, None), select_backend(BACKEND, bench.device)
    with chosen(strategy):
        return backend.rows_per_chunk(head, inputs.mask.numel(), keep, weight_gradient=keep != "nothing")


def floor_chunk(bench: Bench) -> int:
    return 3 if bench.dry else 4096


def loss_contestants(bench: Bench, section: Section, shape: Shape, inputs: Inputs, only: set[str] | None = None) -> list[Contestant]:
    N, H, V = shape
    useful = 6.0 * N * H * V
    bare = bench.predicted(lambda d: traffic_model.floor(N, H, V, d))

    def reset() -> None:
        inputs.hidden.grad = inputs.weight.grad = None

    def entry(name: str, run: Run, ours: bool = False, **more: Any) -> Contestant:
        return Contestant(name, lambda: run(inputs), ours, reset, useful=useful, **more)

    result = [entry(WHOLE, contenders.products_full, predicted=bare)]
    result.append(entry(CHUNKED, products_in_chunks(floor_chunk(bench)), predicted=bare))
    run_loss = contenders.ours(BACKEND)
    for name, strategy in OURS.items():
        assumed, chunk = strategy or first_product(bench.device, H, V), rows_per_chunk(bench, strategy, inputs, "exponentials")
        predicted = bench.predicted(lambda d, s=assumed, n=chunk: traffic_model.loss(s, N, H, V, n, d).milliseconds)
        room = traffic_model.memory(assumed, N, H, V, chunk).over_gradients
        result.append(entry(name, by(strategy, run_loss), True, predicted=predicted, predicted_peak=room))
    others = peers(bench.dry) if only is None else {}
    if shape != bench.sizes.losses[0]:
        others.pop(COMPILED, None)
    result += [entry(name, make) for name, make in available(bench, section, shape, others)]
    return [c for c in result if only is None or c.name in only]


def forward_contestants(bench: Bench, section: Section, shape: Shape, inputs: Inputs) -> list[Contestant]:
    """Where nothing is stored, ours has one way; the library's product and the sums of its rows are beside it, to judge that choice by."""
    N, H, V = shape
    one = bench.predicted(lambda d: traffic_model.floor(N, H, V, d, products=1))

    def entry(name: str, run: Run, ours: bool = False, predicted: float | None = None) -> Contestant:
        return Contestant(name, torch.no_grad()(lambda: run(inputs)), ours, useful=2.0 * N * H * V, predicted=predicted)

    def ours(name: str, run: Run, strategy: Strategy) -> Contestant:
        chunk = rows_per_chunk(bench, strategy, inputs, "nothing")
        return entry(name, run, True, bench.predicted(lambda d: traffic_model.forward(strategy, N, H, V, chunk, d).milliseconds))

    result = [entry(ONE, one_product, predicted=one), ours("ours", ours_forward, "anchored")]
    result.append(ours("library GEMM + row sums", library_forward, "library"))
    return result + [entry(name, run) for name, run in available(bench, section, shape, FORWARD_PEERS)]


def by(strategy: Strategy | None, run: Run) -> Run:
    def with_strategy(inputs: Inputs) -> Tensor:
        with chosen(strategy):
            return run(inputs)

    return with_strategy


def available(bench: Bench, section: Section, shape: Shape, factories: dict[str, Callable[[], Run]]) -> Iterator[tuple[str, Run]]:
    """The peers that are installed, and whose logits fit the memory."""
    for name, factory in factories.items():
        if not fits(bench, section.left_out, f"{named(shape)}: {name}", FULL_LOGITS.get(name, 0) * shape[0] * shape[2]):
            continue
        try:
            yield name, factory()
        except Exception as error:  # a peer may fail to import in ways of its own
            note = f"{name}: {type(error).__name__}: {str(error).strip()[:120]}"
            if note not in section.left_out:
                section.left_out.append(note)


def bytes_needed(shape: Shape) -> int:
    """Upper bounds: of inputs, gradients and what is summed in float32, or the weight in float64; of the logits of the bare products."""
    N, H, V = shape
    return 16 * (N + V) * H + 2 * N * V + (2 << 30)


def run_losses(bench: Bench, section: Section) -> None:
    """Forward + backward, then forward alone, against the bare products and the peers. What one shape leaves of its time is the next's."""
    for index, shape in enumerate(bench.sizes.losses):
        if section.is_late(named(shape)) or not fits(bench, section.left_out, named(shape), bytes_needed(shape)):
            continue
        now, left = time.monotonic(), len(bench.sizes.losses) - index
        share = replace(section, deadline=now + (section.deadline - now) / left)  # its lists are the section's
        attempt(section, named(shape), partial(race_losses, bench, share, shape))
        release(bench)


def race_losses(bench: Bench, section: Section, shape: Shape) -> None:
    inputs = random_inputs(shape, min(bench.sizes.length, shape[0]), bench.device)
    errors: dict[str, float] = {}
    for direction, make, inspect_result in (
        ("forward + backward", loss_contestants, gradient_errors(section, shape, inputs, errors)),
        ("forward", forward_contestants, None),
    ):
        contestants = make(bench, section, shape, inputs)
        samples = compete(bench, section, f"{named(shape)} {direction}", contestants, inspect_result)
        report_losses(section, shape, direction, contestants, samples, errors if inspect_result else {})


def gradient_errors(section: Section, shape: Shape, inputs: Inputs, found: dict[str, float]) -> Callable[[Contestant], None]:
    """What notes the relative error of the first rows' hidden.grad, against float64. Ours beyond bfloat16's unit is a failure."""
    count = min(64, inputs.hidden.shape[1])
    first = {name: getattr(inputs, name)[:1, :count] for name in ("targets", "old", "ref", "mask")}
    hidden = inputs.hidden[:1, :count].detach().double().requires_grad_()
    logprobs = torch.log_softmax(hidden @ inputs.weight.detach().double().t(), -1).gather(-1, first["targets"].unsqueeze(-1)).squeeze(-1)
    piece = replace(inputs, hidden=hidden, advantages=inputs.advantages[:1], **first)
    (contenders._eager_objective(logprobs, piece) * (count / shape[0])).backward()
    exact, unit = hidden.grad, torch.finfo(torch.bfloat16).eps

    def note(c: Contestant) -> None:
        if c.name not in (WHOLE, CHUNKED):
            found[c.name] = relative_error(inputs.hidden.grad[:1, :count], exact)
            if c.ours and not found[c.name] <= unit:
                section.failures.append(f"{named(shape)}: {c.name}: error of d hidden {found[c.name]:.1e}, allowed {unit:.1e}")

    return note


def report_losses(
    section: Section, shape: Shape, direction: str, contestants: list[Contestant], samples: dict[str, Any], errors: dict[str, float]
) -> None:
    times = {name: spread(values) for name, values in samples.items()}
    floor = min((times[name]["ms"] for name in (WHOLE, CHUNKED, ONE) if name in times), default=math.nan)
    gradients = 2 * (shape[0] + shape[2]) * shape[1] if direction != "forward" else 0
    for c in contestants:
        if c.name in times:
            ms, peaks = times[c.name]["ms"], [s.peak for s in samples[c.name] if s.peak is not None]
            row = {"contestant": c.name, "shape": named(shape), "direction": direction, **times[c.name], "predicted_ms": c.predicted}
            row |= {"of_floor": ms / floor, "tflop_s": c.useful / ms / 1e9, "error_d_hidden": errors.get(c.name)}
            row["peak_over_gradients_gb"] = (min(peaks) - gradients) / 1e9 if peaks else None
            row["predicted_peak_gb"] = None if c.predicted_peak is None else c.predicted_peak / 1e9
            section.rows.append(row)


def run_strategies(bench: Bench, section: Section) -> None:
    """Which strategy wins where: what the selection table should say."""
    for shape in bench.sizes.strategies:
        if not section.is_late(named(shape)) and fits(bench, section.left_out, named(shape), bytes_needed(shape)):
            attempt(section, named(shape), partial(race_strategies, bench, section, shape))
            release(bench)


def race_strategies(bench: Bench, section: Section, shape: Shape) -> None:
    inputs = random_inputs(shape, min(bench.sizes.length, shape[0]), bench.device)
    names = {strategy: f"ours, {strategy}" for strategy in STRATEGIES}
    samples = compete(bench, section, named(shape), loss_contestants(bench, section, shape, inputs, {CHUNKED, *names.values()}))
    times = {name: spread(values)["ms"] for name, values in samples.items()}
    if times.keys() >= {CHUNKED, *names.values()}:
        row: dict[str, Any] = {strategy: times[name] / times[CHUNKED] for strategy, name in names.items()}
        row |= {"shape": named(shape), "fastest": min(STRATEGIES, key=lambda s: times[names[s]])}
        row["predicted"] = None if bench.model is None else traffic_model.best_strategy(shape[1], bench.model)
        section.rows.append(row | {"selected": first_product(bench.device, *shape[1:])})


# Report


def targets(bench: Bench, sections: dict[str, Section]) -> list[dict[str, Any]]:
    """Each with its limit and what was measured, None where it was not."""
    shape = named(bench.sizes.losses[0])
    found = [
        row["of_floor"]
        for row in sections["losses"].rows
        if (row["contestant"], row["shape"], row["direction"]) == (DEFAULT, shape, "forward + backward")
    ]
    shares = {
        f"{row['kernel']}, {row['where'].rsplit(' ')[-1]}": row["of_copy"] for row in sections["row_kernels"].rows if row["kernel"] != COPY
    }
    loss, kernel = (found[0] if found else None), shares.pop(f"{ROW_LOSS}, bf16", None)
    return [
        {
            "target": f"loss, forward + backward, {shape}: at most 1.15x of the bare products",
            "measured": loss,
            "met": loss and loss <= 1.15,
        },
        {
            "target": f"{ROW_LOSS}, bf16, by one read and one write: at least 85 % of the copy's bandwidth",
            "measured": kernel,
            "met": kernel and kernel >= 0.85,
            "beside": shares,  # the same ratio of the other row kernels, for which there is no target
        },
    ]


def number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(sections: dict[str, Section], goals: list[dict[str, Any]]) -> str:
    """One page of text."""
    head = sections["header"].rows[0] if sections["header"].rows else {}
    lines = ["GPU acceptance of grpo-kernels" + (": DRY RUN, its times mean nothing" if head.get("dry_run") else "")]
    lines += textwrap.wrap("; ".join(f"{key} {value}" for key, value in head.items()), 150)
    checks = sections["correctness"].rows
    lines += [
        "",
        f"Correctness against float64: {sum(row['passed'] for row in checks)} of {len(checks)} checks passed. Worst, as error / allowed:",
    ]
    worst: dict[str, dict[str, Any]] = {}
    for row in checks:
        name = row["name"].split(":")[0].split(",")[0]
        share = row["error"] / row["allowed"] if row["allowed"] else (0.0 if row["passed"] else math.inf)
        if name not in worst or not share <= worst[name]["share"]:
            worst[name] = {**row, "share": share}
    lines += [f"  {row['name']:38}{row['share']:6.2f}  ({row['error']:.1e}; {row['where']})" for row in worst.values()]
    lines += ["", f"{'Row kernels: time on the device alone':48}{'ms [min-max]':>24}{'predicted':>11}{'GB/s':>8}{'of copy':>9}"]
    for row in sections["row_kernels"].rows:
        times = f"{row['ms']:.3f} [{row['ms_min']:.3f}-{row['ms_max']:.3f}]"
        lines.append(
            f"  {row['kernel']:24}{row['where']:22}{times:>24}{number(row['predicted_ms'], 3):>11}{row['gb_s']:>8.0f}{row['of_copy']:>9.2f}"
            + (f"  (in {row['waited_for_host']} of {row['runs']} runs it may have waited for the host)" if row["waited_for_host"] else "")
        )
    if sections["losses"].rows:
        lines += ["", "Losses below: as a caller sees them, from the call to the last result on the device, the host's time included."]
    for shape, direction in dict.fromkeys((row["shape"], row["direction"]) for row in sections["losses"].rows):
        columns = f"{'ms [min-max]':>24}{'predicted':>11}{'x floor':>9}{'TFLOP/s':>9}{'peak GB':>9}{'predicted':>11}{'err dh':>9}"
        lines += ["", f"{f'Loss {shape}, {direction}':44}{columns}"]
        for row in sections["losses"].rows:
            if (row["shape"], row["direction"]) == (shape, direction):
                times = f"{row['ms']:.2f} [{row['ms_min']:.2f}-{row['ms_max']:.2f}]"
                error = "-" if row["error_d_hidden"] is None else f"{row['error_d_hidden']:.1e}"
                lines.append(
                    f"  {row['contestant']:42}{times:>24}{number(row['predicted_ms']):>11}{row['of_floor']:>9.3f}{row['tflop_s']:>9.0f}"
                    f"{number(row['peak_over_gradients_gb']):>9}{number(row['predicted_peak_gb']):>11}{error:>9}"
                )
    lines += ["", f"{'Strategy, x of the bare products':40}{'library':>10}{'anchored':>10}{'fastest':>12}{'predicted':>12}{'selected':>12}"]
    for row in sections["strategies"].rows:
        words = "".join(f"{row[key] or '-':>12}" for key in ("fastest", "predicted", "selected"))
        lines.append(f"  {row['shape']:38}{row['library']:>10.3f}{row['anchored']:>10.3f}{words}")
    lines += ["", "Targets"]
    for goal in goals:
        verdict = "not measured" if goal["measured"] is None else f"{goal['measured']:.3f}  {'met' if goal['met'] else 'NOT MET'}"
        lines.append(f"  {goal['target']:92}{verdict}")
        if goal.get("beside"):
            ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in goal["beside"].items())
            lines += textwrap.wrap(f"(no target: {ratios})", 140, initial_indent=4 * " ", subsequent_indent=5 * " ")
    notes = [(word, text) for section in sections.values() for word in ("failures", "cut", "left_out") for text in getattr(section, word)]
    lines += ["", *(f"{ {'failures': 'FAILED', 'cut': 'cut', 'left_out': 'left out'}[word] }: {text}" for word, text in notes)]
    lines.append("Seconds: " + ", ".join(f"{section.name} {section.seconds:.0f}" for section in sections.values()))
    return "\n".join(lines)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path, bench: Bench, sections: dict[str, Section]) -> None:
    """The JSON first: that of a table which cannot be made is there all the same."""
    goals = targets(bench, sections)
    records = {name: {k: v for k, v in asdict(section).items() if k not in ("name", "deadline")} for name, section in sections.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite({"sections": records, "targets": goals}), indent=1) + "\n")
    path.with_suffix(".txt").write_text(table(sections, goals) + "\n")


SECTIONS: dict[str, Callable[[Bench, Section], None]] = {
    "header": run_header,
    "correctness": run_correctness,
    "row_kernels": run_row_kernels,
    "losses": run_losses,
    "strategies": run_strategies,
}


def run_all(bench: Bench, path: Path) -> dict[str, Section]:
    """One that ends early leaves its time to the next ones; one that raises is noted, and only a lost device ends them all. Results are on
    disk after each."""
    sections = {name: Section(name, 0.0) for name in SECTIONS}
    deadline, lost = time.monotonic(), False
    for name, run in SECTIONS.items():
        section = sections[name]
        if lost:
            section.cut.append(f"{name}, for the device was lost")
            continue
        start = time.monotonic()
        deadline += bench.sizes.seconds[name]
        section.deadline = deadline
        try:
            attempt(section, name, partial(run, bench, section))
        except DeviceLost:
            lost = True
        section.clocks = query_nvidia_smi() if bench.device.type == "cuda" else {}
        section.seconds = time.monotonic() - start
        progress(name, f"{section.seconds:.0f} s,", len(section.failures), "failure(s)")
        try:
            write(path, bench, sections)
        except Exception:
            traceback.print_exc()  # the next may succeed, and the last one is answered for
        release(bench)
    return sections


def output_path(given: Path | None, bench: Bench) -> Path:
    """A dry run writes to a temporary folder unless told otherwise: never over results of a GPU."""
    if given is not None:
        return given
    if bench.dry:
        return Path(tempfile.mkdtemp(prefix="gpu_acceptance_")) / "gpu_acceptance_dry_run.json"
    device = re.sub(r"\W+", "_", torch.cuda.get_device_name(bench.device)).strip("_").lower()
    return Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results") / f"gpu_acceptance_{device}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--output", type=Path, help="the JSON file; the text goes beside it")
    options = parser.parse_args()
    if options.dry_run:
        bench = Bench(torch.device("cpu"), traffic_model.H100, DRY, dry=True)
    elif os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set, so Triton's interpreter would be timed in place of the GPU; unset it, or give --dry-run")
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        bench = Bench(device, traffic_model.device_named(torch.cuda.get_device_name(device)), FULL, dry=False)
    else:
        parser.error("no NVIDIA GPU on this machine; --dry-run runs the same code without one")
    path = output_path(options.output, bench)
    if not os.access(path.parent, os.W_OK):
        parser.error(f"--output: {path.parent} is no folder that can be written")
    sections = run_all(bench, path)
    failed = any(section.failures for section in sections.values()) or bool(sections["correctness"].cut)  # what was cut is not proven
    print(table(sections, targets(bench, sections)))
    try:
        write(path, bench, sections)
    except OSError as error:
        print(f"NOT WRITTEN: {error}")
        return 1
    print("written:", path)
    return int(failed)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # with status 1; what was measured before is on disk
    sys.exit(main())
