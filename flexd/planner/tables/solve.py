"""Decide sharding type and pooling place of every table: relaxation, rounding, local search, and what the result may
miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout
from flexd.planner.solver.relaxation import missed_share
from flexd.planner.tables.local_search import LocalSearch
from flexd.planner.tables.options import PoolingAt, ShardingKind, TableOptions
from flexd.planner.tables.rank_loads import RankLoads, ShardAssignment
from flexd.planner.tables.relaxation import Relaxation, relax
from flexd.planner.tables.rounding import pieces_of, round_shares

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_ROUNDINGS = 4
EVALUATIONS = 6000
"""Of the local search around the rounded relaxation."""


@dataclass(frozen=True)
class TablePlacement:
    """A sharding type and a pooling place for every table.

    Attributes:
        pieces: of all tables, in their order.
        seconds: of a step, of the busiest rank phase by phase, with fixed seconds.
        bound_seconds: no placement takes less.
        spread_seconds: of the first option for every table.
        loads: float64[K, W], by axis.
        memory_bytes: float64[W].
    """

    tables: TableOptions
    layout: RankLayout
    pieces: ShardAssignment
    seconds: float
    bound_seconds: float
    spread_seconds: float
    loads: Float64Array
    memory_bytes: Float64Array

    @property
    def gap(self) -> float:
        """Largest share of the largest possible saving, against the first option for all, that this misses: 0 to 1."""
        return missed_share(self.seconds, self.spread_seconds, self.bound_seconds)

    @property
    def balance(self) -> float:
        """Least over most, of the ranks' seconds of all phases together (AutoShard's measure): 0 to 1."""
        of_rank = self.tables.axis_seconds @ self.loads
        return float(of_rank.min() / of_rank.max()) if of_rank.max() > 0 else 1.0

    def rules(self) -> list[tuple[str, PoolingAt]]:
        """Return (sharding type, pooling place) of each table: "row_wise", "table_row_wise:3", "table_wise:12",
        "column_wise:4,12", "data_parallel"."""
        result = []
        starts = np.searchsorted(self.pieces.table, np.arange(len(self.tables.names) + 1))
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            option = self.tables.options[int(self.pieces.option[first])]
            places = ",".join(str(place) for place in self.pieces.place[first:end].tolist())
            placed = option.rule not in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL)
            result.append((f"{option.rule}:{places}" if placed else str(option.rule), option.pooling_at))
        return result


def place_tables(
    tables: TableOptions,
    layout: RankLayout,
    memory_bytes: float,
    evaluations: int = EVALUATIONS,
) -> TablePlacement:
    """Return the placement of the shortest step that was found; deterministic.

    Candidates are the rounded relaxation with all pooling places and with the requester alone, improved by moves of
    single tables, and the first option for every table.

    Args:
        memory_bytes: of a rank, for the rows and optimizer state of these tables.
        evaluations: of single moves in each local search.

    Raises:
        PlanError: no placement within the memory was found.
    """
    if not (np.isfinite(memory_bytes) and memory_bytes > 0):
        raise PlanError(f"memory of a rank: {memory_bytes!r}", remedy="give bytes above 0")
    return _Solver(tables, layout, np.full(layout.world_size, float(memory_bytes)), evaluations).solve()


@dataclass
class _Solver:
    tables: TableOptions
    layout: RankLayout
    capacity: Float64Array
    evaluations: int

    def solve(self) -> TablePlacement:
        count = len(self.tables.names)
        spread = pieces_of(self.tables, np.zeros(count, np.int64))
        candidates = [spread]
        even = self._even()
        if even.any():
            even_pieces = pieces_of(self.tables, even)
            candidates += [even_pieces, self._search(even_pieces, self.tables, self.evaluations // _ROUNDINGS)]
        priced = [self.seconds(pieces) for pieces in candidates]
        relaxed = [(relax(t, self.layout, self.capacity), t, fixed) for t, fixed in self._restricted()]
        relaxed.sort(key=lambda one: one[0].bound_seconds + one[2])
        # Where the first option has several places, tables that have it must be placed still.
        placed = self.tables.options[0].places(self.layout) > 1
        for number, (found, tables, fixed) in enumerate(relaxed):
            if found.bound_seconds + fixed >= min(priced):
                break
            if found.shares.any() and (placed or (found.shares[:, 0] < 1 - 1e-9).any()):
                candidates.append(self._rounded(tables, found) if number == 0 else self._rounded_once(tables, found))
                priced.append(self.seconds(candidates[-1]))
        best = int(np.argmin(priced))
        if not np.isfinite(priced[best]):
            raise PlanError(
                f"{count} tables of {self._least_memory() / 1e9:.1f} GB find no place within the memory of "
                f"{self.layout.world_size} ranks, {float(self.capacity.sum()) / 1e9:.1f} GB",
                remedy="give more memory or more ranks, or allow tables to be spread over all ranks",
            )
        loads = RankLoads.of(self.tables, self.layout, self.capacity, candidates[best]).total
        flat = loads.reshape(len(loads), -1)
        return TablePlacement(
            self.tables,
            self.layout,
            candidates[best],
            priced[best],
            min(relaxed[0][0].bound_seconds + relaxed[0][2], priced[best]),
            self.seconds(spread, check_memory=False),
            flat[:-1],
            flat[-1],
        )

    def _even(self) -> Int64Array:
        """int64[T]: of the options that load all ranks alike the one of least time."""
        tables = self.tables
        alike = np.array([option.rule is ShardingKind.ROW_WISE for option in tables.options])
        alike[0] = True
        seconds = tables.mean(tables.loads, self.layout) @ tables.axis_seconds
        return np.asarray(np.where(tables.allowed & alike, seconds, np.inf).argmin(axis=1), dtype=np.int64)

    def _rounded(self, tables: TableOptions, relaxed: Relaxation) -> ShardAssignment:
        """Round towards targets that move to what was reached: where no placement reaches the relaxation's, the axes
        that can still be lowered must decide."""
        rounded: list[tuple[float, int, ShardAssignment]] = []
        near = relaxed
        for number in range(_ROUNDINGS):
            placed = round_shares(tables, self.layout, self.capacity, near)
            found = self._search(placed, tables, self.evaluations // _ROUNDINGS)
            rounded.append((self.seconds(found), number, found))
            most = RankLoads.of(tables, self.layout, self.capacity, placed).axis_targets()
            near = replace(near, target=0.5 * (near.target + np.maximum(most, relaxed.target)))
        return self._search(min(rounded)[2], tables, self.evaluations)

    def _rounded_once(self, tables: TableOptions, relaxed: Relaxation) -> ShardAssignment:
        placed = round_shares(tables, self.layout, self.capacity, relaxed)
        return self._search(placed, tables, self.evaluations // _ROUNDINGS)

    def seconds(self, pieces: ShardAssignment, *, check_memory: bool = True) -> float:
        """Return the seconds of a step, inf if memory does not suffice."""
        loads = RankLoads.of(self.tables, self.layout, self.capacity, pieces)
        if check_memory and loads.over_memory() > 1e-9 * float(self.capacity.sum()):
            return float("inf")
        used = {self.tables.options[option].pooling_at for option in np.unique(pieces.option)}
        fixed = sum(seconds for pooling_at, seconds in self.tables.pooling_seconds if pooling_at in used)
        return loads.seconds() + fixed

    def _restricted(self) -> Sequence[tuple[TableOptions, float]]:
        """(tables without some of the pooling places that cost fixed seconds, fixed seconds of the others)."""
        fixed = {pooling_at: seconds for pooling_at, seconds in self.tables.pooling_seconds if seconds > 0}
        result = []
        for count in range(len(fixed) + 1):
            for left_out in combinations(fixed, count):
                kept = np.array([option.pooling_at not in left_out for option in self.tables.options])
                allowed = self.tables.allowed & kept
                if allowed[:, 0].all():
                    rest = sum(seconds for pooling_at, seconds in fixed.items() if pooling_at not in left_out)
                    result.append((replace(self.tables, allowed=allowed), rest))
        return result

    def _search(self, pieces: ShardAssignment, tables: TableOptions, evaluations: int) -> ShardAssignment:
        return LocalSearch(tables, self.layout, self.capacity, pieces, evaluations).run()

    def _least_memory(self) -> float:
        memory = self.tables.mean(self.tables.memory_bytes, self.layout) * self.layout.world_size
        return float(np.where(self.tables.allowed, memory, np.inf).min(axis=1).sum())


def step_seconds(tables: TableOptions, layout: RankLayout, pieces: ShardAssignment) -> float:
    """Return the seconds of a step under a placement, whatever memory it needs: what ``place_tables`` minimises."""
    capacity = np.full(layout.world_size, np.inf)
    return _Solver(tables, layout, capacity, 0).seconds(pieces, check_memory=False)
