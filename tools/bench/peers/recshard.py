"""RecShard's split (Sethi et al., ASPLOS 2022, arXiv 2201.10095, the section on the MILP formulation).

A table is placed on one rank; of its rows the hottest are in fast memory (HBM), the others in host memory (UVM). The
split is one of ``STEPS`` points of the inverse of the cumulative distribution of its accesses. Minimised is the slowest
rank's time to read its rows: accesses x row bytes over the bandwidth of the memory. The paper solves its MILP with
Gurobi; HiGHS finds no good placement of hundreds of tables in seconds, so prices of a byte of fast memory are tried,
with tables in descending cost, and tables move from the slowest rank while that makes it faster.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tools.bench.peers.recshard_tables import LAYOUT, Tables

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

STEPS = 101
"""Points of the inverse CDF, both ends included (the paper: 100)."""
FAST_BYTES_PER_SECOND, SLOW_BYTES_PER_SECOND = 1.555e12, 32e9
"""A100 40 GB data sheet; PCIe 4.0 x16 in one direction, by its specification."""
HOST_BYTES = 128e9
"""Host memory of each rank for rows."""
_PRICES = 24
_MOVES, _CANDIDATES = 60, 12


def split_tables(tables: Tables, fast_bytes: float) -> tuple[Int64Array, Float64Array]:
    """Return int64[tables] rank of each table, and float64[tables], its hottest rows that are in fast memory.

    Args:
        fast_bytes: of each rank.

    Raises:
        AssertionError: host memory does not hold the other rows.
    """
    shares = np.linspace(0.0, 1.0, STEPS)
    reached = (np.concatenate([[0.0], cumulative]) for cumulative in tables.cumulative)
    fast_rows = np.array([np.interp(shares, of_table, np.arange(len(of_table))) for of_table in reached])
    number = np.diff(tables.first).astype(np.float64)[:, None]
    read = (tables.accesses * tables.row_bytes)[:, None]
    seconds = read * (shares / FAST_BYTES_PER_SECOND + (1 - shares) / SLOW_BYTES_PER_SECOND)
    row = tables.stored_bytes[:, None]
    world = LAYOUT.world_size
    rank, split = place_and_split(seconds, fast_rows * row, world, fast_bytes)
    each = np.arange(len(rank))
    slow = ((number - fast_rows) * row)[each, split]
    assert np.bincount(rank, weights=slow, minlength=world).max() <= HOST_BYTES
    return rank, fast_rows[each, split]


def place_and_split(
    seconds: Float64Array, fast: Float64Array, world: int, fast_bytes: float
) -> tuple[Int64Array, Int64Array]:
    """Return (int64[tables] rank, int64[tables] split) of a short slowest rank.

    Args:
        seconds, fast: float64[tables, splits], time to read a table, and its bytes in fast memory.
    """
    each = np.arange(len(seconds))
    tried: list[tuple[float, Int64Array, list[dict[int, int]]]] = []
    scale = float(seconds.max()) / max(float(fast.max()), 1.0)
    for price in (0.0, *np.geomspace(1e-6 * scale, 1e3 * scale, _PRICES)):
        own = seconds[each, (seconds + price * fast).argmin(axis=1)]
        rank, load = np.empty(len(each), np.int64), np.zeros(world)
        for table in np.argsort(-own, kind="stable"):
            rank[table] = int(load.argmin())
            load[rank[table]] += own[table]
        splits = [_split_rank(seconds, fast, np.flatnonzero(rank == r), fast_bytes) for r in range(world)]
        tried.append((max(_sum(seconds, mine) for mine in splits), rank, splits))
    _, rank, splits = min(tried, key=lambda each: each[0])
    _improve(seconds, fast, rank, splits, fast_bytes)
    return rank, np.array([splits[r][table] for table, r in enumerate(rank.tolist())])


def _sum(values: Float64Array, splits: dict[int, int]) -> float:
    return float(sum(values[table, split] for table, split in splits.items()))


def _split_rank(seconds: Float64Array, fast: Float64Array, tables: Int64Array, fast_bytes: float) -> dict[int, int]:
    """Return the split of each of a rank's tables: steps by time saved per byte (each CDF is concave), while they
    fit."""
    split = dict.fromkeys(tables.tolist(), 0)
    if not len(tables):
        return split
    saved = -np.diff(seconds[tables], axis=1)
    taken = np.diff(fast[tables], axis=1)
    worth = np.where(taken > 0, saved / np.maximum(taken, 1e-300), np.inf)
    # A step is never worth more than the one before it.
    worth = np.minimum.accumulate(worth, axis=1)
    used = float(fast[tables, 0].sum())
    stopped: set[int] = set()
    steps = worth.shape[1]
    for at in np.argsort(-worth.ravel(), kind="stable").tolist():
        index, step = divmod(at, steps)
        table = int(tables[index])
        if table in stopped:
            continue
        if used + taken[index, step] > fast_bytes:
            stopped.add(table)
            continue
        used += float(taken[index, step])
        split[table] = step + 1
    return split


def _improve(
    seconds: Float64Array, fast: Float64Array, rank: Int64Array, splits: list[dict[int, int]], fast_bytes: float
) -> None:
    """Move tables from the slowest rank to the fastest, in place, while that makes the slowest faster."""
    load = np.array([_sum(seconds, mine) for mine in splits])
    for _ in range(_MOVES):
        slowest, fastest = int(load.argmax()), int(load.argmin())
        best: tuple[float, int, dict[int, int], dict[int, int]] | None = None
        for table in sorted(splits[slowest], key=lambda t: -seconds[t, splits[slowest][t]])[:_CANDIDATES]:
            rest = np.array([t for t in splits[slowest] if t != table], dtype=np.int64)
            without = _split_rank(seconds, fast, rest, fast_bytes)
            beside = _split_rank(seconds, fast, np.array([*splits[fastest], table]), fast_bytes)
            slower = max(_sum(seconds, without), _sum(seconds, beside))
            if slower < load[slowest] * (1 - 1e-9) and (best is None or slower < best[0]):
                best = (slower, table, without, beside)
        if best is None:
            return
        _, moved, splits[slowest], splits[fastest] = best
        rank[moved] = fastest
        load[slowest], load[fastest] = _sum(seconds, splits[slowest]), _sum(seconds, splits[fastest])
