"""A fingerprint of a table that does not depend on which rank holds which row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK_ROWS = 1 << 13
# Odd 64-bit constants as int64, from SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
# OOPSLA 2014) and the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(first_row: int, columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int64 []: the sum modulo 2^64, over rows, of a hash of the row's number and its bits in all ``columns``.

    Args:
        first_row: number of the first row in the table; the sums of the parts of a table add up to that of the table.
        columns: [n, c] each.
    """
    device = columns[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(columns[0]), _BLOCK_ROWS):
        parts = [column[start : start + _BLOCK_ROWS] for column in columns]
        count = len(parts[0])
        mixed = torch.arange(first_row + start + 1, first_row + start + 1 + count, device=device) * _GOLDEN
        for part in parts:
            mixed = _mix(mixed + _row_bits(part))
        total += mixed.sum()
    return total


def _row_bits(part: torch.Tensor) -> torch.Tensor:
    """Return int64 [n] of [n, c]: the sum of each number's bits times a constant of its column, modulo 2^64."""
    width = part.shape[1]
    if width == 0:
        return torch.zeros(len(part), dtype=torch.int64, device=part.device)
    factors = _mix(torch.arange(1, width + 1, device=part.device) * _GOLDEN) | 1
    bits = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
    return bits.mul(factors).sum(dim=1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of SplitMix64 with arithmetic shifts, which is also a bijection of 64 bits that mixes."""
    x = (x ^ (x >> 30)) * _MIX[0]
    x = (x ^ (x >> 27)) * _MIX[1]
    return x ^ (x >> 31)
