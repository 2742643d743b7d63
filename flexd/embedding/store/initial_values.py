"""Initial row values as a function of (seed, table, row, column) alone.

So every sharding over any number of ranks starts from the same table, and no rank holds more than its share.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch

_BLOCK_ROWS = 1 << 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), finaliser."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def initial_rows(
    table: str, rows: npt.NDArray[np.int64], dim: int, dtype: torch.dtype, *, scale: float, seed: int
) -> torch.Tensor:
    """Return [n, dim] values of the given rows of a table, uniform in [-scale, scale)."""
    out = torch.empty((len(rows), dim), dtype=dtype)
    # Without mixing, the tables of two consecutive seeds would be the same rows shifted by one.
    salt = _splitmix64(np.array([zlib.crc32(table.encode()) << 32 | (seed & 0xFFFFFFFF)], dtype=np.uint64))
    columns = np.arange(dim, dtype=np.uint64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS].astype(np.uint64)
        bits = _splitmix64(_splitmix64(block + salt)[:, None] + columns[None, :])
        unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        out[start : start + len(block)] = torch.from_numpy((unit * 2 - 1) * scale).to(dtype)
    return out
