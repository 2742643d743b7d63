"""RecShard's MILP: which rank a table belongs to, and how many of its hottest rows are in fast memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from flexd.planner.model.workload import ACCESSES
from tools.bench.peers.problem import PlanningProblem
from tools.bench.peers.recshard_greedy import place_and_split
from tools.bench.peers.whole_tables import make_shards

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_MAX_VARIABLES = 300_000


@dataclass(frozen=True)
class TwoMemories:
    """Memories of a rank.

    Attributes:
        fast_bytes_per_second: A100 40 GB data sheet, 1,555 GB/s.
        slow_bytes_per_second: PCIe 4.0 x16, one direction, 32 GB/s by its specification.
        host_bytes: host memory of each rank for rows.
    """

    fast_bytes_per_second: float = 1.555e12
    slow_bytes_per_second: float = 32e9
    host_bytes: float = 128e9

    def reading_seconds(self, read_bytes: Float64Array, fast_share: Float64Array) -> Float64Array:
        """Return the time to read these bytes, of which ``fast_share`` are in fast memory."""
        seconds: Float64Array = read_bytes * (
            fast_share / self.fast_bytes_per_second + (1 - fast_share) / self.slow_bytes_per_second
        )
        return seconds


@dataclass(frozen=True)
class SplitTables:
    """Tables over ranks, their rows over two memories.

    Attributes:
        rank: int64[tables].
        fast_rows: float64[tables], the hottest rows that are in fast memory.
        fast_share: float64[tables], share of the accesses that these have.
        gap: to the solver's bound.
    """

    rank: Int64Array
    fast_rows: Float64Array
    fast_share: Float64Array
    gap: float


@dataclass(frozen=True)
class RecShard:
    """Sethi et al., ASPLOS 2022, arXiv 2201.10095, the section on the MILP formulation.

    A table is placed on one rank; of its rows the hottest are in fast memory (HBM), the others in host memory (UVM).
    The split is one of ``steps`` points of the inverse of the cumulative distribution of its accesses.
    Minimised is the slowest rank's time to read its rows: accesses x row bytes over the bandwidth of the memory.

    Attributes:
        steps: points of the inverse CDF, both ends included (the paper: 100).
        solver_stride: the solver gets every so many of them.
        time_limit_seconds: of the solver; its best solution by then is used, or a better one of ``place_and_split``.
            The gap is to the solver's bound, which is of its own, coarser splits.
    """

    steps: int = 101
    solver_stride: int = 10
    memories: TwoMemories = field(default_factory=TwoMemories)
    time_limit_seconds: float = 10.0

    def place(self, case: PlanningProblem) -> SplitTables | None:
        """Return where tables and their rows are; None if none was found within the time that fits."""
        shards, world = make_shards(case), case.layout.world_size
        shares, fast_rows = self._splits(case)
        row = (shards.bytes / shards.rows)[:, None]
        seconds = self.memories.reading_seconds(shards.read_bytes(world)[:, None], shares)
        slow = (shards.rows[:, None] - fast_rows) * row
        solved = self._best(seconds, fast_rows * row, slow, world, case.memory_bytes)
        if solved is None:
            return None
        rank, split, gap = solved
        each = np.arange(len(rank))
        return SplitTables(rank, fast_rows[each, split], shares[each, split], gap)

    def _splits(self, case: PlanningProblem) -> tuple[Float64Array, Float64Array]:
        """float64[tables, steps]: (share of the accesses, rows) in fast memory at each point of the inverse CDF."""
        wanted = np.linspace(0.0, 1.0, self.steps)
        rows = np.zeros((len(case.table_sums), self.steps))
        for i, group in enumerate(case.table_sums):
            load = group.load
            accesses = np.concatenate([load.accesses, load.bin_accesses])
            number = np.concatenate([np.ones(len(load.keys)), load.bin_rows])
            order = np.argsort(-accesses, kind="stable")
            total = group.total()[ACCESSES]
            if total > 0:
                reached = np.concatenate([[0.0], np.cumsum(accesses[order] * number[order]) / total])
                counted = np.concatenate([[0.0], np.cumsum(number[order])])
                rows[i] = np.interp(wanted, reached, counted)
            rows[i, -1] = case.keyspace.tables[i].rows
        return np.broadcast_to(wanted, rows.shape), rows

    def _best(
        self, seconds: Float64Array, fast: Float64Array, slow: Float64Array, world: int, fast_bytes: float
    ) -> tuple[Int64Array, Int64Array, float] | None:
        """(rank of each table, its split, relative gap): the better of the solver's and of ``place_and_split``."""
        few = slice(None, None, self.solver_stride)
        solved, bound = self._solve(seconds[:, few], fast[:, few], slow[:, few], world, fast_bytes)
        if solved is not None:
            solved = solved[0], solved[1] * self.solver_stride
        found = place_and_split(seconds, fast, slow, world, fast_bytes, self.memories.host_bytes)
        each = np.arange(len(seconds))
        best: tuple[float, Int64Array, Int64Array] | None = None
        for rank, split in (placed for placed in (solved, found) if placed is not None):
            slowest = float(np.bincount(rank, weights=seconds[each, split], minlength=world).max())
            if best is None or slowest < best[0]:
                best = (slowest, rank, split)
        return best and (best[1], best[2], max(0.0, 1 - bound / best[0]) if best[0] > 0 else 0.0)

    def _solve(
        self, seconds: Float64Array, fast: Float64Array, slow: Float64Array, world: int, fast_bytes: float
    ) -> tuple[tuple[Int64Array, Int64Array] | None, float]:
        """((rank of each table, its split), lower bound of the slowest rank's seconds). Variables: x[table, rank,
        split] binary, and the makespan."""
        tables, steps = seconds.shape
        variables = tables * world * steps
        if variables > _MAX_VARIABLES:
            return None, 0.0
        scale = 1.0 / max(float(seconds.sum()), 1e-300)
        table, rank, _ = (index.ravel() for index in np.indices((tables, world, steps)))
        column = np.arange(variables)

        def of_ranks(values: Float64Array) -> csr_matrix:
            each = np.broadcast_to(values[:, None, :], (tables, world, steps)).ravel()
            return csr_matrix((each, (rank, column)), shape=(world, variables + 1))

        busy = of_ranks(seconds * scale).tolil()
        busy[:, variables] = -1.0
        once = csr_matrix((np.ones(variables), (table, column)), shape=(tables, variables + 1))
        result = milp(
            np.concatenate([np.zeros(variables), [1.0]]),
            constraints=[
                LinearConstraint(once, 1.0, 1.0),
                LinearConstraint(busy.tocsr(), ub=0.0),
                LinearConstraint(of_ranks(fast / fast_bytes), ub=1.0),
                LinearConstraint(of_ranks(slow / self.memories.host_bytes), ub=1.0),
            ],
            integrality=np.concatenate([np.ones(variables), [0.0]]),
            bounds=Bounds(0.0, np.concatenate([np.ones(variables), [np.inf]])),
            options={"time_limit": self.time_limit_seconds, "mip_rel_gap": 1e-3},
        )
        bound = float(result.mip_dual_bound or 0.0) / scale
        if result.x is None:
            return None, bound
        chosen = result.x[:variables].reshape(tables, world * steps).argmax(axis=1)
        return ((chosen // steps).astype(np.int64), (chosen % steps).astype(np.int64)), bound


RECSHARD = RecShard()
