"""The ways in which a table can be held and answered, and the load that each of them gives to the ranks.

A load has up to four parts: what every rank carries, what the ranks of the home's node carry on top, what the ranks of
equal local rank (the home's rail) carry on top, and what the home rank carries on top of all three. So one array
describes a table wherever it is placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array, Int64Array
from flexd.core.keyspace import KeySpace
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import DATA_PARALLEL as DATA_PARALLEL_TYPE
from flexd.core.sharding_types import ROW_WISE as ROW_WISE_TYPE
from flexd.planner.model.workload import STATISTICS, TrainingShape, make_loads
from flexd.sketch.profile import Profile


class ShardingKind(StrEnum):
    """Kinds of sharding types (``flexd.core.sharding_types``, torchrec.distributed.types.ShardingType)."""

    ROW_WISE = ROW_WISE_TYPE
    """Rows are spread over all ranks."""
    TABLE_ROW_WISE = "table_row_wise"
    """Rows are spread over the ranks of one node."""
    TABLE_WISE = "table_wise"
    """All rows are on one rank."""
    COLUMN_WISE = "column_wise"
    """Columns are cut into pieces, each whole on a rank of its own: TorchRec alone does."""
    DATA_PARALLEL = DATA_PARALLEL_TYPE
    """Every rank has all rows; gradients are summed."""


class PoolingAt(StrEnum):
    """Where the rows of a bag are added up."""

    REQUESTER = "requester"
    """Each distinct row once; it is pooled where it is looked up."""
    OWNER = "owner"
    """The sum of the bag's rows that are there."""
    NONE = "none"
    """Nothing: every rank has the rows, and the sums of their gradients travel."""


class Part(IntEnum):
    """Part of a load, by the ranks that carry it."""

    EVERYWHERE = 0
    HOME_NODE = 1
    HOME_RAIL = 2
    HOME_RANK = 3


@dataclass(frozen=True)
class TableOption:
    """One way to hold and pool a table.

    Attributes:
        pieces: pieces of the table that are placed independently of each other: more than 1 for COLUMN_WISE alone.
    """

    rule: ShardingKind
    pooling_at: PoolingAt
    pieces: int = 1

    @property
    def everywhere(self) -> bool:
        """True if all ranks hold as much of it."""
        return self.rule in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL)

    def places(self, layout: RankLayout) -> int:
        """Return how many places a piece can have: ranks, nodes, or the only one."""
        if self.everywhere:
            return 1
        return layout.nodes if self.rule is ShardingKind.TABLE_ROW_WISE else layout.world_size

    def held(self, layout: RankLayout) -> tuple[Part, int]:
        """Return who holds a piece of the table, and into how many pieces of memory the table is cut."""
        return {
            ShardingKind.ROW_WISE: (Part.EVERYWHERE, layout.world_size),
            ShardingKind.TABLE_ROW_WISE: (Part.HOME_NODE, layout.local_ranks),
            ShardingKind.TABLE_WISE: (Part.HOME_RANK, 1),
            ShardingKind.COLUMN_WISE: (Part.HOME_RANK, self.pieces),
            # A rank's own part of the rows needs no copy there.
            ShardingKind.DATA_PARALLEL: (Part.EVERYWHERE, 1),
        }[self.rule]


