"""Measures on this machine how the head's first product is made faster, and keeps the answer: `python -m grpo_kernels.tune 4096 151936`.

Calls for that head use it from then on (see `grpo_kernels.triton_kernels.selection`); without it a table and a rule decide.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import get_args

import torch

from grpo_kernels.backends.triton import unavailable
from grpo_kernels.linear_loss import linear_grpo_loss
from grpo_kernels.objective import Objective


def measure(width: int, vocabulary: int, *, rows: int = 8192, rounds: int = 5) -> dict[str, float]:
    """Median seconds of the loss with its gradients, bfloat16, for each way.

    Raises:
        ValueError: the kernels cannot run here; says why.
    """
    device = _device()
    reason = unavailable(device)
    if reason is not None:
        raise ValueError(f"there is nothing to tune: {reason}")
    from grpo_kernels.triton_kernels import selection  # triton is there, as was just found

    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator, device=device) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    advantages = torch.randn(rows, generator=generator, device=device)
    before = os.environ.get(selection.OVERRIDE)
    samples: dict[str, list[float]] = {choice: [] for choice in get_args(selection.FirstProduct)}
    try:
        for round_ in range(rounds + 1):  # the first compiles
            for choice, seconds in samples.items():
                os.environ[selection.OVERRIDE] = choice
                begin = _now(device)
                linear_grpo_loss(hidden, weight, targets, advantages, objective=Objective.dapo(), backend="triton").loss.backward()
                hidden.grad = weight.grad = None
                if round_:
                    seconds.append(_now(device) - begin)
    finally:
        os.environ.pop(selection.OVERRIDE, None)
        if before is not None:
            os.environ[selection.OVERRIDE] = before
    return {choice: median(seconds) for choice, seconds in samples.items()}


def remember(width: int, vocabulary: int, choice: str) -> None:
    """For the calls to come, on this device.

    Raises:
        OSError, RuntimeError: there is no folder to write to.
    """
    from grpo_kernels.triton_kernels import selection

    selection.remember(_device(), width, vocabulary, choice)  # type: ignore[arg-type]  # one of those measured


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("width", type=int, help="H, the hidden size")
    parser.add_argument("vocabulary", type=int, help="V, of this process's part of the head")
    options = parser.parse_args()
    for name in ("width", "vocabulary"):
        if getattr(options, name) < 1:
            parser.error(f"{name} is {getattr(options, name)}; it must be at least 1")
    try:
        medians = measure(options.width, options.vocabulary)
    except ValueError as error:
        parser.error(str(error))
    for choice, seconds in sorted(medians.items(), key=lambda entry: entry[1]):
        print(f"{choice:10}{1e3 * seconds:10.3f} ms")
    fastest = min(medians, key=lambda choice: medians[choice])
    try:
        remember(options.width, options.vocabulary, fastest)
    except (OSError, RuntimeError) as error:
        parser.error(f"it cannot be remembered ({error}); set GRPO_CACHE to a folder that can be written, or GRPO_KERNELS_GEMM1={fastest}")
    print(f"head [{options.vocabulary}, {options.width}]: {fastest} from now on")


if __name__ == "__main__":
    main()
