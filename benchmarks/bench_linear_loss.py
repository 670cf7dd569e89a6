"""Time, peak memory and accuracy of the fused GRPO loss, forward and backward, against eager torch, TRL, Liger and three bare products.

    python benchmarks/bench_linear_loss.py > benchmarks/results/<machine>.txt        # everything; progress goes to stderr
    python benchmarks/bench_linear_loss.py --shape 2048x576x49152 --threads 2 --dtype float32 --rounds 5 --only cpu eager

The contenders of a shape are interleaved in one process per thread count, in an order that alternates. The floor is the faster of two ways
to do the three products and nothing else, in float32: on a [N, V] matrix, and on the tiles that the fused pass uses. The peers, which are
slow, run in every second round, or not at all where they are not installed (`pip install '.[peers]'`). CPU time is the process's user +
system time. Peak memory is measured in a fresh process each.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import contenders
import torch
from contenders import BACKENDS, EAGER, FACTORIES, FLOORS, LIGERS, TRL, Contender, Inputs

BEST = next(iter(BACKENDS))
SHARE = 0.6  # of the rows, in the signal section
MASKED, NO_SIGNAL, BF16 = f"{SHARE:.0%} of the rows masked", f"{SHARE:.0%} of the advantages 0, no KL", ", bf16"
Shape = tuple[int, int, int]  # N, H, V
Samples = dict[str, list[tuple[float, float]]]  # label -> (wall, CPU) seconds
Tables = dict[tuple[Shape, int], Samples]  # by shape and threads


def lengths(rows: int) -> tuple[int, int]:
    """(B, T): sequences of 256 tokens, of 64 in small batches."""
    length = math.gcd(rows, 256 if rows >= 1024 else 64)
    return rows // length, length


def few(shape: Shape) -> Shape:
    """A CPU without bf16 units multiplies bf16 matrices some ten times slower than float32, so the peers get few rows there."""
    return min(shape[0], 128), *shape[1:]


@dataclass(frozen=True)
class Entry:
    label: str
    call: Contender
    inputs: Inputs
    slow: bool = False  # only in every second round


def entries(shape: Shape, names: list[str], dtypes: list[str], peers_in_bf16: bool) -> Iterator[Entry]:
    """Everything in float32 and ours in bfloat16; or, for few rows, all but eager (which takes minutes there) in bfloat16."""
    inputs = Inputs.random(*lengths(shape[0]), *shape[1:])
    yield from (Entry(name, FACTORIES[name](), inputs) for name in FLOORS)
    if "float32" in dtypes and not peers_in_bf16:
        yield from (Entry(name, FACTORIES[name](), inputs, slow=name not in (EAGER, BEST)) for name in names)
        keep = (torch.randperm(shape[0], generator=torch.Generator().manual_seed(1)) >= round(SHARE * shape[0])).view_as(inputs.mask)
        yield Entry(MASKED, FACTORIES[BEST](), replace(inputs, mask=keep))
        advantages = torch.where(keep, inputs.advantages[:, None], 0.0)
        yield Entry(NO_SIGNAL, contenders.ours(BACKENDS[BEST], kl_coef=0.0), replace(inputs, advantages=advantages))
    if "bfloat16" in dtypes:
        rounded, chosen = inputs.to(torch.bfloat16), [name for name in names if name in BACKENDS or (peers_in_bf16 and name != EAGER)]
        yield from (Entry(name + BF16, FACTORIES[name](), rounded, slow=name != BEST) for name in chosen)


def progress(*text: object) -> None:
    print(time.strftime("%H:%M:%S"), *text, file=sys.stderr, flush=True)


def time_job(shape: Shape, names: list[str], dtypes: list[str], rounds: int | None, peers_in_bf16: bool) -> Samples:
    # Two to four rounds: with the default shapes the whole takes 15 to 25 minutes on two cores.
    rounds = rounds or max(2, min(4, int(800e9 * torch.get_num_threads() / (6 * math.prod(shape)))))
    contestants = list(entries(shape, names, dtypes, peers_in_bf16))
    for entry in contestants:  # few rows are enough for the libraries to set up their threads and buffers
        entry.call(entry.inputs.cut(8))
    samples: Samples = {entry.label: [] for entry in contestants}
    for round_ in range(rounds):
        for entry in reversed(contestants) if round_ % 4 in (1, 2) else contestants:  # alternates in all and in every second round
            if entry.slow and round_ % 2 == 0 and rounds > 1:
                continue
            progress(shape, f"{torch.get_num_threads()} thread(s), round {round_ + 1} of {rounds}: {entry.label}")
            entry.inputs.hidden.grad = entry.inputs.weight.grad = None
            wall, cpu = time.perf_counter(), time.process_time()
            entry.call(entry.inputs)
            samples[entry.label].append((time.perf_counter() - wall, time.process_time() - cpu))
    return samples


def peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def memory_job(shape: Shape, name: str, dtype: str) -> int:
    """Bytes over the inputs at the peak; a tiny call first loads the libraries."""
    call = FACTORIES[name]()
    call(Inputs.random(2, 4, shape[1], 64).to(getattr(torch, dtype)))
    inputs = Inputs.random(*lengths(shape[0]), *shape[1:]).to(getattr(torch, dtype))
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # memory freed but kept would hide some of what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = peak_bytes()
    call(inputs)
    return peak_bytes() - before


def errors_job(shape: Shape, names: list[str], dtype: str) -> dict[str, tuple[float, ...]]:
    batch = lengths(shape[0])[0]  # as many sequences as in the timed batch: Liger adds up one rounded gradient for each
    vocabulary = shape[2] if dtype == "float32" else min(shape[2], 8192)
    inputs = Inputs.random(batch, max(1, 256 // batch), shape[1], vocabulary).to(getattr(torch, dtype))
    inputs = replace(inputs, old=None) if dtype == "bfloat16" else inputs  # rounding would move ratios across the clip range
    return contenders.gradient_errors({name: FACTORIES[name]() for name in names}, inputs)


def run(threads: int, job: Callable[..., Any], *arguments: object) -> Any:
    """In a fresh process: its own thread pools, its own memory."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        return pool.submit(job, *arguments).result()


