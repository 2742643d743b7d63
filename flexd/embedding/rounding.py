"""Stochastic rounding of float32 numbers to half precision, repeatable on every holder of a row.

A number between two neighbours a < b of the narrow dtype becomes b with probability (x - a) / (b - a), so that updates
below half a unit in the last place are kept on average (Gupta et al., Deep Learning with Limited Numerical Precision,
arXiv 1502.02551). The random bits are a hash of (key of the row, number of the step, column): no generator has a state,
and neither the place of a row nor the rows beside it matter.
"""

from __future__ import annotations

import torch

_SMALLEST_NORMAL, _LARGEST = 2.0**-14, 65504.0
"""Of float16."""


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, keys: torch.Tensor, step: int) -> torch.Tensor:
    """Round float32 [n, dim] to bfloat16 or float16. Exact numbers stay, infinities and NaN too.

    Args:
        keys: int64 [n], the same on every rank that holds the row.
        step: of the job; another step has other random bits.
    """
    random = random_bits(keys, step, values.shape[1])
    bits = values.contiguous().view(torch.int32)
    if dtype == torch.bfloat16:
        # bfloat16 is the upper half of float32; a carry out of the lower half rounds up.
        rounded = (random.add_(bits) >> 16).to(torch.int16).view(torch.bfloat16)
        return rounded.masked_fill_(values != values, torch.nan)  # a carry may leave the range of NaN
    size = values.abs()
    fixed = (values * 2.0**24).add_(random * 2.0**-16).floor_().mul_(2.0**-24)
    normal = (random.bitwise_and_(0x1FFF).add_(bits) & ~0x1FFF).view(torch.float32)
    rounded = torch.where(size < _SMALLEST_NORMAL, fixed, normal).to(dtype)
    return torch.where(size < _LARGEST, rounded, values.to(dtype))


def random_bits(keys: torch.Tensor, step: int, columns: int) -> torch.Tensor:
    """Return int32 [n, columns] of 16 random bits: a hash of int64 [n] keys, the step and the column."""
    seeds = _splitmix64(keys + _signed(step * 0x9E3779B97F4A7C15, 64)).view(torch.int32).view(-1, 2)
    # One hash of 32 bits serves two columns.
    pairs = torch.arange(-(-columns // 2), dtype=torch.int32, device=keys.device).mul_(_signed(0x9E3779B9, 32))
    mixed = seeds[:, :1] + pairs
    # Rounds of multiplication and shift (Wellons, hash-prospector), with the second word of the seed between them.
    mixed.bitwise_xor_(_shifted(mixed, 16)).mul_(0x21F0AAAD)
    mixed.bitwise_xor_(_shifted(mixed, 15)).add_(seeds[:, 1:]).mul_(_signed(0xD35A2D97, 32))
    mixed.bitwise_xor_(_shifted(mixed, 15))
    return mixed.view(torch.int16)[:, :columns].to(torch.int32).bitwise_and_(0xFFFF)


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    """Mix int64 numbers (Steele et al., Fast splittable pseudorandom number generators, 2014)."""
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB, 64)
    return state ^ _shifted(state, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right, with zeros instead of copies of the sign."""
    return (words >> by).bitwise_and_((1 << (8 * words.element_size() - by)) - 1)


def _signed(number: int, bits: int) -> int:
    """Return the number that has the same lowest bits in two's complement."""
    number %= 1 << bits
    return number - (1 << bits) if number >= 1 << (bits - 1) else number
