"""Initial row values as a function of (seed, table, row, column) alone.

So every sharding over any number of ranks starts from the same table, and no rank holds more than its share. They are
computed on the device of the rows, with integers and float64, so that every device computes the same.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding import devices

_BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR = 1 << 16, 1 << 22
"""Numbers that are drawn at once: as many as the caches of a processor hold, or enough to occupy an accelerator."""


def _signed(bits: int) -> int:
    """Return the int64 of these 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), finaliser. In place."""
    x.add_(_GOLDEN)
    shifted = torch.empty_like(x)
    for shift, factor in _ROUNDS:
        # torch shifts in copies of the sign bit.
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            x.mul_(factor)
    return x


def fill_initial_rows(out: torch.Tensor, table: str, rows: range | torch.Tensor, *, scale: float, seed: int) -> None:
    """Fill [n, dim] ``out`` with the initial values of the given rows of a table, uniform in [-scale, scale).

    Args:
        rows: n rows; a tensor is int64 and on the device of ``out``.
    """
    # Without mixing, the tables of two consecutive seeds would be the same rows shifted by one.
    salt = int(_splitmix64(torch.tensor([_signed(zlib.crc32(table.encode()) << 32 | (seed & 0xFFFFFFFF))])))
    dim, device = out.shape[1], out.device
    step = devices.block_rows(out, _BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR)
    columns = torch.arange(dim, device=device)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if isinstance(part, range):
            part = torch.arange(part.start, part.stop, part.step, device=device)
        bits = _splitmix64(_splitmix64(part + salt).unsqueeze(1) + columns)
        bits.bitwise_right_shift_(11).bitwise_and_(2**53 - 1)
        out[start : start + len(part)] = bits.to(torch.float64).mul_(2.0**-52).sub_(1.0).mul_(scale)


def initial_rows(
    table: str, rows: npt.NDArray[np.int64], dim: int, dtype: torch.dtype, *, scale: float, seed: int
) -> torch.Tensor:
    """Return [n, dim] values of the given rows of a table, in host memory."""
    out = torch.empty((len(rows), dim), dtype=dtype)
    fill_initial_rows(out, table, torch.from_numpy(rows), scale=scale, seed=seed)
    return out