def named(shape: Shape) -> str:
    return "N={} (B={} T={}) H={} V={}".format(shape[0], *lengths(shape[0]), *shape[1:])


def medians(samples: Samples) -> list[dict[str, float]]:
    """By label, of the wall and of the CPU seconds."""
    return [{label: median(sample[i] for sample in values) for label, values in samples.items() if values} for i in (0, 1)]


def fastest(times: dict[str, float], labels: Iterable[str]) -> float:
    return min((times[label] for label in labels if label in times), default=math.nan)


def print_times(shape: Shape, threads: int, samples: Samples, note: str = "") -> None:
    times = medians(samples)
    print(f"\n{named(shape)}, {threads} thread(s){note}")
    print(f"{'':30}{'runs':>5}{'wall s':>22}{'CPU s':>22}{'GFLOP/s':>9}{'x floor, wall':>15}{'CPU':>6}")
    for label in [label for label in times[0] if label not in (MASKED, NO_SIGNAL)]:
        spreads = "".join(f"{f'{median(x):.2f} [{min(x):.2f}-{max(x):.2f}]':>22}" for x in zip(*samples[label], strict=True))
        wall, cpu = (seconds[label] / fastest(seconds, FLOORS) for seconds in times)
        speed = 6e-9 * math.prod(shape) / times[0][label]
        print(f"{label:30}{len(samples[label]):>5}{spreads}{speed:>9.1f}{wall:>15.2f}{cpu:>6.2f}", flush=True)


def print_memory(shape: Shape, dtype: str, threads: int, names: list[str]) -> dict[str, float]:
    """Also returns, by contender, the peak over inputs and gradients in MB."""
    bf16, over = dtype == "bfloat16", {}
    progress(shape, f"{dtype}: gradient errors")
    errors = run(threads, errors_job, shape, names, dtype)
    note = f" Few rows: N={few(shape)[0]}. Errors: on policy, at V <= 8192." if bf16 else ""
    print(f"\n{named(shape)}, {dtype}, {threads} thread(s): peak over the inputs; relative L2 errors at 256 rows against float64.{note}")
    print(f"{'':36}{'peak MB':>9}{'over gradients':>16}{'error of dH':>13}{'of dW':>10}")
    for name in errors if bf16 else (*FLOORS, *errors):
        at, label = (few(shape), f"{name}, few rows") if bf16 and name in (TRL, *LIGERS) else (shape, name)
        row = f"{'-':>9}{'-':>16}"
        if name in FACTORIES and not (bf16 and name == EAGER):  # eager takes minutes
            progress(shape, f"{dtype}: memory of {name}")
            peak = run(threads, memory_job, at, name, dtype) / 1e6
            over[name] = peak - (at[0] + at[2]) * at[1] * getattr(torch, dtype).itemsize / 1e6
            row = f"{peak:>9.0f}{over[name]:>16.0f}"
        print(f"{label:36}{row}" + (f"{errors[name][1]:>13.2e}{errors[name][2]:>10.2e}" if name in errors else ""), flush=True)
    return over


