"""Sets of rows, a byte of zero or one for each, a block of ``BLOCK`` entries after another.

Single bits cannot be set by a kernel without a race. Sets travel as 64-bit words, a block in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexd.embedding.store.entry_pool import BLOCK

RowBits = torch.Tensor
"""uint8 [64 blocks] zeros and ones."""
_TO_TOP_BYTE = 0x0102040810204080
"""Times eight bytes of zero or one: the top byte of the product has the lowest bit of each."""


def none_set(entries: int, device: torch.device) -> RowBits:
    """Return the empty set of ``entries`` rows, a multiple of 64, with one more block for what is not listed."""
    return torch.zeros(entries + BLOCK, dtype=torch.uint8, device=device)


def mark(bits: RowBits, entries: torch.Tensor) -> None:
    """Add int64 [n] entries, repeats allowed."""
    bits.index_fill_(0, entries, 1)


def positions_of(bits: RowBits, first_block: int = 0, end_block: int | None = None) -> torch.Tensor:
    """Return int64 [n] the members within some blocks, ascending."""
    at = bits.view(-1, BLOCK)[first_block:end_block].reshape(-1).nonzero().view(-1)
    return at + first_block * BLOCK if first_block else at


def union_of(sets: Sequence[RowBits]) -> RowBits:
    return torch.stack(list(sets)).amax(dim=0)


def packed(bits: RowBits) -> torch.Tensor:
    """Return int64 [blocks] words."""
    top_bytes = (bits.view(torch.int64) * _TO_TOP_BYTE).view(torch.uint8)[7::8]
    return top_bytes.clone(memory_format=torch.contiguous_format).view(torch.int64)


def unpacked(words: torch.Tensor, weights: torch.Tensor) -> RowBits:
    """Return the set of int64 [blocks] words; the inverse of ``packed``. ``weights``: uint8 [8], 2 to the power of the
    place."""
    return (words.view(torch.uint8).unsqueeze(1) & weights).ne(0).view(torch.uint8).view(-1)
