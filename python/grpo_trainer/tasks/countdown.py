"""Countdown: reach a target from given numbers with + - * /, each number used once (TinyZero's task)."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

from grpo_trainer.config import CountdownConfig
from grpo_trainer.errors import UserError
from grpo_trainer.rewards.countdown import strict_score, tinyzero_score
from grpo_trainer.tasks.task import Example, Score

FORMAT_REWARD = 0.1


class Countdown:
    """Puzzles of 3 or 4 numbers, generated so that each has a solution, or read from a JSONL file (columns nums and target).

    strict: 1 for an exact solution, 0.1 for a well-formed expression of another value (each number once), else 0; asked as a chat.
    tinyzero: TinyZero's prompt for base models and its reward, exploits included.
    """

    def __init__(self, config: CountdownConfig, seed: int) -> None:
        puzzles = _generate(config.size, seed) if config.data is None else _distinct(_read(Path(config.data)))
        if len(puzzles) <= config.held_out:
            raise UserError(
                f"task.held_out is {config.held_out}, but {config.data} has only {len(puzzles)} different puzzles, and training needs some"
            )
        self._tinyzero = config.scoring == "tinyzero"
        prompt = _base_prompt if self._tinyzero else _chat_prompt
        examples = [Example(prompt(numbers, target), (numbers, target)) for numbers, target in puzzles]
        self.held_out, self.train = examples[: config.held_out], examples[config.held_out :]

    def score(self, example: Example, prompt: str, completion: str) -> Score:
        numbers, target = example.answer
        if self._tinyzero:
            reward = tinyzero_score(prompt + completion, numbers, target)
            return Score(reward, {"tinyzero": reward}, reward == 1.0)
        correct, well_formed = strict_score(completion, numbers, target)
        parts = {"correct": float(correct), "format": FORMAT_REWARD if well_formed and not correct else 0.0}
        return Score(sum(parts.values()), parts, correct)


def _chat_prompt(numbers: list[int], target: int) -> list[dict[str, str]]:
    listed = ", ".join(map(str, numbers))
    text = (
        f"Use each of the numbers {listed} exactly once, with +, -, *, / and parentheses, to make {target}. "
        "Think first, then give only the expression in <answer> </answer> tags, for example <answer>(1 + 2) * 3</answer>."
    )
    return [{"role": "user", "content": text}]


def _base_prompt(numbers: list[int], target: int) -> str:
    # The task's words are TinyZero's (examples/data_preprocess/countdown.py): its curves depend on them.
    return (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
        "The assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        f"User: Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations (+, -, *, /) "
        "and each number can only be used once. Show your work in <think> </think> tags. And return the final answer in <answer> </answer> "
        "tags, for example <answer> (1 + 2) / 3 </answer>.\nAssistant: Let me solve this step by step.\n<think>"
    )


def _generate(size: int, seed: int) -> list[tuple[list[int], int]]:
    """Distinct puzzles: numbers from 1 to 99 joined by a random expression whose value is an integer from 1 to 999."""
    rng = random.Random(seed)
    seen: set[tuple[tuple[int, ...], int]] = set()
    puzzles: list[tuple[list[int], int]] = []
    while len(puzzles) < size:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        value = _random_value([Fraction(n) for n in numbers], rng)
        if value is None or value.denominator != 1 or not 1 <= value <= 999:
            continue
        rng.shuffle(numbers)
        key = (tuple(sorted(numbers)), int(value))
        if key not in seen:
            seen.add(key)
            puzzles.append((numbers, int(value)))
    return puzzles


def _random_value(values: list[Fraction], rng: random.Random) -> Fraction | None:
    """Joins two random values by a random operation until one is left: every expression tree is possible."""
    while len(values) > 1:
        a = values.pop(rng.randrange(len(values)))
        b = values.pop(rng.randrange(len(values)))
        operation = rng.choice("+-*/")
        if operation == "/" and b == 0:
            return None
        values.append({"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}[operation](a, b))
    return values[0]


def _distinct(puzzles: list[tuple[list[int], int]]) -> list[tuple[list[int], int]]:
    """Without repetitions: one of a pair could be held out and the other trained on."""
    first: dict[tuple[tuple[int, ...], int], tuple[list[int], int]] = {}
    for numbers, target in puzzles:
        first.setdefault((tuple(sorted(numbers)), target), (numbers, target))
    return list(first.values())


def _read(path: Path) -> list[tuple[list[int], int]]:
    if not path.is_file():
        raise UserError(f"task.data is {str(path)!r}; there is no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no content
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.data {path} cannot be read as UTF-8 text: {error}") from None
    puzzles = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"task.data {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error})") from None
        columns = list(row) if isinstance(row, dict) else []
        for column in ("nums", "target"):
            if column not in columns:
                raise UserError(
                    f"{where}: column {column!r} is missing; it must have nums and target, and has {', '.join(columns) or 'none'}"
                )
        numbers, target = row["nums"], row["target"]
        if not (isinstance(numbers, list) and len(numbers) > 1 and all(type(n) is int and n >= 0 for n in numbers)):
            raise UserError(f"{where}: nums is {numbers!r}; it must be a list of at least two integers, none negative")
        if type(target) is not int:
            raise UserError(f"{where}: target is {target!r}; it must be an integer")
        puzzles.append((numbers, target))
    return puzzles
