"""The live display of a run: a table of the latest steps and a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_trainer.monitor.metrics import Metrics

_COLUMNS: list[tuple[str, Callable[[Metrics], str]]] = [
    ("step", lambda m: str(m["step"])),
    ("reward", lambda m: _number(m["reward/mean"], ".3f")),
    ("accuracy", lambda m: _number(m["accuracy"], ".3f")),
    ("mixed groups", lambda m: _number(m["groups/mixed"], ".0%")),
    ("length", lambda m: _number(m["completion/length_mean"], ".1f")),
    ("entropy", lambda m: _number(m["entropy"], ".3f")),
    ("rollout tok/s", lambda m: _number(m["tokens_per_second/rollout"], ".0f")),
    ("train tok/s", lambda m: _number(m["tokens_per_second/train"], ".0f")),
]


def _number(value: float | int | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


class Display:
    def __init__(self, console: Console, first_step: int, steps: int) -> None:
        self._console = console
        self._first, self._steps = first_step, steps
        self._done = first_step
        self._phase = "starting"
        self._rows: deque[Metrics] = deque(maxlen=10)
        self._started = time.monotonic()
        self._live = Live(self, console=console, refresh_per_second=2, transient=True) if _can_redraw(console) else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str) -> None:
        """What is going on now: evaluation, rollout, update, ..."""
        self._phase = name
        if not self._live and name.startswith("evaluat"):
            self._console.print(f"{name} ...")

    def note(self, sentence: str) -> None:
        self._console.print(Text(f"! {sentence}", style="yellow"), soft_wrap=True)

    def step(self, metrics: Metrics) -> None:
        self._done += 1
        self._rows.append(metrics)
        if not self._live:
            cells = "  ".join(f"{name} {cell(metrics)}" for name, cell in _COLUMNS)
            self._console.print(f"{cells}  left {self._time_left()}", soft_wrap=True)

    def _time_left(self) -> str:
        done = self._done - self._first
        if not done:
            return "?"
        seconds = (time.monotonic() - self._started) / done * (self._steps - self._done)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2))
        for name, _ in _COLUMNS:
            table.add_column(name, justify="right")
        for metrics in self._rows:
            table.add_row(*(cell(metrics) for _, cell in _COLUMNS))
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=self._steps, completed=self._done, width=40),
            f"{self._done}/{self._steps} steps",
            f"time left {self._time_left()}",
            Text(self._phase, style="dim"),
        )
        return Group(table, bar)
