"""Kernels in Triton, one file per operator: the kernel, and below it the launcher, which takes tensors. They import torch and triton only."""
