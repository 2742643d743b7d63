"""Rows with their optimizer state as bytes: how they travel between ranks and memories, and lie in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import RowColumn


def packed(*columns: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n, bytes] of [n, c] columns."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns if column.shape[1]], dim=1)


def unpacked(rows: torch.Tensor, columns: Sequence[RowColumn]) -> list[torch.Tensor]:
    """Return [n, c] of the width and dtype of each of ``columns``; inverse of ``packed``. Bytes behind them are
    ignored."""
    found, first = [], 0
    for column in columns:
        end = first + column.shape[1] * column.element_size()
        # A copy: part of a row may begin at an offset that is invalid for a wider dtype.
        part = rows[:, first:end].clone(memory_format=torch.contiguous_format)
        found.append(part.view(column.dtype) if end > first else part.to(column.dtype))
        first = end
    return found
