"""What a run shows and keeps: the display, the files, the report, the advice."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_trainer.cli import main
from grpo_trainer.config import validate
from grpo_trainer.monitor.advice import advice
from grpo_trainer.monitor.metrics import JsonLines
from grpo_trainer.run import start_run
from runs import run_to_end, settings


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x1c", "\r", "\n"])
def test_any_character_in_a_sample_survives_in_the_files(tmp_path: Path, separator: str) -> None:
    lines = JsonLines(tmp_path / "s.jsonl")
    rows = [{"step": step, "text": f"a{separator}b"} for step in (1, 2, 3)]
    for row in rows:
        lines.write(row)
    assert lines.read() == rows
    lines.keep(2)
    assert lines.read() == rows[:2]


@pytest.mark.parametrize("damage", [b'{"no": "step"}\n', b"[1]\n", b"\xff\xfe\n", b'{"step": "x"}\n', b"\n"])
def test_a_damaged_row_ends_a_file(tmp_path: Path, damage: bytes) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    with lines.path.open("ab") as file:
        file.write(damage)
    assert lines.read() == [{"step": 1}]


def test_a_run_goes_on_when_its_reader_has_gone(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=3)))
    command = f"{sys.executable} -m grpo_trainer.cli train {recipe} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert len(JsonLines(tmp_path / "run" / "metrics.jsonl").read()) == 3
    assert (tmp_path / "run" / "checkpoints" / "step_000003").is_dir()


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_progress_on_a_terminal(tmp_path: Path, term: str) -> None:
    """Under a pseudo-terminal: a live table where it can be redrawn, lines where it cannot. Odd names are shown as they are."""
    script = shutil.which("script")
    if script is None:
        pytest.skip("no `script` (util-linux) to make a pseudo-terminal with")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=2, run_dir=str(tmp_path / "mk[/x]1"))))
    command = f"stty cols 200; {sys.executable} -m grpo_trainer.cli train {recipe}"
    arguments = [script, "-qec", command, "/dev/null"]
    done = subprocess.run(arguments, env=os.environ | {"TERM": term}, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout
    assert ("step 2  reward" in done.stdout) == (term == "dumb")
    assert ("2/2 steps" in done.stdout) == (term != "dumb")
    assert "mk[/x]1/curves.png" in done.stdout


def test_an_ascii_terminal(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=1)))
    command = [sys.executable, "-m", "grpo_trainer.cli", "train", str(recipe)]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"curves.png" in done.stdout


def test_the_command_line_trains_evaluates_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings(tmp_path, steps=2)))
    assert main(["train", str(recipe)]) == 0
    text = capsys.readouterr().out
    for expected in ("step 2", "sampled accuracy", "before", "after", "curves.png", "step_000002"):
        assert expected in text, expected
    run = tmp_path / "run"
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((run / "samples.jsonl").read_text().splitlines()) == 2
    assert main(["eval", str(run / "config.yaml"), f"model={run / 'checkpoints' / 'step_000002'}"]) == 0
    assert "sampled accuracy" in capsys.readouterr().out
    assert main(["train", "--resume", str(run)]) == 0
    assert "after 2 of 2 steps" in capsys.readouterr().out


METRICS = {"updates_nonfinite": 0, "groups/no_signal": 0.5, "groups/all_right": 0.2, "groups/all_wrong": 0.3, "completion/truncated": 0.1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"groups/no_signal": 1.0, "groups/all_right": 1.0}, "too easy"),
        ({"groups/no_signal": 1.0, "groups/all_wrong": 1.0}, "all were wrong"),
        ({"groups/no_signal": 1.0}, "either always or never solved"),
        ({"completion/truncated": 0.95}, "sampling.max_new_tokens = 8"),
        ({"updates_nonfinite": 1}, "not finite"),
    ],
)
def test_advice(change: dict[str, float], words: str | None) -> None:
    found = advice(METRICS | change, 8)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_json_lines_keep_complete_lines_up_to_a_step(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    assert lines.read() == []
    for step in (1, 2, 3):
        lines.write({"step": step, "x": math.pi})
    with lines.path.open("a") as file:
        file.write('{"step": 4')
    lines.keep(2)
    assert [json.loads(line)["step"] for line in lines.path.read_text().splitlines()] == [1, 2]


def test_metric_names_are_documented(tmp_path: Path, digits: None) -> None:
    (row,) = run_to_end(start_run(validate(settings(tmp_path, steps=1))))
    table = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([a-z_/]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
    assert set(row) - {"reward/digits"} == documented
