"""Jagged input and output: the values of all samples in one tensor, with a length a sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexd.errors import EmbeddingError


@dataclass(frozen=True)
class Jagged:
    """``values`` [n] row ids (input) or [n, dim] rows (output), and int64 ``lengths`` [batch] that sum to n.

    Raises:
        EmbeddingError: lengths are not a 1-d integer tensor, or ``values`` is empty of shape.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() < 1:
            raise EmbeddingError("jagged values are a scalar", remedy="pass a tensor of shape [n]")
        if self.lengths.dim() != 1 or self.lengths.is_floating_point():
            raise EmbeddingError(
                f"jagged lengths have shape {tuple(self.lengths.shape)} and dtype {self.lengths.dtype}",
                remedy="pass one integer length a sample",
            )

    @staticmethod
    def from_offsets(values: torch.Tensor, offsets: torch.Tensor) -> Jagged:
        """``offsets`` int [batch + 1], ascending from 0 to n."""
        return Jagged(values, offsets[1:] - offsets[:-1])

    @property
    def offsets(self) -> torch.Tensor:
        """int64 [batch + 1]."""
        return torch.nn.functional.pad(self.lengths.to(torch.int64).cumsum(0), (1, 0))

    def to_padded(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output rows as ([batch, length, dim] zero-padded or cut at the end, bool [batch, length] mask)."""
        lengths = self.lengths.to(torch.int64)
        starts = self.offsets[:-1]
        at = torch.arange(length, device=lengths.device)
        mask = at < lengths.unsqueeze(1)
        index = torch.where(mask, starts.unsqueeze(1) + at, 0)
        if self.values.shape[0] == 0:
            return self.values.new_zeros((*index.shape, *self.values.shape[1:])), mask
        shape = (*mask.shape, *([1] * (self.values.dim() - 1)))
        return self.values[index].masked_fill(~mask.view(shape), 0), mask
