"""Sets of listed rows as bits, a block of ``BLOCK`` entries after another.

On the host a block is a 64-bit word, so that what is done with all of them is done 64 at a time. On an accelerator,
which cannot set single bits without a race, an entry is a byte, zero or one. The dtype says which a tensor is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from flexd.embedding import devices
from flexd.embedding.store.entry_pool import BLOCK

RowBits = torch.Tensor
"""int64 [blocks] words, or uint8 [64 blocks] zeros and ones."""


def none_set(entries: int, device: torch.device) -> RowBits:
    """Return the empty set of ``entries`` rows, a multiple of 64, with one more block for what is not listed."""
    if devices.in_host_memory(torch.empty(0, device=device)):
        return torch.zeros(entries // BLOCK + 1, dtype=torch.int64, device=device)
    return torch.zeros(entries + BLOCK, dtype=torch.uint8, device=device)


def mark(bits: RowBits, entries: torch.Tensor) -> None:
    """Add int64 [n] entries, repeats allowed."""
    if bits.dtype == torch.uint8:
        bits.index_fill_(0, entries, 1)
        return
    at = entries.numpy()
    # By bytes: a byte's number and its bit are of types that numpy shifts and scatters fastest.
    np.bitwise_or.at(bits.numpy().view(np.uint8), at >> 3, np.left_shift(1, at & 7).astype(np.uint8))


def blocks_of(bits: RowBits) -> torch.Tensor:
    """Return a view that has a block in each row."""
    return bits if bits.dtype == torch.int64 else bits.view(-1, BLOCK)


def positions_of(bits: RowBits, first_block: int = 0, end_block: int | None = None) -> torch.Tensor:
    """Return int64 [n] the members within some blocks, ascending."""
    part = blocks_of(bits)[first_block:end_block]
    if part.dtype == torch.uint8:
        at = part.reshape(-1).nonzero().view(-1)
        return at + first_block * BLOCK if first_block else at
    words = part.numpy()
    some = np.flatnonzero(words)
    of_some = np.flatnonzero(np.unpackbits(words[some].view(np.uint8), bitorder="little").view(np.bool_))
    return torch.from_numpy((some[of_some >> 6] + first_block) * BLOCK + (of_some & 63))


def union_of(sets: Sequence[RowBits]) -> RowBits:
    if sets[0].dtype == torch.uint8:
        return torch.stack(list(sets)).amax(dim=0)
    return reduce(torch.bitwise_or, sets)


def all_others(bits: RowBits) -> RowBits:
    return ~bits if bits.dtype == torch.int64 else 1 - bits


def packed(bits: RowBits, weights: torch.Tensor) -> torch.Tensor:
    """Return int64 [blocks] words. ``weights``: uint8 [8], 2 to the power of the place."""
    if bits.dtype == torch.int64:
        return bits
    return (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8).view(torch.int64)


def unpacked(words: torch.Tensor, weights: torch.Tensor) -> RowBits:
    """Return the set of int64 [blocks] words; the inverse of ``packed``."""
    if devices.in_host_memory(words):
        return words
    return (words.view(torch.uint8).unsqueeze(1) & weights).ne(0).view(torch.uint8).view(-1)
