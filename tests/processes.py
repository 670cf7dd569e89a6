"""A function in several processes that talk over gloo: their results, or the traceback of the first that failed, within a time limit."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def in_processes(count: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """What `function(*arguments)`, a function of a module, returned in each of `count` new processes, by rank.

    The default process group is initialised, and torch has one thread. Results are anything that `torch.save` takes.

    Raises:
        RuntimeError: with the traceback of a process that failed, or when one was killed.
        TimeoutError: after `seconds`. No process is left behind in any case.
    """
    deadline = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")  # a fork of a process that has run a backward pass cannot run another
    with tempfile.TemporaryDirectory() as folder:
        processes: dict[Connection, BaseProcess] = {}
        try:
            for rank in range(count):
                reader, writer = context.Pipe(duplex=False)
                job = (writer, Path(folder) / "rendezvous", rank, count, seconds, function, arguments)
                processes[reader] = context.Process(target=_child, args=job, daemon=True)
                processes[reader].start()
                writer.close()  # only the child holds it, so that its death ends the pipe
            return _results(list(processes), deadline)
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def _results(readers: list[Connection], deadline: float) -> list[Any]:
    """Read while they run: a result may be larger than a pipe holds, and the first failure must not wait for the others."""
    results: dict[Connection, Any] = {}
    while len(results) < len(readers):
        ready = wait([reader for reader in readers if reader not in results], timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            missing = [rank for rank, reader in enumerate(readers) if reader not in results]
            raise TimeoutError(f"processes {missing} gave no result in time")
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                succeeded, result = torch.load(io.BytesIO(reader.recv_bytes()), weights_only=False)
            except EOFError:
                raise RuntimeError(f"process {readers.index(reader)} ended without a result") from None
            if not succeeded:
                raise RuntimeError(f"process {readers.index(reader)} failed:\n{result}")
            results[reader] = result
    return [results[reader] for reader in readers]


def _child(
    writer: Connection, rendezvous: Path, rank: int, count: int, seconds: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    outcome: tuple[bool, Any]
    try:
        torch.set_num_threads(1)
        _use_loopback()
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count, timeout=timedelta(seconds=seconds))
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, traceback.format_exc()
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    writer.send_bytes(buffer.getvalue())
    writer.close()
    with suppress(Exception):  # the others may have failed, and their results are what counts
        dist.destroy_process_group()


def _use_loopback() -> None:
    """Else gloo asks for the machine's own name, which not every container can resolve."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
