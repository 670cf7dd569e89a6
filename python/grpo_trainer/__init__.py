"""A thin GRPO trainer around grpo_kernels."""
