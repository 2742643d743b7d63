"""The work of tables in one step: what every strategy's loads are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import ACCESSES, STATISTICS, make_table_loads
from flexd.sketch.profile import Profile

Float64Array = npt.NDArray[np.float64]

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
        cls, profile: Profile, keyspace: KeySpace, layout: RankLayout, shape: TrainingShape | None = None
    ) -> TableWork:
        """Return the work that a profile implies.

        Raises:
            PlanError: as ``make_loads``.
        """
        shape = shape or TrainingShape()
        sums = [LoadSums(load, layout).total() for load in make_table_loads(profile, keyspace, layout, shape)]
        specs = keyspace.tables
        return cls(
            tuple(spec.name for spec in specs),
            np.array(sums).reshape(len(specs), STATISTICS),
            np.array([shape.bags_per_step.get(spec.name, 0.0) for spec in specs]),
            np.array([float(shape.wire_row_bytes(spec)) for spec in specs]),
            np.array([float(spec.row_bytes) for spec in specs]),
            np.array([float(spec.state_bytes) for spec in specs]),
            np.array([float(spec.rows) for spec in specs]),
            np.array([0.0 if spec.name in shape.frozen_tables else 1.0 for spec in specs]),
            4 if keyspace.total_rows <= _NARROW_KEYS else 8,
        )

    @property
    def bag_length(self) -> Float64Array:
        """float64[T]: ids of a bag in the mean; 0 for un-pooled tables."""
        length: Float64Array = self.statistics[:, ACCESSES] / np.where(self.bags > 0, self.bags, np.inf)
        return length

    @property
    def stored_bytes(self) -> Float64Array:
        """float64[T]: rows and optimizer state."""
        stored: Float64Array = self.rows * (self.row_bytes + self.state_bytes)
        return stored
