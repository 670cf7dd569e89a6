"""Countdown: the exact checker, TinyZero's reward as measured on the original, and the generator."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest

from grpo_trainer.config import CountdownConfig
from grpo_trainer.errors import UserError
from grpo_trainer.rewards.countdown import countdown_value, last_answer, strict_score, tinyzero_score
from grpo_trainer.tasks.countdown import Countdown


@pytest.mark.parametrize(
    ("expression", "numbers", "value"),
    [
        ("2*3*4", [2, 3, 4], 24),
        ("(2 + 4) * 3", [2, 3, 4], 18),
        ("1 / 3", [1, 3], Fraction(1, 3)),
        ("1/3*3", [1, 3, 3], 1),  # exact, where floats may miss
        ("8 - 3 - 2", [2, 3, 8], 3),
        ("0*5", [0, 5], 0),
        ("((((7))))-7", [7, 7], 0),
        ("2*3", [2, 3, 4], None),  # 4 is missing
        ("2*3*4*4", [2, 3, 4], None),
        ("23*4", [2, 3, 4], None),
        ("2**3*4", [2, 3, 4], None),
        ("7//2", [7, 2], None),
        ("2.5*6", [2, 5, 6], None),
        ("2*3*4=24", [2, 3, 4], None),
        ("-2*-3*4", [2, 3, 4], None),  # unary minus is not in the rules
        ("1/0", [1, 0], None),
        ("1/(2-2)", [1, 2, 2], None),
        ("02*3*4", [2, 3, 4], None),
        ("0x2*3", [2, 3], None),
        ("2_0*3", [20, 3], None),
        ("2(3)", [2, 3], None),
        ("(2,3)", [2, 3], None),
        ("()", [], None),
        ("", [], None),
        ("٢*3", [2, 3], None),
        ("2 3", [2, 3], None),
        ("2×3", [2, 3], None),
        ("__import__('os').system('true')", [2], None),
        ("(" * 90 + "2" + ")" * 90, [2], 2),
        ("(" * 150 + "2" + ")" * 150, [2], None),
        ("1+" * 99 + "1", [1] * 100, 100),
        ("9" * 201, [int("9" * 201)], None),
    ],
)
def test_countdown_value(expression: str, numbers: list[int], value: Fraction | int | None) -> None:
    assert countdown_value(expression, numbers) == value


def test_last_answer() -> None:
    assert last_answer("<answer>1</answer> no, <answer> 2 + 3\n</answer> so it is") == "2 + 3"
    assert last_answer("<answer>1</answer> <answer>2") == "1"
    assert last_answer("<answer>1 <answer>2</answer>") == "2"
    assert last_answer("<answer>1</answer> and </answer>") == "1"
    assert last_answer("nothing </answer>") is None
    assert last_answer("</answer><answer>") is None
    assert last_answer("<answer></answer>") == ""


def test_hostile_answers_are_fast() -> None:
    started = time.perf_counter()
    assert not strict_score("<answer>" * 30_000, [1, 2], 3)[0]
    assert not strict_score("<answer>" + "(" * 100_000 + "</answer>", [1, 2], 3)[0]
    assert tinyzero_score("Assistant: " + "<answer>" * 30_000, [1], 1) == 0.0
    assert tinyzero_score("Assistant: <answer>98**97**96</answer>", [96, 97, 98], 1) == 0.1
    assert tinyzero_score("Assistant: <answer>" + "9" * 100_000 + "</answer>", [9], 9) == 0.1
    assert tinyzero_score("Assistant: <answer>" + "(" * 50_000 + "1" + ")" * 50_000 + "</answer>", [1], 1) == 0.1
    assert time.perf_counter() - started < 5  # milliseconds; quadratic work would take a minute


# Obtained from the original function; target 24 and numbers [2, 3, 4] unless given.
TINYZERO = [
    ("</think>\n<answer>2*3*4</answer>", 24, [2, 3, 4], 1.0),
    ("\n<answer>2*3*4</answer>", 24, [2, 3, 4], 1.0),
    ("<answer>2*3*4 = 24</answer>", 24, [2, 3, 4], 0.1),
    ("<answer></answer>", 24, [2, 3, 4], 0.1),
    ("<answer> </answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2*3</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2*3*4*4</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2*3*5</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2+3+4</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2/(3-3)</answer>", 24, [2, 3, 3], 0.1),
    ("<answer>02*3*4</answer>", 24, [2, 3, 4], 0.1),
    (r"<answer>2\times3*4</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2×3×4</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>\n2*3*4\n</answer>", 24, [2, 3, 4], 0.0),
    ("<answer>2*3*4</answer>\nDone.", 24, [2, 3, 4], 0.0),
    ("<answer>2*3*4</answer><|endoftext|>", 24, [2, 3, 4], 1.0),
    ("<answer>2+3+4</answer> <answer>2*3*4</answer>", 24, [2, 3, 4], 1.0),
    ("<answer>2*3*4</answer> <answer>2+3+4</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2*3*4", 24, [2, 3, 4], 0.0),
    ("<answer>-2*-3*4</answer>", 24, [2, 3, 4], 1.0),
    ("<answer>2**3*4</answer>", 32, [2, 3, 4], 1.0),
    ("<answer>7//2</answer>", 3, [7, 2], 1.0),
    ("<answer>2.5*6</answer>", 15, [2, 5, 6], 1.0),
    ("<answer>2.*3.*4.</answer>", 24, [2, 3, 4], 1.0),
    ("<answer>2 3 4</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>2(3)(4)</answer>", 24, [2, 3, 4], 0.1),
    ("<answer>0**-1</answer>", 24, [0, 1], 0.1),
    ("<answer>(0-8)**.5</answer>", 24, [0, 8, 5], 0.1),
    ("<answer>...</answer>", 24, [], 0.1),
    ("<answer>1**(99*98*97)</answer>", 1, [1, 97, 98, 99], 1.0),
]


@pytest.mark.parametrize(("response", "target", "numbers", "score"), TINYZERO)
def test_tinyzero_truth_table(response: str, target: int, numbers: list[int], score: float) -> None:
    assert tinyzero_score("User: question. Assistant: Let me think. <think>" + response, numbers, target) == score
    assert tinyzero_score("<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n" + response, numbers, target) == score


def test_tinyzero_needs_the_assistant_marker() -> None:
    assert tinyzero_score("<answer>2*3*4</answer>", [2, 3, 4], 24) == 0.0


def reachable(values: list[Fraction]) -> set[Fraction]:
    if len(values) == 1:
        return set(values)
    found = set()
    for a, b, *rest in permutations(values):
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            found |= reachable([value, *rest])
    return found


def test_every_generated_puzzle_has_a_solution() -> None:
    task = Countdown(CountdownConfig(name="countdown", size=14, held_out=4), seed=3)
    assert len(task.train) == 10
    for example in task.train + task.held_out:
        numbers, target = example.answer
        assert target in reachable([Fraction(n) for n in numbers])
    other = Countdown(CountdownConfig(name="countdown", size=14, held_out=4), seed=4)
    assert [e.answer for e in other.train] != [e.answer for e in task.train]


def test_generated_puzzles_are_distinct_and_held_out_apart() -> None:
    task = Countdown(CountdownConfig(name="countdown", size=500, held_out=100), seed=0)
    keys = {(tuple(sorted(e.answer[0])), e.answer[1]) for e in task.train + task.held_out}
    assert len(keys) == 500


def test_scores() -> None:
    task = Countdown(CountdownConfig(name="countdown", size=5, held_out=1), seed=0)
    example = task.train[0].__class__("", ([2, 3, 4], 24))
    assert task.score(example, "", "so <answer>2*3*4</answer>").reward == 1.0
    wrong = task.score(example, "", "so <answer>2+3+4</answer>")
    assert (wrong.reward, wrong.correct, wrong.parts) == (0.1, False, {"correct": 0.0, "format": 0.1})
    assert task.score(example, "", "so <answer>2+3</answer>").reward == 0.0


def test_tinyzero_mode_scores_prompt_and_completion_together() -> None:
    task = Countdown(CountdownConfig(name="countdown", size=5, held_out=1, scoring="tinyzero"), seed=0)
    example = task.train[0]
    assert isinstance(example.prompt, str)
    assert task.score(example, example.prompt, "\n<answer>0</answer>").reward == 0.1
    assert task.score(example, example.prompt, "\nno answer").reward == 0.0


def write(path: Path, *rows: object) -> CountdownConfig:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return CountdownConfig(name="countdown", data=str(path), held_out=1)


def test_data_from_a_file(tmp_path: Path) -> None:
    same = {"nums": [3, 1, 2], "target": 6}  # a repetition could be held out and trained on at once
    config = write(tmp_path / "d.jsonl", {"nums": [1, 2, 3], "target": 6}, "", same, {"target": 5, "nums": [2, 3], "note": "a\u2028b"})
    text = (tmp_path / "d.jsonl").read_text()
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace("\\u2028", "\u2028").replace("\n", "\r\n").encode())
    task = Countdown(config, seed=0)
    assert [e.answer for e in task.held_out + task.train] == [([1, 2, 3], 6), ([2, 3], 5)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"numbers": [1], "target": 3}, "line 2: column 'nums' is missing; it must have nums and target, and has numbers, target"),
        ({"nums": [1, 2]}, "line 2: column 'target' is missing"),
        ({"nums": "1 2", "target": 3}, "line 2: nums is '1 2'"),
        ({"nums": [1, 2.5], "target": 3}, "line 2: nums is"),
        ({"nums": [1, 2], "target": "3"}, "line 2: target is '3'"),
        ("{oops", "line 2: not JSON"),
        ('{"nums": [1, 2], "target": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ([1, 2], "line 2: column 'nums' is missing"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Countdown(write(tmp_path / "d.jsonl", {"nums": [1, 2], "target": 3}, row), seed=0)


def test_data_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes('{"nums": [1, 2], "target": 3}'.encode("utf-16"))
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        Countdown(CountdownConfig(name="countdown", data=str(path)), seed=0)


def test_a_missing_or_short_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        Countdown(CountdownConfig(name="countdown", data=str(tmp_path / "none.jsonl")), seed=0)
    with pytest.raises(UserError, match="has only 1 different puzzles"):
        Countdown(write(tmp_path / "d.jsonl", {"nums": [1, 2], "target": 3}), seed=0)
