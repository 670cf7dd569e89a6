"""The language-model head: from hidden states to logits, and what every operator on it requires of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

# Logits divided by less, or by more, leave what float32 can hold or tell apart.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
MIN_SOFTCAP, MAX_SOFTCAP = 1e-3, 1e30  # as far as float32 holds them and their inverse

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class VocabularySlice:
    """This process's part of a vocabulary that is split over the processes of `group`, in rank order: [first, first + own rows).

    `total` is the whole vocabulary, `largest` the largest slice.
    """

    group: dist.ProcessGroup
    first: int
    total: int
    largest: int

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup) -> VocabularySlice:
        sizes = [torch.zeros(1, dtype=torch.int64, device=weight.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor([weight.shape[0]], device=weight.device), group=group)
        rows = [int(size) for size in sizes]
        return cls(group, sum(rows[: dist.get_rank(group)]), sum(rows), max(rows))

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


@dataclass(frozen=True)
class Head:
    """`logits = softcap * tanh((h W^T + bias) / softcap)`, without `softcap` h W^T + bias; then divided by the temperature.

    weight: [V, H], bias: [V] or None; of a split vocabulary, this process's rows of both.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    slice: VocabularySlice | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, softcap: float | None, group: dist.ProcessGroup | None) -> Head:
        if not isinstance(group, dist.ProcessGroup | None):
            raise TypeError(f"group is a {type(group).__name__}; it must be a torch.distributed process group")
        return cls(weight, bias, softcap, None if group is None else VocabularySlice.of(weight, group))

    @property
    def vocabulary(self) -> int:
        """Of all processes."""
        return self.weight.shape[0] if self.slice is None else self.slice.total

    @property
    def largest_slice(self) -> int:
        """The same on every process of a split vocabulary, as must be what is derived from it."""
        return self.weight.shape[0] if self.slice is None else self.slice.largest

    def own(self, targets: Tensor) -> Tensor:
        """[n] int64 token ids as rows of this process's weight; -1 where another process has them."""
        if self.slice is None:
            return targets
        local = targets - self.slice.first
        return torch.where((local >= 0) & (local < self.weight.shape[0]), local, -1)


def working_dtype(hidden: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """float32 for half and single precision (logits are never rounded to bf16), float64 for float64."""
    return torch.promote_types(torch.promote_types(hidden, weight), torch.float32)


def check_head(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None) -> None:
    """What every operator on (hidden, weight, targets) requires; raises ValueError or TypeError, naming the argument."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
        if hasattr(tensor, "placements"):
            raise TypeError(
                f"{name} is a DTensor, sharded by FSDP2 or tensor parallelism; compute the loss inside the wrapped module's forward, where "
                "FSDP2's weights are whole (see grpo_kernels.LossModule), or pass the local slice and its process group as group="
            )
    if hidden.dim() not in (2, 3):
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be [rows, H] or [batch, length, H]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [V, H] with hidden's H = {hidden.shape[-1]}")
    if weight.shape[0] < 1 or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; V and H must be at least 1")
    check_target_shape(targets, hidden.shape[:-1])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [V], {tuple(weight.shape[:1])}")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be float16, bfloat16, float32 or float64")
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}; all tensors must be on one device")
    if softcap is not None and not (isinstance(softcap, Real) and MIN_SOFTCAP <= softcap <= MAX_SOFTCAP):
        raise ValueError(f"softcap is {softcap!r}; it must be None or a number from {MIN_SOFTCAP} to {MAX_SOFTCAP}")


def check_target_shape(targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape or targets.dtype not in INTEGERS:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and dtype {targets.dtype}; it must hold integer ids of shape {tuple(shape)}"
        )


def check_support(support: Tensor | None, group: dist.ProcessGroup | None) -> None:
    if support is not None and group is not None:
        raise ValueError("support is given with group; over a split vocabulary only whole distributions are computed")


@dataclass(frozen=True)
class HeadRows:
    """What the head is asked for in some rows: targets [n] int64, temperatures [n] float64, and support [n, K] int64 or None.

    The support are the tokens that the sampler could draw, -1 where there are fewer than K; the target always is one of them.
    """

    targets: Tensor
    temperatures: Tensor
    support: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, vocabulary: int, targets: Tensor, temperature: float | Tensor, support: Tensor | None = None) -> HeadRows:
        """Those of `rows` [n], indices into the flattened `targets`.

        Raises:
            ValueError: naming `targets`, `temperature` or `support`; rows that are left out may hold anything.
        """
        mine = targets.reshape(-1)[rows].long()
        _check_ids("targets", mine, rows, vocabulary)
        return cls(mine, _temperatures(temperature, targets, rows), _support(support, targets, rows, vocabulary))

    def __getitem__(self, at: Tensor | slice) -> HeadRows:
        return HeadRows(self.targets[at], self.temperatures[at], None if self.support is None else self.support[at])


def _temperatures(temperature: float | Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """[n] float64, so that the inverse is exact enough."""
    allowed = f"it must be from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
    if not isinstance(temperature, Tensor | Real):
        raise TypeError(f"temperature is {temperature!r}; it must be a number or a tensor")
    if not isinstance(temperature, Tensor) or not temperature.dim():
        if not MIN_TEMPERATURE <= float(temperature) <= MAX_TEMPERATURE:
            raise ValueError(f"temperature is {float(temperature)}; {allowed}")
        return torch.full((rows.numel(),), float(temperature), dtype=torch.float64, device=targets.device)
    if temperature.shape != targets.shape:
        raise ValueError(f"temperature has shape {tuple(temperature.shape)}; it must be one number or of shape {tuple(targets.shape)}")
    mine = temperature.detach().to(targets.device).reshape(-1)[rows].double()
    bad = ~((mine >= MIN_TEMPERATURE) & (mine <= MAX_TEMPERATURE))
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(f"temperature holds {float(mine[first])} at row {int(rows[first])}; {allowed}")
    return mine


def _support(support: Tensor | None, targets: Tensor, rows: Tensor, vocabulary: int) -> Tensor | None:
    if support is None:
        return None
    if not isinstance(support, Tensor):
        raise TypeError(f"support is a {type(support).__name__}; it must be a tensor")
    if support.shape[:-1] != targets.shape or support.dtype not in INTEGERS or support.shape[-1] < 1:
        raise ValueError(
            f"support has shape {tuple(support.shape)} and dtype {support.dtype}; "
            f"it must hold integer ids of shape {(*targets.shape, 'K')}, -1 where a row has fewer than K"
        )
    mine = support.to(targets.device).reshape(-1, support.shape[-1])[rows].long()
    _check_ids("support", mine.clamp(min=0).amax(1), rows, vocabulary)
    ordered = mine.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if bool(twice.any()):
        raise ValueError(f"support holds a token twice at row {int(rows[int(twice.nonzero()[0])])}; each may be there once")
    return mine


def _check_ids(name: str, ids: Tensor, rows: Tensor, vocabulary: int) -> None:
    bad = (ids < 0) | (ids >= vocabulary)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        what = "an unmasked target must be" if name == "targets" else "ids must be"
        raise ValueError(f"{name} holds {int(ids[first])} at row {int(rows[first])}; {what} in [0, {vocabulary}), the vocabulary")
