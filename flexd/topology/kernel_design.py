"""Which sets of tables a probe of kernels measures: spread over sizes, pooling, skew and fusing.

Any prefix of the sequence is spread over the whole range (the additive recurrence of Roberts, "The unreasonable
effectiveness of quasirandom sequences", 2018), so that a run that its budget ends has seen everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
from flexd.topology.kernel_file import DTYPE_BYTES, TableSet

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

DIMS = (4, 8, 16, 32, 64, 128, 256)
MAX_TABLES = 32
_SINGLE = 0.4
"""Share of the sets that have one table."""
_STATE_BYTES = 4
_GOLDEN = 2.0


@dataclass(frozen=True)
class KernelRange:
    """Range of the measured sets.

    Attributes:
        memory_bytes: of all rows of a set with their optimizer state.
        max_ids: look-ups of all tables of a set in one step.
        max_numbers: look-ups times dim, of all tables.
        max_bag: ids of a bag.
        max_skew: exponent of Zipf's law.
        dtypes: of the rows.

    Raises:
        ConfigError: a limit that no table meets.
    """

    memory_bytes: int = 2**28
    max_ids: int = 2**18
    max_numbers: int = 2**24
    max_bag: float = 64.0
    max_skew: float = 1.4
    dtypes: tuple[str, ...] = ("float32", "float16")

    def __post_init__(self) -> None:
        least = {"memory_bytes": 2**20, "max_ids": 2**10, "max_numbers": 2**14, "max_bag": 1.0, "max_skew": 0.0}
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise ConfigError(f"range of kernels: {name}={getattr(self, name)}", remedy=f"at least {value:g}")


ON_CUDA = KernelRange(memory_bytes=2**32, max_ids=2**22, max_numbers=2**28)
"""A GPU is as busy with these as a processor is with the default range."""


def designed_sets(limits: KernelRange, seed: int = 0) -> Iterator[TableSet]:
    """Yield sets of tables without end; ``distinct`` is 0 until they are drawn."""
    rng = np.random.default_rng(seed)
    steps, start = _steps(5), rng.random(5)
    for number in range(1, 1 << 62):
        point = (start + number * steps) % 1.0
        yield _set_at(point, limits, rng)


def _steps(dimensions: int) -> Float64Array:
    """float64[d]: the powers of 1/phi, phi the root of x^(d+1) = x + 1."""
    phi = _GOLDEN
    for _ in range(64):
        phi = (1.0 + phi) ** (1.0 / (dimensions + 1))
    powers: Float64Array = phi ** -np.arange(1.0, dimensions + 1)
    return powers


def _set_at(point: Float64Array, limits: KernelRange, rng: np.random.Generator) -> TableSet:
    """Make the set of a point of the unit cube: tables, bags, size, bag length and skew; a set varies around them."""
    tables = 1
    if point[0] > _SINGLE:
        tables = round(2 * (MAX_TABLES / 2) ** ((point[0] - _SINGLE) / (1 - _SINGLE)))
    dtype = limits.dtypes[int(rng.integers(len(limits.dtypes)))]
    dim = rng.choice(DIMS, tables).astype(np.float64)
    # Of the tables of a set each has its own size; the point says what a single one has.
    place, longer, steeper = (np.full(1, at) if tables == 1 else rng.random(tables) for at in point[2:])
    most = limits.memory_bytes / tables / (dim * DTYPE_BYTES[dtype] + _STATE_BYTES)
    rows = np.floor(50 * (np.maximum(most / 50, 1.0)) ** place)
    length, skew = limits.max_bag**longer, limits.max_skew * steeper
    bags = 2.0 ** (5 + 10 * point[1])
    # A set that is too large has fewer bags.
    bags *= min(1.0, limits.max_ids / (bags * length.sum()), limits.max_numbers / (bags * (length * dim).sum()))
    bags = max(np.floor(bags), 8.0)
    ids = np.maximum(np.round(bags * length), 1.0)
    return TableSet(dtype, rows, dim, ids, np.full(tables, bags), skew, np.zeros(tables))


def drawn_ids(tables: TableSet, rng: np.random.Generator) -> list[Int64Array]:
    """Draw the ids of one step: int64 [ids] of each table in 0..rows - 1, by Zipf's law, spread over the table.

    Ranks are drawn by the inverse of the continuous law (x^-s from 1 to rows + 1), which floors to Zipf's within the
    error of the midpoint rule.
    """
    drawn = []
    for rows, count, skew in zip(tables.rows, tables.ids, tables.skew, strict=True):
        uniform = rng.random(int(count))
        power = 1.0 - skew
        if abs(power) < 1e-6:
            rank = (rows + 1.0) ** uniform
        else:
            rank = (1.0 + uniform * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
        # Multiplied by a prime above every table, neighbours lie apart and no two rows meet.
        numbers = np.minimum(rank.astype(np.int64) - 1, int(rows) - 1)
        drawn.append((numbers * 2_654_435_761) % int(rows))
    return drawn
