"""The hash functions of ``flexd.sketch.counters.hashing`` in torch, bit by bit: cells here are added to cells there.

Those are MurmurHash3_x64_128 (Appleby, public domain) of the 8 bytes of an id, as in Apache DataSketches. int64 sums
and products wrap as unsigned ones do; shifts to the right and comparisons need care.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexd.core.counted_accesses import LOG2_REGISTERS

SEED = 9001
"""DEFAULT_SEED of DataSketches."""
SPREAD = (4480857443237077987, 6631161516192690341, 11350819014790085518, 4160660749069242171)
"""What it adds to the seed for each row of cells."""
_MOST_ZEROS = 62


class Hashed(NamedTuple):
    """Of n ids: ``cells`` int64[4, n] places in 4 x 2^k cells, row by row; ``registers`` int64[n] places in the
    HyperLogLog registers and ``ranks`` int64[n] what each must at least hold."""

    cells: torch.Tensor
    registers: torch.Tensor
    ranks: torch.Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as int64 has it."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch's copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _finalised(x: torch.Tensor) -> torch.Tensor:
    """In place."""
    x.bitwise_xor_(_shifted(x, 33)).mul_(_signed(0xFF51AFD7ED558CCD))
    x.bitwise_xor_(_shifted(x, 33)).mul_(_signed(0xC4CEB9FE1A85EC53))
    return x.bitwise_xor_(_shifted(x, 33))


def _halves(mixed: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two finalised halves whose sum is the first half of the hash (8 is the length of the key)."""
    state = _signed(seed ^ 8)
    first = (mixed ^ state).add_(state)
    second = first + state
    return _finalised(first), _finalised(second)


def _bit_length(x: torch.Tensor) -> torch.Tensor:
    """Of 64-bit patterns; both halves of 32 bits are exact as float64, whose exponent tells."""
    high, low = _shifted(x, 32), x & 0xFFFFFFFF
    upper = torch.frexp(high.to(torch.float64)).exponent
    lower = torch.frexp(low.to(torch.float64)).exponent
    return torch.where(high > 0, upper + 32, lower).to(torch.int64)


def hashed(ids: torch.Tensor, log2_width: int) -> Hashed:
    """int64[n] ids, from 0 up."""
    mixed = ids * _signed(0x87C37B91114253D5)
    mixed = (mixed << 31).bitwise_or_(_shifted(mixed, 33)).mul_(0x4CF5AD432745937F)
    width = 1 << log2_width
    cells = torch.empty((len(SPREAD), ids.shape[0]), dtype=torch.int64, device=ids.device)
    for row, spread in enumerate(SPREAD):
        first, second = _halves(mixed, SEED + spread)
        torch.add(first, second, out=cells[row]).bitwise_and_(width - 1).add_(row * width)
    first, second = _halves(mixed, SEED)
    first += second
    second += first
    zeros = 64 - _bit_length(second)
    return Hashed(cells, first & ((1 << LOG2_REGISTERS) - 1), zeros.clamp_(max=_MOST_ZEROS) + 1)
