"""Input and result of every strategy that flexd's plans are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.cost import CostBreakdown, LoadSums
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads, make_table_loads
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
    def sums(self) -> tuple[LoadSums, ...]:
        """Loads of the dim-groups."""
        loads = make_loads(self.profile, self.keyspace, self.layout, self.shape)
        return tuple(LoadSums(load, self.layout) for load in loads)

    @cached_property
    def table_sums(self) -> tuple[LoadSums, ...]:
        """Loads of the tables."""
        loads = make_table_loads(self.profile, self.keyspace, self.layout, self.shape)
        return tuple(LoadSums(load, self.layout) for load in loads)

    @cached_property
    def table_bytes(self) -> Float64Array:
        """float64[tables]: bytes of rows and optimizer state."""
        return np.array([float(t.rows) * (t.row_bytes + t.state_bytes) for t in self.keyspace.tables])

    def home_memory(self) -> Float64Array:
        """Return float64[world]: bytes of all tables, spread by row over all ranks."""
        world = self.layout.world_size
        return np.full(world, float(self.table_bytes.sum()) / world)


@dataclass(frozen=True)
class BaselineResult:
    """Result of one strategy.

    Attributes:
        name, source: of the strategy.
        not_applicable: reason why the strategy cannot solve the problem; "" if it can.
        cost: bytes by link and seconds, mean and busiest rank. None if not applicable.
        memory_bytes: float64[world], stored: rows, optimizer state, copies; empty if not applicable.
        figures: further figures, with units in the names.
    """

    name: str
    source: str
    not_applicable: str = ""
    cost: CostBreakdown | None = None
    memory_bytes: Float64Array = field(default_factory=lambda: np.empty(0))
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def predicted_seconds(self) -> float:
        """Exposed communication of a step, every collective as slow as its busiest rank; NaN if not applicable."""
        return self.cost.peak_exposed_seconds if self.cost is not None else float("nan")

    @property
    def peak_memory_bytes(self) -> Float64Array:
        """float64[world]: what is stored and the buffers of a step; empty if not applicable."""
        return self.memory_bytes if self.cost is None else self.memory_bytes + self.cost.buffer_bytes.sum(axis=0)

    @property
    def balance(self) -> float:
        """Busiest rank over mean; NaN if not applicable."""
        return self.cost.imbalance if self.cost is not None else float("nan")


def over_memory(memory: Float64Array, case: PlanningProblem) -> str:
    """Return the reason why this memory does not fit; "" if it does."""
    most = float(memory.max(initial=0.0))
    if most <= case.memory_bytes:
        return ""
    return f"needs {most / 1e9:.1f} GB on a rank, there are {case.memory_bytes / 1e9:.1f} GB"
