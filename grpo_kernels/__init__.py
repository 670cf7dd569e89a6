"""Fused GRPO operators: loss and gradients from hidden states in one memory-efficient pass."""

from grpo_kernels.advantages import group_advantages
from grpo_kernels.backends import BackendStatus
from grpo_kernels.backends import backend_statuses as backends
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs
from grpo_kernels.linear_loss import LinearGRPOLoss, linear_grpo_loss
from grpo_kernels.objective import Objective
from grpo_kernels.packing import LossCounts

__version__ = "0.1.0"
__all__ = [
    "BackendStatus",
    "LinearGRPOLoss",
    "LinearLogprobs",
    "LossCounts",
    "Objective",
    "backends",
    "group_advantages",
    "linear_grpo_loss",
    "linear_logprobs",
]
