"""What a backend does: the sweeps of a chunk of rows over the vocabulary, in which nearly all of the time is spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from grpo_kernels.head import Head
from grpo_kernels.loss_rows import LossRows

Keep = Literal["nothing", "exponentials", "distances"]


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a chunk. float32 below is float64 where an input is.

    hidden: [n, H] as given, in any dtype. targets: [n] int64, rows of this process's weight, -1 where another process has them.
    inverse_temperature: [n] float32.
    """

    hidden: Tensor
    targets: Tensor
    inverse_temperature: Tensor


@dataclass
class Sweep:
    """One pass of a chunk over this process's vocabulary; x are its logits, o the chunk's offsets, y the targets.

    others: [n] float64, sum over j != y of exp(x_j - o); at least e^60, infinite or NaN in an extreme row.
    weighted: [n] float64, sum over j != y of exp(x_j - o) (x_j - o).
    kept: what `add_exponentials` or `add_distances` needs, in the backend's own layout and dtype; None: nothing was to be kept.
    weighted_rows: [n, H] float32, sum over j != y of exp(x_j - o) W_j, or None.
    """

    others: Tensor
    weighted: Tensor
    kept: Tensor | None
    weighted_rows: Tensor | None


@dataclass(frozen=True)
class LogitSlopes:
    """What turns kept distances into gradients of the products h W^T, each [n] float32.

    The gradient is -p (slope + entropy_slope log p) dx/dz with log p = distance - log_total, and `target_gradient` at the target; `offset`
    is the one of the sweep. dx/dz is 1 / T, with a soft cap times 1 - tanh^2.
    """

    offset: Tensor
    log_total: Tensor
    slope: Tensor
    entropy_slope: Tensor
    target_gradient: Tensor


@dataclass
class ParameterGradients:
    """weight: [V, H] in the backend's `gradient_dtype`, or None where not wanted; bias: [V] float32, or None. `fresh`: they hold nothing
    yet and are overwritten."""

    weight: Tensor | None
    bias: Tensor | None
    fresh: bool = True


class Backend(Protocol):
    name: str

    def rows_per_chunk(self, head: Head, rows: int, keep: Keep, *, weight_gradient: bool) -> int:
        """How many of `rows` to give at once, where a sweep keeps at most `keep`, and gradients of the weight are wanted or not: a speed
        and memory choice, never one of results."""

    def release(self) -> None:
        """Gives the workspace back; who holds the backend after a call holds no memory."""

    def prepared(self, rows: LossRows, dtype: torch.dtype) -> LossRows:
        """The rows of a loss with the backend's own way to evaluate their objective, where it has one; `dtype` is of their logp."""

    def scaled(self, gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
        """gradient * factor in `dtype`, with `factor` a scalar on its device; over the gradient where that may be."""

    def gradient_dtype(self, head: Head, hidden: torch.dtype, *, one_chunk: bool) -> torch.dtype:
        """In which the gradient of the weight is summed; `hidden` is the dtype of the rows, `one_chunk`: all of them are in one."""

    def sweep(self, head: Head, rows: ChunkRows, offset: Tensor, *, keep: Keep, weighted_rows: bool) -> Sweep:
        """GEMM 1 and, with `weighted_rows`, GEMM 2 up to its row scale. `offset` is [n] float32.

        What is kept lives in a workspace that the next call reuses.
        """

    def target_products(self, head: Head, rows: ChunkRows) -> Tensor:
        """<h, W_y> + bias_y, [n] float64; 0 where another process has the target."""

    def hidden_gradient(self, head: Head, rows: ChunkRows, weighted_rows: Tensor, others: Tensor, scale: Tensor) -> Tensor:
        """scale (weighted_rows - others W_y), [n, H] float32, without W_y where another process has it. `others` and `scale` are [n]
        float32; `weighted_rows` may be overwritten."""

    def row_maximum(self, head: Head, rows: ChunkRows) -> Tensor:
        """[n] float32, each row's largest logit of this process."""

    def add_exponentials(self, head: Head, rows: ChunkRows, kept: Tensor, others: Tensor, scale: Tensor, into: ParameterGradients) -> None:
        """GEMM 3: with E the kept exponentials and E_y = -others at the targets, weight += E^T (scale h) and bias += E^T scale.

        `others` and `scale` are [n] float32; scale 0 leaves a row out.
        """

    def add_distances(
        self, head: Head, rows: ChunkRows, kept: Tensor, slopes: LogitSlopes, hidden_gradient: Tensor | None, into: ParameterGradients
    ) -> None:
        """Kept distances to the gradient G of the products; then hidden += G^T W, weight += G h, bias += G 1 where wanted."""
