"""Checks of settings that are words or numbers; each raises one error that names the setting, what was given and what is allowed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def check_choice(name: str, value: Any, allowed: tuple[str, ...], also: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))} {also}".rstrip())


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high or value == math.inf:
        allowed = f"finite and at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} is {value}; it must be {allowed}")
