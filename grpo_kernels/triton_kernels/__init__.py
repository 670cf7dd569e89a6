"""Kernels in Triton, one file per operator: the kernel, and below it the launcher, which takes tensors and never waits for the device.

Imported where they are used (see `grpo_kernels.backends.triton`), since triton need not be there.
"""

from grpo_kernels.triton_kernels.advantages import LARGEST_GROUP, group_advantages_of
from grpo_kernels.triton_kernels.anchored_gemm import anchored_products
from grpo_kernels.triton_kernels.objective import computes, token_objective
from grpo_kernels.triton_kernels.rows import anchor_rows, products_gradient, row_gradient, row_loss, row_statistics
from grpo_kernels.triton_kernels.runtime import INTERPRETED
from grpo_kernels.triton_kernels.scaling import scaled
from grpo_kernels.triton_kernels.selection import first_product
from grpo_kernels.triton_kernels.targets import hidden_gradient, target_products

__all__ = [
    "INTERPRETED",
    "LARGEST_GROUP",
    "anchor_rows",
    "anchored_products",
    "computes",
    "first_product",
    "group_advantages_of",
    "hidden_gradient",
    "products_gradient",
    "row_gradient",
    "row_loss",
    "row_statistics",
    "scaled",
    "target_products",
    "token_objective",
]
