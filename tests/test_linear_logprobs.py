from __future__ import annotations

import pytest
import torch

from grpo_kernels import backends, linear_logprobs
from problems import make, reference


@pytest.mark.parametrize("backend", [status.name for status in backends() if status.available])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 600])
def test_against_float64(backend: str, dtype: torch.dtype, rows: int) -> None:
    p = make(rows, 32, 1500, dtype=dtype, temperature=0.8, logit_scale=10.0)
    result = linear_logprobs(p.hidden, p.weight, p.targets, temperature=0.8, backend=backend)
    assert result.logprobs.shape == (rows,)
    if rows:
        exact = reference(p, torch.float64)
        assert float((result.logprobs - exact.logprobs).abs().max()) < 2e-5
        # The entropy is a difference of numbers as large as the log-probability, which reaches -70 here; a sampled token's does not.
        assert ((result.entropy - exact.entropy).abs() < 1e-6 * (exact.logprobs.abs() + 10)).all()


def test_padded_shape_and_equality_with_packed() -> None:
    p = make(12, 16, 80)
    padded = linear_logprobs(p.hidden.view(3, 4, 16), p.weight, p.targets.view(3, 4))
    assert torch.equal(padded.logprobs.view(-1), linear_logprobs(p.hidden, p.weight, p.targets).logprobs)


def test_strided_targets_and_hidden() -> None:
    p = make(24, 16, 80)
    every_second = linear_logprobs(p.hidden[::2], p.weight, p.targets[::2])
    assert torch.allclose(every_second.logprobs, linear_logprobs(p.hidden, p.weight, p.targets).logprobs[::2], atol=1e-5)


def test_bad_target_is_named() -> None:
    p = make(4, 8, 20)
    with pytest.raises(ValueError, match="targets holds 20 at row 1"):
        linear_logprobs(p.hidden, p.weight, torch.tensor([0, 20, 1, 2]))
