"""A read-only table for serving: plain buffers, no other rank, taken by ``torch.export``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from flexd.core.errors import EmbeddingError

INT8_MAX = 127
POOLINGS = (None, "sum", "mean")


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [n, dim] numbers and float32 [n] scales; a row is about its numbers times its scale.

    Symmetric, a scale a row: scale = max|row| / 127, number = round(value / scale). A number differs from that of the
    row by at most scale / 2, that is max|row| / 254, beside the rounding of float32. A row of zeros is exact.

    Args:
        rows: [n, dim] finite numbers of any floating dtype.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=1) / INT8_MAX
    divisors = torch.where(scales > 0, scales, 1.0)
    numbers = (wide / divisors[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return numbers, scales


class ServingTable(nn.Module):
    """Rows of one table as buffers ``rows`` and, with int8 rows, ``scales``. ``torch.export`` takes it.

    Attributes:
        rows: [rows, dim] of the table's dtype, or int8.
        scales: float32 [rows] of int8 rows; else None.
        pooling: None (as ``nn.Embedding``), "sum" or "mean" (as ``nn.EmbeddingBag``).

    Raises:
        EmbeddingError: the pooling is unknown.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor | None = None, pooling: str | None = None) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise EmbeddingError(f"a serving table of pooling {pooling!r}", remedy="None, 'sum' or 'mean'")
        self.pooling = pooling
        self.register_buffer("rows", rows)
        self.register_buffer("scales", scales)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Look up rows, or pool bags of them.

        Args:
            ids: int64 or int32 of any shape; [n] where the table pools.
            offsets: int64 or int32 [bags], where each bag begins; only where the table pools.

        Returns:
            ids.shape + (dim,), or [bags, dim] where the table pools; float32 of int8 rows, else the table's dtype.

        Raises:
            EmbeddingError: offsets are given to a table that does not pool, or are missing.
        """
        if (offsets is None) != (self.pooling is None):
            raise EmbeddingError(
                f"a serving table of pooling {self.pooling} {'without' if offsets is None else 'with'} offsets",
                remedy="offsets of bags go with pooling='sum' or 'mean'",
            )
        if self.scales is None:
            found = functional.embedding(ids, self.rows)
        else:
            found = self.rows[ids].to(torch.float32) * self.scales[ids].unsqueeze(-1)
        if offsets is None or self.pooling is None:
            return found
        places = torch.arange(ids.shape[0], dtype=offsets.dtype, device=ids.device)
        return functional.embedding_bag(places, found, offsets, mode=self.pooling)

    def extra_repr(self) -> str:
        return f"{self.rows.shape[0]}, {self.rows.shape[1]}, dtype={self.rows.dtype}, pooling={self.pooling}"
