"""Input and result of every strategy that flexd's plans are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_table_loads
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PlanningProblem:
    """One planning problem.

    Attributes:
        memory_bytes: of each rank, for table rows, their optimizer state and replicas.
        replica_slots: per dim-group, of every rank: strategies that copy rows get as many.

    Raises:
        PlanError: memory that is not above 0, not one slot number of at least 0 per dim-group; and, where loads are
            first used, as ``make_loads``.
    """

    profile: Profile
    keyspace: KeySpace
    layout: RankLayout
    cluster: Cluster
    memory_bytes: float
    replica_slots: tuple[int, ...]
    shape: TrainingShape = field(default_factory=TrainingShape)

    def __post_init__(self) -> None:
        if not self.memory_bytes > 0:
            raise PlanError(f"memory of a rank: {self.memory_bytes!r}", remedy="give bytes above 0")
        object.__setattr__(self, "cluster", self.cluster.of_layout(self.layout.nodes, self.layout.local_ranks))
        if len(self.replica_slots) != len(self.keyspace.groups) or min(self.replica_slots) < 0:
            raise PlanError(f"replica slots: {self.replica_slots}", remedy="give one number of at least 0 a dim-group")

    @cached_property
    def table_sums(self) -> tuple[LoadSums, ...]:
        """Loads of the tables."""
        loads = make_table_loads(self.profile, self.keyspace, self.layout, self.shape)
        return tuple(LoadSums(load, self.layout) for load in loads)

    @cached_property
    def table_bytes(self) -> Float64Array:
        """float64[tables]: bytes of rows and optimizer state."""
        return np.array([float(t.rows) * (t.row_bytes + t.state_bytes) for t in self.keyspace.tables])
