"""The README's Python is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def names() -> dict[str, Any]:
    """What the snippets take for given: a packed batch of two groups of eight completions of three tokens."""
    rows = 48
    head = torch.nn.Linear(8, 50, bias=False)
    return {
        "rewards": torch.arange(16) % 3,
        "hidden": torch.randn(rows, 8, requires_grad=True),
        "lm_head": head,
        "targets": torch.randint(0, 50, (rows,)),
        "cu_seqlens": torch.arange(0, rows + 1, 3),
        "old": None,
        "total_tokens": rows,
        "total_sequences": 16,
    }


def test_the_snippets_run_and_do_what_they_say() -> None:
    given = names()
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet, given)
    assert float(given["hidden"].grad.norm()) > 0
    assert float(given["lm_head"].weight.grad.norm()) > 0
    result = given["linear_grpo_loss"](
        given["hidden"], given["lm_head"].weight, given["targets"], given["advantages"], objective=given["objective"],
        cu_seqlens=given["cu_seqlens"],
    )  # fmt: skip
    assert result.loss.requires_grad
    assert callable(given["objective"].policy_loss)
