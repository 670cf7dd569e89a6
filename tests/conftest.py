"""Set before torch is imported anywhere: one OpenMP thread each, since two that spin beside a busy process run ten times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter. It is chosen when a kernel is defined, so before any is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import grpo_trainer.run as run_module
from runs import Digits


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the test trains on `Digits`, whatever its settings name."""
    monkeypatch.setattr(run_module, "build_task", lambda config, seed: Digits())
