"""The hash functions of ``flexd.sketch.countmin`` in torch, bit by bit: cells counted here are added to cells there."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Hashed(NamedTuple):
    """Of n ids: ``cells`` int64[4, n] places in 4 x 2^k cells, row by row; ``registers`` int64[n] places in the
    HyperLogLog registers and ``ranks`` int64[n] what each must at least hold."""

    cells: torch.Tensor
    registers: torch.Tensor
    ranks: torch.Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64 has it; products and sums wrap alike."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch's copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hashed(ids: torch.Tensor, log2_width: int) -> Hashed:
    """int64[n] ids, from 0 up."""
    x = ids + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 33)) * _signed(0xFF51AFD7ED558CCD)
    x = (x ^ _shifted(x, 33)) * _signed(0xC4CEB9FE1A85EC53)
    h = x ^ _shifted(x, 33)
    g = h * _signed(0xD6E8FEB86659FD93)
    g = g ^ _shifted(g, 32)
    width = 1 << log2_width
    mask = width - 1
    cells = torch.stack([
        h & mask,
        width + (_shifted(h, 32) & mask),
        2 * width + (g & mask),
        3 * width + (_shifted(g, 32) & mask),
    ])  # fmt: skip
    mixed = _shifted(h, 7) ^ (g << 11)
    # 1 + trailing zeros, 52 at most; the lowest set bit is a power of two, which a float64 holds exactly.
    lowest = ((mixed | 1 << 51) & -(mixed | 1 << 51)).to(torch.float64)
    ranks = torch.frexp(lowest).exponent.to(torch.int64)
    return Hashed(cells, _shifted(h, 52), ranks)
