"""Ways to run one chunk of rows through the head, one module each, behind one Protocol, with one selection rule."""

from __future__ import annotations

from grpo_kernels.backends.base import Backend, ChunkRows, Sweep
from grpo_kernels.backends.selection import BackendStatus, backend_statuses, select_backend

__all__ = ["Backend", "BackendStatus", "ChunkRows", "Sweep", "backend_statuses", "select_backend"]
