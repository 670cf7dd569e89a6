"""Ways to run one chunk of rows through the head, one module each, behind one Protocol, with one selection rule."""

from __future__ import annotations

from grpo_kernels.backends.base import Backend, SoftmaxChunk
from grpo_kernels.backends.selection import BackendStatus, backend_statuses, select_backend

__all__ = ["Backend", "BackendStatus", "SoftmaxChunk", "backend_statuses", "select_backend"]
