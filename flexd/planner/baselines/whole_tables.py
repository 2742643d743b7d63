"""Strategies that place whole tables, or columns of them, on ranks: greedy by a cost of each piece.

The costs are those of AutoShard's heuristic baselines (Zha et al., KDD 2022, arXiv 2208.06399, "Baselines" of the
experiments, and the released ``autoshard`` sharders): shards in descending cost, each to the rank with the least cost
so far that has the memory. Rows travel without dedup; a sum-pooled table is pooled where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import numpy.typing as npt

from flexd.core.layout import Tier
from flexd.planner.baselines.problem import BaselineResult, PlanningProblem
from flexd.planner.baselines.two_memories import TwoMemories
from flexd.planner.model.balance import RankBytes, rank_bytes
from flexd.planner.model.cost import CostBreakdown, cost_of_ranks
from flexd.planner.model.row_bytes import Exchange, direct_byte_factors
from flexd.planner.model.workload import ACCESSES, BACK_RETURNED, RETURNED, ROWS, STATISTICS, SYNCED

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_MIN_COLUMNS = 32
"""Narrower column shards are not made (TorchRec's planner: MIN_CW_DIM)."""


@dataclass(frozen=True)
class TableShards:
    """Parts of tables that are placed as a whole.

    Attributes:
        table: int64[p], index of the table.
        bytes: float64[p], rows and optimizer state.
        row_bytes: int64[p], of one row on the wire.
        accesses: float64[p], of one rank in one step.
        dim: float64[p], columns of the piece.
        rows: float64[p].
    """

    table: Int64Array
    bytes: Float64Array
    row_bytes: Int64Array
    accesses: Float64Array
    dim: Float64Array
    rows: Float64Array

    def read_bytes(self, world: int) -> Float64Array:
        """Return float64[p], bytes read in one step for the look-ups of all ranks."""
        read: Float64Array = self.accesses * world * self.row_bytes
        return read


def make_shards(case: PlanningProblem, columns: int | None = None) -> TableShards:
    """Whole tables, or shards of ``columns`` columns (the last may be narrower)."""
    table: list[int] = []
    dims: list[int] = []
    for index, spec in enumerate(case.keyspace.tables):
        width = spec.dim if columns is None else min(columns, spec.dim)
        cuts = [width] * (spec.dim // width) + ([spec.dim % width] if spec.dim % width else [])
        table.extend([index] * len(cuts))
        dims.extend(cuts)
    specs = case.keyspace.tables
    share = np.array([dim / specs[t].dim for t, dim in zip(table, dims, strict=True)])
    accesses = np.array([group.total()[ACCESSES] for group in case.table_sums])
    wire = np.array([case.shape.wire_row_bytes(spec) for spec in specs], dtype=np.float64)
    at = np.array(table, dtype=np.int64)
    return TableShards(
        table=at,
        bytes=case.table_bytes[at] * share,
        row_bytes=np.round(wire[at] * share).astype(np.int64),
        accesses=accesses[at],
        dim=np.array(dims, dtype=np.float64),
        rows=np.array([specs[t].rows for t in table], dtype=np.float64),
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


def shard_cost(case: PlanningProblem, shards: TableShards, rank: Int64Array) -> CostBreakdown:
    """Every rank sends its ids to the ranks that have the table, which send rows (or sums of them) back."""
    layout = case.layout
    parts: list[RankBytes] = []
    for shard, table in enumerate(shards.table.tolist()):
        one = np.zeros((len(Tier), STATISTICS, layout.world_size))
        total = case.table_sums[table].total()
        back = returned_rows(case, table, float(total[ACCESSES]), 1)
        trained = total[SYNCED] / total[ROWS] if total[ROWS] > 0 else 0.0
        one[Tier.HOME, ACCESSES, rank[shard]] = total[ACCESSES]
        one[Tier.HOME, RETURNED, rank[shard]] = back
        one[Tier.HOME, BACK_RETURNED, rank[shard]] = back * trained
        parts.append(
            rank_bytes(
                one, direct_byte_factors(layout, int(shards.row_bytes[shard]), dedup=False), layout, Exchange.DIRECT
            )
        )
    return cost_of_ranks(reduce(add, parts), case.sums, case.cluster, Exchange.DIRECT)


def returned_rows(case: PlanningProblem, table: int, accesses: float, homes: int) -> float:
    """Return the rows that come back to a rank: one an access, or a sum for each bag and each home that has any."""
    bags = case.shape.bags_per_step.get(case.keyspace.tables[table].name)
    if bags is None or accesses == 0:
        return accesses
    return bags * homes * float(-np.expm1(-accesses / bags / homes))


@dataclass(frozen=True)
class TableWise:
    """Whole tables (or column shards), greedy by ``cost``.

    Attributes:
        memories: tables that find no room in their rank's fast memory, cheapest last, are in its host memory, as
            RecShard's paper has it of these (arXiv 2201.10095, "Baselines"). None: there is no host memory.
    """

    name: str
    source: str
    cost: Callable[[TableShards], Float64Array]
    columns: int | None = None
    memories: TwoMemories | None = None

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        shards = make_shards(case, self.columns)
        world = case.layout.world_size
        memory_bytes = case.memory_bytes + (self.memories.host_bytes if self.memories else 0.0)
        rank = place_greedily(self.cost(shards), shards.bytes, world, memory_bytes)
        if rank is None:
            reason = (
                f"a shard of {float(shards.bytes.max()) / 1e9:.1f} GB finds no rank with room for it "
                f"({memory_bytes / 1e9:.1f} GB each)"
            )
            return BaselineResult(self.name, self.source, reason)
        cost = shard_cost(case, shards, rank)
        if self.memories is None:
            memory = np.bincount(rank, weights=shards.bytes, minlength=world).astype(np.float64)
            return BaselineResult(self.name, self.source, "", cost, memory)
        fast = fast_tables(self.cost(shards), shards.bytes, rank, world, case.memory_bytes)
        memory = np.bincount(rank, weights=shards.bytes * fast, minlength=world).astype(np.float64)
        read = shards.read_bytes(world)
        seconds = np.bincount(rank, weights=self.memories.reading_seconds(read, fast), minlength=world)
        figures = {
            "reading_seconds": float(seconds.max()),
            "host_bytes": float(np.bincount(rank, weights=shards.bytes * (1 - fast), minlength=world).max()),
            "accesses_in_fast_memory": float(shards.accesses @ fast / max(float(shards.accesses.sum()), 1e-300)),
        }
        return BaselineResult(self.name, self.source, "", cost, memory, figures)


TABLE_WISE_SIZE = TableWise(
    "table_wise_size", "arXiv 2208.06399, size-based greedy: dim x rows", lambda p: p.dim * p.rows
)
TABLE_WISE_DIM = TableWise("table_wise_dim", "arXiv 2208.06399, dim-based greedy: dim", lambda p: p.dim)
TABLE_WISE_LOOKUP = TableWise(
    "table_wise_lookup", "arXiv 2208.06399, lookup-based greedy: dim x pooling factor", lambda p: p.dim * p.accesses
)
TABLE_WISE_SIZE_LOOKUP = TableWise(
    "table_wise_size_lookup",
    "arXiv 2208.06399, size-lookup-based greedy: dim x pooling factor x log10(rows)",
    lambda p: p.dim * p.accesses * np.log10(np.maximum(p.rows, 10.0)),
)
COLUMN_WISE = TableWise(
    "column_wise",
    f"TorchRec column-wise: shards of {_MIN_COLUMNS} columns, greedy by look-ups x columns",
    lambda p: p.dim * p.accesses,
    _MIN_COLUMNS,
)

TABLE_WISE_SIZE_HOST, TABLE_WISE_LOOKUP_HOST, TABLE_WISE_SIZE_LOOKUP_HOST = (
    replace(peer, name=f"{peer.name}_host", source=f"{peer.source}; the rest in host memory", memories=TwoMemories())
    for peer in (TABLE_WISE_SIZE, TABLE_WISE_LOOKUP, TABLE_WISE_SIZE_LOOKUP)
)
