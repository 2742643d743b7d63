"""Jagged input and output: the values of all samples in one tensor, with one length per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flexd.core.errors import EmbeddingError


@dataclass(frozen=True)
class Jagged:
    """``values`` [n] row ids (input) or [n, dim] rows (output), and int64 ``lengths`` [batch] that sum to n.

    Raises:
        EmbeddingError: lengths are not a 1-d integer tensor, or ``values`` is a scalar.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() < 1:
            raise EmbeddingError("jagged values are a scalar", remedy="pass a tensor of shape [n]")
        if self.lengths.dim() != 1 or self.lengths.is_floating_point():
            raise EmbeddingError(
                f"jagged lengths have shape {tuple(self.lengths.shape)} and dtype {self.lengths.dtype}",
                remedy="pass one integer length per sample",
            )

    @staticmethod
    def checked(values: torch.Tensor, lengths: torch.Tensor) -> Jagged:
        """Make one of tensors that are known to fit: a look-up makes one for each of thousands of features."""
        jagged = object.__new__(Jagged)
        jagged.__dict__["values"], jagged.__dict__["lengths"] = values, lengths
        return jagged

    @staticmethod
    def from_offsets(values: torch.Tensor, offsets: torch.Tensor) -> Jagged:
        """Convert from integer ``offsets`` [batch + 1], ascending from 0 to n."""
        return Jagged(values, offsets[1:] - offsets[:-1])

    @staticmethod
    def from_nested(nested: torch.Tensor) -> Jagged:
        """Convert a nested tensor [batch, jagged] or [batch, jagged, dim] of layout ``torch.jagged``.

        Raises:
            EmbeddingError: the tensor is not nested with that layout, or its second dimension is not the jagged one.
        """
        if not nested.is_nested or nested.layout != torch.jagged or nested.dim() < 2:
            raise EmbeddingError(
                f"a tensor of layout {nested.layout} and {nested.dim()} dimensions is not jagged",
                remedy="make it with torch.nested.nested_tensor([...], layout=torch.jagged), or pass Jagged",
            )
        if isinstance(nested.size(1), int):
            raise EmbeddingError(
                f"the nested tensor {tuple(nested.shape)} is jagged in another dimension than the second",
                remedy="one sample a row: [batch, jagged] or [batch, jagged, dim]",
            )
        # A view made by torch.nested.narrow has holes between its samples.
        packed = nested if nested.is_contiguous() else nested.contiguous()
        return Jagged.from_offsets(packed.values(), packed.offsets())  # type: ignore[attr-defined]

    def to_nested(self) -> torch.Tensor:
        """Return a view as a nested tensor [batch, jagged, ...] of layout ``torch.jagged``, with gradients."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    @property
    def offsets(self) -> torch.Tensor:
        """int64 [batch + 1]."""
        return torch.nn.functional.pad(self.lengths.to(torch.int64).cumsum(0), (1, 0))

    def to_padded(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output rows as [batch, length, dim], zero-padded or truncated, and a bool [batch, length] mask."""
        lengths = self.lengths.to(torch.int64)
        starts = self.offsets[:-1]
        at = torch.arange(length, device=lengths.device)
        mask = at < lengths.unsqueeze(1)
        index = torch.where(mask, starts.unsqueeze(1) + at, 0)
        if self.values.shape[0] == 0:
            return self.values.new_zeros((*index.shape, *self.values.shape[1:])), mask
        shape = (*mask.shape, *([1] * (self.values.dim() - 1)))
        return self.values[index].masked_fill(~mask.view(shape), 0), mask


@dataclass(frozen=True)
class RefusedInput:
    """In place of ids that a module refuses before its look-up: so that the look-up refuses them, on every rank.

    Attributes:
        error: what the look-up raises on this rank.
    """

    error: EmbeddingError


def as_jagged(given: object, name: str) -> Jagged:
    """Convert a ``Jagged``, a nested tensor of layout ``torch.jagged``, or a dense tensor [batch, ...] with equally
    many values per sample.

    Args:
        name: name of the feature, for error texts.

    Raises:
        EmbeddingError: ``given`` is of another type, or was refused before.
    """
    if isinstance(given, Jagged):
        return given
    if isinstance(given, RefusedInput):
        raise given.error
    if isinstance(given, torch.Tensor) and given.is_nested:
        return Jagged.from_nested(given)
    if isinstance(given, torch.Tensor) and given.layout == torch.strided and given.dim() > 0:
        each = torch.full((given.shape[0],), math.prod(given.shape[1:]), dtype=torch.int64, device=given.device)
        return Jagged.checked(given.reshape(-1), each)
    raise EmbeddingError(
        f"feature {name!r}: a {type(given).__name__} instead of a Jagged",
        remedy="pass Jagged(values, lengths), a nested tensor of layout torch.jagged, or a dense tensor [batch, ...]; "
        "flexd.Jagged.from_offsets(values, offsets) converts offsets",
    )
