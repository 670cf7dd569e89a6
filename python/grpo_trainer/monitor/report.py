"""What a run ends with: a table before / after, samples side by side, curves, and where everything is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_trainer.evaluation import Evaluation


def print_evaluations(console: Console, evaluations: dict[str, Evaluation]) -> None:
    """`evaluations` by column title, for example {"before": ..., "after": ...}."""
    first = next(iter(evaluations.values()))
    table = Table(title=f"{first.prompts} held-out prompts")
    table.add_column("")
    for title in evaluations:
        table.add_column(title, justify="right")
    rows: list[tuple[str, str, str]] = [
        ("sampled accuracy", "sampled_accuracy", ".3f"),
        ("greedy accuracy", "greedy_accuracy", ".3f"),
        ("mean length (tokens)", "mean_length", ".1f"),
        ("truncated", "truncated", ".1%"),
    ]
    for label, field, style in rows:
        table.add_row(label, *(format(getattr(e, field), style) for e in evaluations.values()))
    console.print(table)
    samples = Table(title="samples")
    samples.add_column("prompt")
    for title in evaluations:
        samples.add_column(title)
    for entries in zip(*(e.samples for e in evaluations.values()), strict=True):
        cells = [Text(_short(text), style="green" if correct else "red") for _, text, correct in entries]
        samples.add_row(Text(_short(entries[0][0])), *cells)
    console.print(samples)


def _short(text: str, most: int = 300) -> str:
    """What a model wrote, for a terminal: no control characters, which could do anything to it."""
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text).strip() or "(nothing)"
    return text if len(text) <= most else text[:most] + " ..."


def draw_curves(path: Path, metrics: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]) -> None:
    """A PNG with four panels over the steps: reward and accuracy, groups, entropy and gradient norm, length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    panels = [
        ("reward and accuracy", ["reward/mean", "accuracy"]),
        ("share of groups", ["groups/all_right", "groups/mixed", "groups/all_wrong"]),
        ("entropy (nats) and gradient norm", ["entropy", "grad_norm"]),
        ("completion length (tokens)", ["completion/length_mean"]),
    ]
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker=".", linewidth=1, alpha=0.8)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    steps = [evaluation.step for evaluation in evaluations]
    axes.flat[0].plot(steps, [e.sampled_accuracy for e in evaluations], "k*", markersize=10, label="held out, sampled")
    axes.flat[0].plot(steps, [e.greedy_accuracy for e in evaluations], "kx", markersize=7, label="held out, greedy")
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
