"""Time and peak memory of the fused GRPO loss, forward and backward, against eager torch and the three bare matrix products.

    python benchmarks/bench_linear_loss.py                      # N=2048 H=576 V=49152 float32, as in the README
    python benchmarks/bench_linear_loss.py --threads 1 --dtype bfloat16 --rows 512

The contenders are interleaved in one process, in an order that alternates; CPU time is the process's user + system time. The floor is the
faster of two ways to do the three products and nothing else: on a [N, V] matrix, and on the tiles that the fused pass uses.
Peak memory is measured in a fresh process each, over what the inputs take, and includes the two gradients.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from grpo_kernels import Objective, backends, linear_grpo_loss

OBJECTIVE = Objective.dapo()


def inputs(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.05).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    advantages = torch.randn(rows, generator=generator)
    old = torch.full((rows,), -10.0)
    return hidden, weight, targets, advantages, old


def fused(backend: str) -> Callable[..., None]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> None:
        result = linear_grpo_loss(hidden, weight, targets, advantages, objective=OBJECTIVE, old_logprobs=old, backend=backend)
        result.loss.backward()

    return run


def eager(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> None:
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None])[:, 0]
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high)
    (-torch.min(ratio * advantages, clipped * advantages)).mean().backward()


@torch.no_grad()
def products_full(hidden: Tensor, weight: Tensor, *_: Tensor) -> None:
    logits = hidden @ weight.t()
    hidden.grad, weight.grad = logits @ weight, logits.t() @ hidden


@torch.no_grad()
def products_tiled(hidden: Tensor, weight: Tensor, *_: Tensor) -> None:
    rows, tile = 320, 1024
    vocabulary = weight.shape[0]
    buffer = hidden.new_empty(vocabulary, min(rows, hidden.shape[0]))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.empty_like(weight)
    for r in range(0, hidden.shape[0], rows):
        h = hidden[r : r + rows]
        logits = buffer.view(-1)[: vocabulary * h.shape[0]].view(vocabulary, -1)
        for v in range(0, vocabulary, tile):
            torch.mm(weight[v : v + tile], h.t(), out=logits[v : v + tile])
            hidden.grad[r : r + rows].addmm_(logits[v : v + tile].t(), weight[v : v + tile])
        for v in range(0, vocabulary, tile):
            if r:
                weight.grad[v : v + tile].addmm_(logits[v : v + tile], h)
            else:
                torch.mm(logits[v : v + tile], h, out=weight.grad[v : v + tile])


def contenders() -> dict[str, Callable[..., None]]:
    ours = {f"grpo_kernels ({status.name})": fused(status.name) for status in backends() if status.available}
    return {"3 products, [N, V]": products_full, "3 products, tiled": products_tiled, "eager, full logits": eager, **ours}


def timed(call: Callable[..., None], arguments: tuple[Tensor, ...]) -> tuple[float, float]:
    arguments[0].grad = arguments[1].grad = None
    wall, cpu = time.perf_counter(), time.process_time()
    call(*arguments)
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def measure_memory(name: str, arguments: tuple[Tensor, ...]) -> int:
    """Bytes over the inputs at the peak; a small warm-up first loads the libraries' own buffers."""
    call = contenders()[name]
    small = tuple(t[:8].detach().requires_grad_(t.requires_grad) for t in arguments)
    call(small[0], small[1], small[2].clamp(max=7), *small[3:])
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = peak_bytes()
    call(*arguments)
    return peak_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    arguments = inputs(options.rows, options.hidden, options.vocabulary, getattr(torch, options.dtype))
    if options.memory_of:
        print(measure_memory(options.memory_of, arguments))
        return

    calls = contenders()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for round_ in range(options.rounds + 1):
        for name in list(calls) if round_ % 2 else list(reversed(calls)):
            sample = timed(calls[name], arguments)
            if round_:  # the first round warms up
                results[name].append(sample)
    memory = {}
    for name in calls:
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
        memory[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    report(options, results, memory)


def report(options: argparse.Namespace, results: dict[str, list[tuple[float, float]]], memory: dict[str, int]) -> None:
    cpu = {name: statistics.median(c for _, c in samples) for name, samples in results.items()}
    floor = min(cpu[name] for name in cpu if name.startswith("3 products"))
    work = 6 * options.rows * options.hidden * options.vocabulary
    model = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "?")
    print(f"{model}, {options.threads} thread(s) | python {platform.python_version()}, torch {torch.__version__}")
    print(f"N={options.rows} H={options.hidden} V={options.vocabulary} {options.dtype}, {options.rounds} rounds, median [min-max]\n")
    print(f"{'':26}{'CPU s':>22}{'wall s':>9}{'GFLOP/s':>9}{'x floor':>9}{'peak MB':>9}")
    for name, samples in results.items():
        seconds = [c for _, c in samples]
        wall = statistics.median(w for w, _ in samples)
        spread = f"{cpu[name]:.2f} [{min(seconds):.2f}-{max(seconds):.2f}]"
        print(f"{name:26}{spread:>22}{wall:>9.2f}{work / wall / 1e9:>9.1f}{cpu[name] / floor:>9.2f}{memory[name] / 1e6:>9.0f}")
    gradients = (options.rows + options.vocabulary) * options.hidden * (4 if options.dtype == "float32" else 2) / 1e6
    print(f"\npeak MB: over the inputs, from a fresh process; {gradients:.0f} MB of it are the two gradients")


if __name__ == "__main__":
    main()