@dataclass(frozen=True)
class TableOptions:
    """The loads of T tables under each of O options.

    Attributes:
        names: of the tables.
        options: the options, the first of which every table allows: it is the one that is compared with.
        phases: names of the P phases that a step waits for one after the other.
        axis_phase: int64[K], the phase of each load axis (a phase has one axis a direction of transfer).
        seconds_per_unit: float64[P], of the busiest rank's load: of a byte in most phases.
        loads: float64[T, O, 4, K], of one piece, by ``Part``.
        memory_bytes: float64[T, O, 4], of one piece, by ``Part``.
        allowed: bool[T, O].
        pooling_seconds: fixed seconds of a step as soon as any table has this pooling place.
    """

    names: tuple[str, ...]
    options: tuple[TableOption, ...]
    phases: tuple[str, ...]
    axis_phase: Int64Array
    seconds_per_unit: Float64Array
    loads: Float64Array
    memory_bytes: Float64Array
    allowed: BoolArray
    pooling_seconds: tuple[tuple[PoolingAt, float], ...] = ()

    @cached_property
    def axis_seconds(self) -> Float64Array:
        """float64[K]: seconds of a unit of load on each axis."""
        return np.asarray(self.seconds_per_unit[self.axis_phase], dtype=np.float64)

    @cached_property
    def phase_starts(self) -> Int64Array:
        """int64[P]: the first load axis of each phase."""
        return np.flatnonzero(np.diff(self.axis_phase, prepend=-1))

    @cached_property
    def pieces(self) -> Int64Array:
        """int64[O]."""
        return np.array([option.pieces for option in self.options], dtype=np.int64)

    def mean(self, values: Float64Array, layout: RankLayout) -> Float64Array:
        """Return float64[T, O, ...] of float64[T, O, 4, ...]: of all pieces, in the mean over the ranks."""
        share = np.array([1.0, 1.0 / layout.nodes, 1.0 / layout.local_ranks, 1.0 / layout.world_size])
        pieces = self.pieces.reshape((1, -1) + (1,) * (values.ndim - 3))
        return np.asarray(np.einsum("top...,p->to...", values, share) * pieces, dtype=np.float64)

    def extremes(self, values: Float64Array, layout: RankLayout) -> tuple[Float64Array, Float64Array]:
        """Return (least, most) float64[T, O, ...] of float64[T, O, 4, ...] that some rank has of all pieces.

        The most counts one piece at its busiest rank, the others where they are least.
        """
        every, node, rail, rank = (values[:, :, part] for part in Part)
        at = [every + node + rail + rank]
        if layout.local_ranks > 1:
            at.append(every + node)
        if layout.nodes > 1:
            at.append(every + rail)
        if layout.nodes > 1 and layout.local_ranks > 1:
            at.append(every)
        least, most = np.minimum.reduce(at), np.maximum.reduce(at)
        pieces = self.pieces.reshape((1, -1) + (1,) * (values.ndim - 3))
        return least * pieces, most + (pieces - 1) * least


_NARROW_KEYS = 2**31


@dataclass(frozen=True)
class TableWork:
    """The work of T tables in one step.

    Attributes:
        names: of the tables.
        statistics: float64[T, STATISTICS], sums over a table's rows (``workload``).
        bags: float64[T], bags of a rank; 0: un-pooled.
        wire_bytes, row_bytes, state_bytes: float64[T], of a row.
        rows: float64[T].
        trained: float64[T], 0 for frozen tables.
        id_bytes: of one id of a bag.
    """

    names: tuple[str, ...]
    statistics: Float64Array
    bags: Float64Array
    wire_bytes: Float64Array
    row_bytes: Float64Array
    state_bytes: Float64Array
    rows: Float64Array
    trained: Float64Array
    id_bytes: int

    @classmethod
    def of(
        cls, profile: Profile, keyspace: KeySpace, layout: RankLayout, shape: TrainingShape, bags: Mapping[str, float]
    ) -> TableWork:
        """Return the work that a profile implies.

        Args:
            bags: of a rank in a step, by name of each pooled table.

        Raises:
            PlanError: as ``make_loads``.
        """
        specs, sums = keyspace.tables, np.zeros((len(keyspace.tables), STATISTICS))
        for index, (spec, seen) in enumerate(zip(specs, profile.tables, strict=True)):
            if seen.weight > 0:
                own = Profile(tables=(seen,))
                sums[index] = make_loads(own, KeySpace([spec]), layout, shape.of_table(spec.name))[0].total
        return cls(
            tuple(spec.name for spec in specs),
            sums,
            np.array([bags.get(spec.name, 0.0) for spec in specs]),
            np.array([float(shape.wire_row_bytes(spec)) for spec in specs]),
            np.array([float(spec.row_bytes) for spec in specs]),
            np.array([float(spec.state_bytes) for spec in specs]),
            np.array([float(spec.rows) for spec in specs]),
            np.array([0.0 if spec.name in shape.frozen_tables else 1.0 for spec in specs]),
            4 if keyspace.total_rows <= _NARROW_KEYS else 8,
        )

    @property
    def stored_bytes(self) -> Float64Array:
        """float64[T]: rows and optimizer state."""
        return self.rows * (self.row_bytes + self.state_bytes)
