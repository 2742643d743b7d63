"""Whole tables on ranks, greedily: in descending cost, each to the rank with the least cost so far that has the memory.

The costs are those of AutoShard's heuristic baselines (Zha et al., KDD 2022, arXiv 2208.06399, "Baselines" of the
experiments, and the released ``autoshard`` sharders).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.planner.model.workload import ACCESSES
from tools.bench.peers.problem import PlanningProblem

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableShards:
    """Tables that are placed as a whole.

    Attributes:
        bytes: float64[p], rows and optimizer state.
        row_bytes: float64[p], of one row on the wire.
        accesses: float64[p], of one rank in one step.
        dim: float64[p].
        rows: float64[p].
    """

    bytes: Float64Array
    row_bytes: Float64Array
    accesses: Float64Array
    dim: Float64Array
    rows: Float64Array

    def read_bytes(self, world: int) -> Float64Array:
        """Return float64[p], bytes read in one step for the look-ups of all ranks."""
        read: Float64Array = self.accesses * world * self.row_bytes
        return read


def make_shards(case: PlanningProblem) -> TableShards:
    specs = case.keyspace.tables
    return TableShards(
        bytes=case.table_bytes,
        row_bytes=np.array([case.shape.wire_row_bytes(spec) for spec in specs], dtype=np.float64),
        accesses=np.array([group.total()[ACCESSES] for group in case.table_sums]),
        dim=np.array([spec.dim for spec in specs], dtype=np.float64),
        rows=np.array([spec.rows for spec in specs], dtype=np.float64),
    )


def place_greedily(cost: Float64Array, size: Float64Array, ranks: int, memory: float) -> Int64Array | None:
    """int64[p] rank of each shard: descending cost, to the least loaded rank with room; None if a shard finds none."""
    load, used = np.zeros(ranks), np.zeros(ranks)
    rank = np.empty(len(cost), np.int64)
    for shard in np.lexsort((np.arange(len(cost)), -size, -cost)):
        room = used + size[shard] <= memory
        if not room.any():
            return None
        best = int(np.lexsort((used, np.where(room, load, np.inf)))[0])
        rank[shard] = best
        load[best] += cost[shard]
        used[best] += size[shard]
    return rank


def fast_tables(cost: Float64Array, size: Float64Array, rank: Int64Array, ranks: int, memory: float) -> Float64Array:
    """float64[p], 1 for the shards that are in their rank's fast memory: descending cost, while there is room."""
    used, fast = np.zeros(ranks), np.zeros(len(rank))
    for shard in np.argsort(-cost, kind="stable"):
        if used[rank[shard]] + size[shard] <= memory:
            used[rank[shard]] += size[shard]
            fast[shard] = 1.0
    return fast
