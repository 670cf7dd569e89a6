"""Scoring of countdown answers: an exact checker, and TinyZero's reward as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

_MAX_CHARACTERS = 200
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def last_answer(text: str) -> str | None:
    """What the last `<answer>...</answer>` of the text holds, stripped; in linear time."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.find("</answer>", start)].strip()


def countdown_value(expression: str, numbers: Sequence[int]) -> Fraction | None:
    """The exact value of an expression that uses each of `numbers` exactly once, or None where it is no such expression.

    Allowed are non-negative decimal integers, binary + - * / and parentheses, in at most 200 characters. The syntax tree is walked;
    nothing is evaluated by Python, so neither `**`, `//`, names nor calls can get in, and division by zero is no value.
    """
    if len(expression) > _MAX_CHARACTERS or re.fullmatch(r"[0-9+\-*/() ]+", expression) is None:
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    used: list[int] = []
    try:
        value = _walk(tree, used)
    except (_NotAllowed, ZeroDivisionError):
        return None
    return value if sorted(used) == sorted(numbers) else None


class _NotAllowed(Exception):
    pass


def _walk(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_walk(node.left, used), _walk(node.right, used))
    raise _NotAllowed


def strict_score(response: str, numbers: Sequence[int], target: int) -> tuple[bool, bool]:
    """(correct, well formed): the last answer's value is the target; it is an expression that uses each number once."""
    answer = last_answer(response)
    value = None if answer is None else countdown_value(answer, numbers)
    return value == target, value is not None


def tinyzero_score(text: str, numbers: Sequence[int], target: int) -> float:
    """TinyZero's reward, exploits included, for reproducing its curves: 0, 0.1 or 1.0.

    Source: Jiayi-Pan/TinyZero at 95df88f, `verl/utils/reward_score/countdown.py`. `text` is prompt and response together: what counts is
    the last line after the first "Assistant:". `**`, `//` and decimals work, as there; a power of more than 100,000 bits, on which the
    original hangs, scores 0.1.
    """
    if "Assistant:" in text:
        text = text.split("Assistant:", 1)[1]
    elif "<|im_start|>assistant" in text:
        text = text.split("<|im_start|>assistant", 1)[1]
    else:
        return 0.0
    answer = _last_match(text.split("\n")[-1])
    if answer is None:
        return 0.0
    try:
        used = sorted(int(digits) for digits in re.findall(r"\d+", answer))
    except ValueError:  # more digits than Python converts
        return 0.1
    if used != sorted(numbers) or re.fullmatch(r"[\d+\-*/().\s]+", answer) is None:
        return 0.1
    try:
        value = _python_value(ast.parse(answer, mode="eval").body)
        return 1.0 if abs(value - target) < 1e-5 else 0.1
    except (SyntaxError, ValueError, ArithmeticError, TypeError, _NotAllowed, RecursionError, MemoryError):
        return 0.1


def _last_match(line: str) -> str | None:
    """The last match of `<answer>(.*?)</answer>`, stripped, as `re.finditer` finds them, but in linear time."""
    found, at = None, 0
    while (start := line.find("<answer>", at)) >= 0 and (end := line.find("</answer>", start)) >= 0:
        found, at = line[start + len("<answer>") : end].strip(), end + len("</answer>")
    return found


_Number = int | float | complex


def _python_value(node: ast.expr) -> _Number:
    """Python's own arithmetic on what the characters `0-9 + - * / ( ) .` can spell."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number: _Number = node.value  # type: ignore[assignment]
        return number
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        operand = _python_value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        a, b = _python_value(node.left), _python_value(node.right)
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.Mult):
            return a * b
        if isinstance(node.op, ast.Div):
            return a / b
        if isinstance(node.op, ast.FloorDiv) and not isinstance(a, complex) and not isinstance(b, complex):
            return a // b
        if isinstance(node.op, ast.Pow):
            if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and a.bit_length() * abs(b) > 100_000:
                raise _NotAllowed
            result: _Number = a**b
            return result
    raise _NotAllowed
