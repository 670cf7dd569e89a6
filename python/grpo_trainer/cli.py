"""The command line: `grpo train`, `grpo eval`, `grpo doctor`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainer.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from grpo_trainer.run import Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: stopped or failed while working; 2: refused before work started; 130: interrupted; 141: its reader has gone."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In a pipe or a file too, progress is seen as it happens; what the terminal's encoding lacks is shown as "?".
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name in (None, "grpo_trainer", "grpo_kernels"):
            raise
        install = "pip install '.[trainer]' in a clone of the project (grpo doctor says more)"
        print(f"error: the trainer needs {error.name}: {install}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # grpo train --help | head
        _drop_output()
        return 141
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """After the reader of our output has gone: whatever is written from here on goes nowhere, and fails nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo", description="Train language models with GRPO.")
    commands = parser.add_subparsers(required=True, metavar="command")

    train = commands.add_parser("train", help="train a model by a recipe", add_help=False)
    train.add_argument("recipe", nargs="?", type=Path, help="a YAML file, such as recipes/smollm2_arithmetic.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    train.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in this folder")
    train.add_argument("-h", "--help", action="store_true", help="show this, with every key")
    train.set_defaults(run=lambda options: _help(train) if options.help else _train(options))

    evaluate = commands.add_parser("eval", help="evaluate a model on a recipe's held-out prompts, for example model=runs/x/checkpoints/y")
    evaluate.add_argument("recipe", type=Path, help="a YAML file, or a run's config.yaml")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value")
    evaluate.set_defaults(run=_eval)

    doctor = commands.add_parser("doctor", help="what this machine can do")
    doctor.set_defaults(run=_doctor)
    return parser


def _help(train: argparse.ArgumentParser) -> int:
    from grpo_trainer.config import keys

    train.print_help()
    print("\nkeys (default), in the recipe or as key=value:")
    for key, (default, meaning) in keys().items():
        print(f"  {key} ({default})" + (f": {meaning}" if meaning else ""))
    return 0


def _train(options: argparse.Namespace) -> int:
    from grpo_trainer.config import load_config
    from grpo_trainer.run import resume_run, start_run

    console = _console()
    if options.resume is not None:
        # With --resume there is no recipe: the first positional is an override.
        overrides = [*([str(options.recipe)] if options.recipe else []), *options.overrides]
        run = resume_run(options.resume, overrides)
        console.print(f"Resuming {run.folder} after {run.first_step} of {run.config.steps} steps.", soft_wrap=True)
    elif options.recipe is None:
        raise UserError("grpo train needs a recipe, such as recipes/smollm2_arithmetic.yaml (grpo train --help)")
    else:
        run = start_run(load_config(options.recipe, options.overrides))
    console.print(
        f"{run.config.model} on {run.policy.device}, {len(run.data.train)} training prompts; results in {run.folder}", soft_wrap=True
    )
    return _work(run, console)


def _work(run: Run, console: Console) -> int:
    from grpo_trainer.checkpoint import latest_checkpoint
    from grpo_trainer.loop import train
    from grpo_trainer.monitor.display import Display

    resume = f"grpo train --resume {run.folder}"
    try:
        with Display(console, run.first_step, run.config.steps) as display:
            finished = train(run, display)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        found = latest_checkpoint(run.folder)
        back = f"Continue from the checkpoint after {found[1]} steps: {resume}" if found else "There was no checkpoint yet."
        console.print(f"Stopped at once. {back}", soft_wrap=True)
        return 130
    finally:
        run.close()
    if not finished:
        console.print(f"Stopped. Continue: {resume}", soft_wrap=True)
        return 130
    _finish(run, console)
    return 0


def _finish(run: Run, console: Console) -> None:
    from grpo_trainer.checkpoint import latest_checkpoint
    from grpo_trainer.evaluation import Evaluation
    from grpo_trainer.monitor.report import draw_curves, print_evaluations

    evaluations = [Evaluation(**row) for row in run.evaluations.read()]
    print_evaluations(console, {"before": evaluations[0], "after": evaluations[-1]})
    curves = run.folder / "curves.png"
    draw_curves(curves, run.metrics.read(), evaluations)
    found = latest_checkpoint(run.folder)
    for label, path in (("run", run.folder), ("curves", curves), ("checkpoint", found[0] if found else "none")):
        console.print(f"{label + ':':12}{path}", soft_wrap=True)


def _eval(options: argparse.Namespace) -> int:
    from grpo_trainer.config import load_config
    from grpo_trainer.evaluation import evaluate
    from grpo_trainer.monitor.report import print_evaluations
    from grpo_trainer.run import load_parts

    console = _console()
    parts = load_parts(load_config(options.recipe, options.overrides))
    console.print(f"{parts.config.model} on {parts.policy.device}", soft_wrap=True)
    print_evaluations(console, {"result": evaluate(parts, step=0)})
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from grpo_trainer.doctor import report

    for line in report():
        print(line)
    return 0


def _console() -> Console:
    from rich.console import Console
    from transformers.utils import logging

    class TrainingConsole(Console):
        def on_broken_pipe(self) -> None:
            """rich would exit here; a run goes on without its reader, since its results are in files."""
            self.quiet = True
            _drop_output()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return TrainingConsole(markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
