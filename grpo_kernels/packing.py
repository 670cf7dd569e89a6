"""Rows and sequences: how a batch of completions is laid out for the loss, and what the loss is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LossCounts:
    """What the loss is divided by, over *all* micro-batches and all processes of one optimiser step.

    tokens: tokens that count in the loss (mask is true), those of groups without signal included.
    sequences: completions with at least one such token. (TRL counts those that are wholly masked as well: give its count for its loss.)

    Pieces then add up to the whole however they are cut; where a cut goes through a sequence, aggregation "sequence" needs the sequence's
    whole length as well (`sequence_lengths`).
    """

    tokens: int
    sequences: int

    def __post_init__(self) -> None:
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in (self.tokens, self.sequences)):
            raise ValueError(f"LossCounts(tokens={self.tokens!r}, sequences={self.sequences!r}): counts are integers of at least 0")

    @classmethod
    def of(cls, mask: Tensor, sequence_of_row: Tensor) -> LossCounts:
        """The counts of one batch: `mask` [rows] bool, `sequence_of_row` [rows] int64."""
        return cls(int(mask.sum()), int(torch.unique(sequence_of_row[mask]).numel()))

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences)

    def all_reduce(self, group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None) -> LossCounts:
        """The sum over the processes of `group` (None: all). `device`: "cuda" where the group's backend is NCCL."""
        counts = torch.tensor([self.tokens, self.sequences], device=device)
        dist.all_reduce(counts, group=group)
        return LossCounts(*counts.tolist())


@dataclass(frozen=True)
class RowLayout:
    """Rows of one batch, flattened: row t belongs to sequence `sequence_of_row[t]` and counts where `mask[t]`.

    `shape` is the caller's leading shape, [rows] or [batch, length]; `sequences` is None where the caller gave no boundaries.
    """

    shape: torch.Size
    mask: Tensor
    sequence_of_row: Tensor
    sequences: int | None

    @classmethod
    def of(cls, shape: torch.Size, device: torch.device, mask: Tensor | None, cu_seqlens: Tensor | None) -> RowLayout:
        """From padded rows [batch, length], where each batch entry is a sequence, or packed rows [rows] with `cu_seqlens`.

        Raises:
            ValueError: naming `mask` or `cu_seqlens`.
        """
        rows = shape.numel()
        flat_mask = torch.ones(rows, dtype=torch.bool, device=device)
        if mask is not None:
            if mask.shape != shape or mask.dtype.is_floating_point or mask.dtype.is_complex:
                raise ValueError(
                    f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; "
                    f"it must be bool or integer (0: leave out) of shape {tuple(shape)}"
                )
            flat_mask = mask.to(device).reshape(-1) != 0
        if len(shape) == 2:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens goes with packed rows [rows, H]; padded rows [batch, length, H] have their boundaries already")
            sequence_of_row = torch.arange(shape[0], device=device).repeat_interleave(shape[1])
            return cls(shape, flat_mask, sequence_of_row, shape[0])
        if cu_seqlens is None:
            return cls(shape, flat_mask, torch.zeros(rows, dtype=torch.int64, device=device), None)
        lengths = _lengths(cu_seqlens, rows)
        sequence_of_row = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths).to(device)
        return cls(shape, flat_mask, sequence_of_row, lengths.numel())

    def lengths(self, given: Tensor | None = None) -> Tensor:
        """[sequences] int64, the tokens of each sequence that count: here, or as `given` where parts of it are in other calls.

        Raises:
            ValueError: naming `sequence_lengths`.
        """
        sequences = self.sequences or 1
        here = torch.zeros(sequences, dtype=torch.int64, device=self.mask.device).index_add_(0, self.sequence_of_row, self.mask.long())
        if given is None:
            return here
        if self.sequences is None or given.shape != here.shape or given.dtype.is_floating_point:
            raise ValueError(
                f"sequence_lengths has shape {tuple(given.shape)} and dtype {given.dtype}; "
                f"it must hold one integer per sequence, {(self.sequences,)} (None: cu_seqlens are missing)"
            )
        given = given.to(here)
        if bool((given < here).any()):
            at = int((given < here).nonzero()[0])
            raise ValueError(f"sequence_lengths[{at}] is {int(given[at])}, but {int(here[at])} of the sequence's tokens count in this call")
        return given

    def counts(self) -> LossCounts:
        """Of these rows alone; the device is waited for once."""
        here = self.lengths()
        tokens, sequences = torch.stack([here.sum(), (here > 0).sum()]).tolist()
        return LossCounts(tokens, sequences)

    def per_row(self, name: str, values: Tensor, *, per_sequence: bool = False) -> Tensor:
        """`values` as [rows] in float32, or float64 where they are that: of the caller's shape, or with `per_sequence` one per sequence."""
        if per_sequence and values.shape == self.shape == (self.sequences,) and not self._one_row_each():
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, which fits the rows and, as some sequences are empty, the sequences too; "
                "leave the empty sequences out of cu_seqlens"
            )
        values = values.detach().to(self.mask.device)
        if not values.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {values.dtype}; it must be floating point")
        if values.dtype != torch.float64:
            values = values.float()
        if values.shape == self.shape:
            return values.reshape(-1)
        allowed = [tuple(self.shape)]
        if per_sequence and self.sequences is not None:
            if values.shape == (self.sequences,):
                return values[self.sequence_of_row]
            allowed.append((self.sequences,))
        hint = " (one value per sequence needs cu_seqlens)" if per_sequence and self.sequences is None else ""
        raise ValueError(f"{name} has shape {tuple(values.shape)}; it must be {' or '.join(map(str, allowed))}{hint}")

    def _one_row_each(self) -> bool:
        return bool((self.sequence_of_row.diff() == 1).all())


def _lengths(cu_seqlens: Tensor, rows: int) -> Tensor:
    bounds = cu_seqlens.detach().cpu()
    if bounds.dim() != 1 or bounds.numel() < 1 or bounds.dtype.is_floating_point:
        raise ValueError(f"cu_seqlens has shape {tuple(bounds.shape)} and dtype {bounds.dtype}; it must be integer, [sequences + 1]")
    lengths = bounds.long().diff()
    if int(bounds[0]) != 0 or int(bounds[-1]) != rows or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens is {bounds.tolist()[:8]}{'...' if bounds.numel() > 8 else ''}; it must rise from 0 to the {rows} rows"
        )
    return lengths