def print_signal(tables: Tables) -> None:
    print(f"\nSignal: time of {BEST} / its time with all rows, wall (CPU); the rows are drawn at random; ideal {1 - SHARE:.2f}")
    for (shape, threads), samples in tables.items():
        for label in filter(samples.__contains__, (MASKED, NO_SIGNAL)):
            wall, cpu = (fastest(times, [label]) / fastest(times, [BEST]) for times in medians(samples))
            print(f"  {named(shape)}, {threads} thread(s): {label:34}{wall:.2f} ({cpu:.2f})")


def targets(threads: int) -> list[tuple[str, float, Iterable[str], Iterable[str]]]:
    """(text, limit, a, b): the faster of a by the faster of b is at most the limit; at least, where it is negative."""
    floor_limit, signal_limit = 1.05 if threads == 1 else 1.10, 1.1 * (1 - SHARE)
    return [
        (f"at most {floor_limit:.2f}x of the floor", floor_limit, [BEST], FLOORS),
        ("at least 2x faster than TRL", -2.0, [TRL], [BEST]),
        ("at least 1.6x faster than the faster Liger", -1.6, LIGERS, [BEST]),
        ("at least 1.15x faster than eager", -1.15, [EAGER], [BEST]),
        ("bf16 at most 1.15x of its own float32", 1.15, [BEST + BF16], [BEST]),
        *((f"{label}: at most {signal_limit:.2f} of the time", signal_limit, [label], [BEST]) for label in (MASKED, NO_SIGNAL)),
    ]


def print_targets(tables: Tables, over_gradients: float) -> None:
    print(f"\nTargets, for {BEST}; judged by CPU time, which other work on the machine disturbs least; the ratio of wall times beside it")
    first, shown = named(next(iter(tables))[0]), f"{over_gradients:.0f} MB"
    rows = [(f"{first}: peak over inputs and gradients at most 100 MB", 100.0, over_gradients, shown)]
    for (shape, threads), samples in tables.items():
        for text, limit, a, b in targets(threads):
            wall, cpu = (fastest(times, a) / fastest(times, b) for times in medians(samples))
            rows.append((f"{named(shape)}, {threads} thread(s): {text}", limit, cpu, f"{cpu:.3f} (wall {wall:.3f})"))
    for text, limit, value, shown in rows:
        met = "met" if (value <= limit if limit > 0 else value >= -limit) else "NOT MET"
        print(f"  {text:102}" + (f"{'':20}not measured" if math.isnan(value) else f"{shown:20}{met}"))


def load(only: list[str] | None) -> list[str]:
    """The names of what can run, after a check that all of them compute the same."""
    calls: dict[str, Contender] = {}
    for name in (EAGER, TRL, *LIGERS, *BACKENDS):
        try:
            if not only or name == BEST or any(part in name for part in only):
                calls[name] = FACTORIES[name]()
        except ImportError as error:
            print(f"Left out: {name} ({error}); to have it, pip install '.[peers]'")
    print(contenders.check_agreement(calls))
    return list(calls)


def print_header() -> None:
    model = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "?")
    installed = {package.name.replace("_", "-"): package.version for package in importlib.metadata.distributions()}
    print("$ python benchmarks/bench_linear_loss.py", *sys.argv[1:])
    print(f"{time.strftime('%Y-%m-%d')}; {model}, {os.cpu_count()} cores, load average before the run {os.getloadavg()[0]:.1f}")
    packages = ("torch", "grpo-kernels", "trl", "liger-kernel")
    print(f"python {platform.python_version()}", *(f"{name} {installed.get(name, '-')}" for name in packages), sep=", ")
    print(f"forward and backward; DAPO, KL {contenders.KL_COEF}, old and reference log-probabilities given, all rows; median [min-max]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes, dtypes = [(2048, 576, 49152), (1024, 896, 151936)], ["float32", "bfloat16"]
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), nargs="+", default=shapes, metavar="NxHxV")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--rounds", type=int, help="default: 2 to 4, by the size")
    parser.add_argument("--only", nargs="+", metavar="PART", help="besides the floor and ours: names that contain one of these")
    options = parser.parse_args()
    print_header()
    names, over, tables = load(options.only), {}, {}
    for shape in options.shape:
        for dtype in options.dtype:
            over[shape, dtype] = print_memory(shape, dtype, max(options.threads), names)
        for threads in options.threads:
            tables[shape, threads] = run(threads, time_job, shape, names, options.dtype, options.rounds, False)
            print_times(shape, threads, tables[shape, threads])
            if "bfloat16" in options.dtype:
                samples = run(threads, time_job, few(shape), names, options.dtype, options.rounds or 2, True)
                print_times(few(shape), threads, samples, ": the peers in bfloat16, the floor in float32")
    print_signal(tables)
    print_targets(tables, over.get((options.shape[0], "float32"), {}).get(BEST, math.nan))


if __name__ == "__main__":
    main()
