"""What a backend does: the anchored softmax of a chunk of rows, and the chunk's weight gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class SoftmaxChunk:
    """Rows `h_t` of a chunk through `x = h W^T / T` and a softmax anchored at an offset `o_t`, see `TorchBackend`.

    `o_t` is the target's own logit x_y; for a row whose target is so unlikely that exp(x - x_y) overflows, the row's maximum.

    float32 below is float64 for float64 inputs.

    Attributes:
        logprobs: [n] float32, log-probability of the target.
        entropy: [n] float32, in nats.
        others: [n] float32, s = sum over j != y of exp(x_j - o).
        total: [n] float32, Z = s + exp(x_y - o); 1 - p_y = s / Z.
        exponentials: [V, n] or None, exp(x_j - o) with 0 at the target: vocabulary in rows, tokens side by side.
        weighted_rows: [n, H] or None, sum over j != y of exp(x_j - o) W_j.
        target_rows: [n, H], W_y in the working dtype.
    """

    logprobs: Tensor
    entropy: Tensor
    others: Tensor
    total: Tensor
    exponentials: Tensor | None
    weighted_rows: Tensor | None
    target_rows: Tensor


class Backend(Protocol):
    name: str

    def rows_per_chunk(self, vocabulary: int) -> int:
        """How many rows to give to `softmax` at once: a speed and memory choice, never one of results."""

    def softmax(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, hidden_gradient: bool, weight_gradient: bool
    ) -> SoftmaxChunk:
        """GEMM 1, and with `hidden_gradient` GEMM 2 up to its row scale. `hidden` is [n, H], `weight` [V, H], `targets` [n] int64.

        With `weight_gradient` the exponentials are kept until `add_weight_gradient`; they live in a workspace that the next call reuses.
        """

    def add_weight_gradient(self, chunk: SoftmaxChunk, targets: Tensor, scaled_hidden: Tensor, gradient: Tensor, *, first: bool) -> None:
        """GEMM 3: `gradient += E'^T scaled_hidden` with E' = the exponentials, -s at the target. `first`: overwrite instead of add.

        `scaled_hidden` [n, H] is a_t h_t with a = -c / (Z T), c = d loss / d logp; `gradient` is [V, H] in the working dtype.
        """
