"""Fused GRPO operators: loss and gradients from hidden states in one memory-efficient pass."""

from grpo_kernels.advantages import group_advantages, kl_penalized_rewards
from grpo_kernels.backends import BackendStatus
from grpo_kernels.backends import backend_statuses as backends
from grpo_kernels.linear_logprobs import TokenLogprobs, linear_logprobs
from grpo_kernels.linear_loss import GRPOLoss, linear_grpo_loss
from grpo_kernels.logits import grpo_loss, grpo_loss_from_logprobs, selected_logprobs
from grpo_kernels.loss_module import LossModule
from grpo_kernels.objective import Objective, kl_estimate, top_entropy_threshold
from grpo_kernels.packing import LossCounts
from grpo_kernels.process_supervision import process_advantages
from grpo_kernels.rollout_correction import RolloutCorrection
from grpo_kernels.token_batch import TokenBatch

__version__ = "0.1.0"
__all__ = [
    "BackendStatus",
    "GRPOLoss",
    "LossCounts",
    "LossModule",
    "Objective",
    "RolloutCorrection",
    "TokenBatch",
    "TokenLogprobs",
    "backends",
    "group_advantages",
    "grpo_loss",
    "grpo_loss_from_logprobs",
    "kl_estimate",
    "kl_penalized_rewards",
    "linear_grpo_loss",
    "linear_logprobs",
    "process_advantages",
    "selected_logprobs",
    "top_entropy_threshold",
]
