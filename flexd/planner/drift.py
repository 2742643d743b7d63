"""Drift of the accesses since the live placement was planned: its cost now over its cost then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import placement_cost
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

MIN_TABLE_SHARE = 0.1
"""Share of the exposed time, then or now, from which the drift of a single table is a reason to plan."""


@dataclass(frozen=True)
class StepCommunication:
    """Expected communication per rank and step.

    Attributes:
        inter_node_bytes, total_bytes: sent by a rank; all links (without what it answers itself).
        exposed_seconds: what a step waits for.
    """

    inter_node_bytes: float
    total_bytes: float
    exposed_seconds: float

    def __post_init__(self) -> None:
        if not all(
            math.isfinite(x) and x >= 0 for x in (self.inter_node_bytes, self.total_bytes, self.exposed_seconds)
        ):
            raise PlanError(f"communication {self} is negative or not finite", remedy="report this profile")


@dataclass(frozen=True)
class PlacementCommunication:
    """Communication of one placement under one profile; nothing else of the profile is kept.

    Attributes:
        placement_digest: of the placement (``Placement.digest``).
        nodes, local_ranks, cluster: for which ranks, and at whose prices.
        accesses_per_step: of the whole job.
        total: with the collectives' latencies.
        tables: by name. Bytes sum to the total's; a table's seconds are those of its bytes, priced as if its messages
            travelled alone, without latencies.
    """

    placement_digest: int
    nodes: int
    local_ranks: int
    cluster: str
    accesses_per_step: float
    total: StepCommunication
    tables: Mapping[str, StepCommunication]

    def compares_with(self, other: PlacementCommunication) -> bool:
        """Return whether placement, ranks, prices and tables are equal, so that only the profile differs."""

        def setting(traffic: PlacementCommunication) -> tuple[object, ...]:
            return (
                traffic.placement_digest, traffic.nodes, traffic.local_ranks, traffic.cluster, tuple(traffic.tables),
            )  # fmt: skip

        return setting(self) == setting(other)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "placement_digest": f"{self.placement_digest:016x}",
            "nodes": self.nodes,
            "local_ranks": self.local_ranks,
            "cluster": self.cluster,
            "accesses_per_step": self.accesses_per_step,
            "total": _numbers(self.total),
            "tables": {name: _numbers(traffic) for name, traffic in self.tables.items()},
        }

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> PlacementCommunication:
        """Build from the form that ``to_dict`` returns.

        Raises:
            PlanError, KeyError, TypeError, ValueError, AttributeError: it is damaged.
        """
        accesses = float(saved["accesses_per_step"])
        if not (math.isfinite(accesses) and accesses > 0):
            raise PlanError(f"saved accesses per step: {accesses}", remedy="the next evaluation makes a new reference")
        return PlacementCommunication(
            int(saved["placement_digest"], 16),
            int(saved["nodes"]),
            int(saved["local_ranks"]),
            str(saved["cluster"]),
            accesses,
            StepCommunication(*(float(number) for number in saved["total"])),
            {str(name): StepCommunication(*(float(n) for n in numbers)) for name, numbers in saved["tables"].items()},
        )


@dataclass(frozen=True)
class Drift:
    """The live placement under the profile it was planned from, and under the present one.

    Raises:
        PlanError: the two are not of the same placement, ranks, prices and tables.
    """

    then: PlacementCommunication
    now: PlacementCommunication

    def __post_init__(self) -> None:
        if not self.then.compares_with(self.now):
            raise PlanError(
                "costs of different placements, ranks, prices or tables show no drift", remedy="make a new reference"
            )

    @property
    def ratio(self) -> float:
        """Exposed seconds of a step, now / then: 1 is no drift, above 1 the placement has got worse."""
        return _ratio(self.now.total.exposed_seconds, self.then.total.exposed_seconds)

    @cached_property
    def table_ratios(self) -> dict[str, float]:
        """Exposed seconds of each table alone, now / then; infinite for a table that caused no communication then."""
        return {
            name: _ratio(now.exposed_seconds, self.then.tables[name].exposed_seconds)
            for name, now in self.now.tables.items()
        }

    def reason_to_plan(self, threshold: float) -> str | None:
        """Return the reason to plan again, or None below the threshold.

        The exposed time of the step, or of a table with at least ``MIN_TABLE_SHARE`` of it, must exceed ``threshold``
        times its former value. The reason names the table that has grown the most."""
        now = {name: traffic.exposed_seconds for name, traffic in self.now.tables.items()}
        then = {name: traffic.exposed_seconds for name, traffic in self.then.tables.items()}
        whole_now, whole_then = sum(now.values()), sum(then.values())
        grown = {name: now[name] - then[name] for name in now}
        candidates = [
            name
            for name, ratio in self.table_ratios.items()
            if ratio > threshold
            and max(_share(now[name], whole_now), _share(then[name], whole_then)) >= MIN_TABLE_SHARE
        ]
        if self.ratio > threshold:
            ratio, table = self.ratio, max(grown, key=lambda name: grown[name])
        elif candidates:
            table = max(candidates, key=lambda name: grown[name])
            ratio = self.table_ratios[table]
        else:
            return None
        return f"drift {ratio:.2f} > {threshold:.2f} (table {table})"


def placement_communication(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    placement: Placement,
    shape: TrainingShape | None = None,
    exchange: Exchange = Exchange.CHAIN,
) -> PlacementCommunication:
    """Price a placement, in total and by table, as ``make_plan`` does with the same shape and exchange.

    A replicated row that the profile no longer lists counts as a mean unlisted row of its table.

    Raises:
        PlanError: as ``make_loads``.
    """
    shape = shape or TrainingShape()
    loads = make_loads(profile, keyspace, layout, shape)
    total = _communication(placement_cost(loads, placement, keyspace, layout, cluster, exchange), latency=True)
    table_of = keyspace.table_of(placement.keys)
    order = np.argsort(table_of, kind="stable")
    edges = np.searchsorted(table_of[order], np.arange(len(keyspace.tables) + 1))
    tables: dict[str, StepCommunication] = {}
    for index, spec in enumerate(keyspace.tables):
        seen = profile.tables[index]
        if seen.weight <= 0:
            tables[spec.name] = StepCommunication(0.0, 0.0, 0.0)
            continue
        # A table by itself is a job of one table: its own key space, whose keys are its rows.
        mine = order[edges[index] : edges[index + 1]]
        alone = KeySpace([spec])
        rows = Placement.of(placement.keys[mine] - keyspace.first_key[index], placement.tiers[mine], placement.version)
        own = make_loads(Profile(tables=(seen,)), alone, layout, shape.of_table(spec.name))
        tables[spec.name] = _communication(placement_cost(own, rows, alone, layout, cluster, exchange), latency=False)
    return PlacementCommunication(
        placement_digest=placement.digest(),
        nodes=layout.nodes,
        local_ranks=layout.local_ranks,
        cluster=cluster.name,
        accesses_per_step=sum(table.accesses_per_step for table in profile.tables),
        total=total,
        tables=tables,
    )


def _communication(cost: CostBreakdown, *, latency: bool) -> StepCommunication:
    seconds = cost.exposed_seconds
    if not latency:
        seconds = float(cost.exposed_share @ cost.transfer_seconds.sum(axis=(0, 2)))
    inter = float(cost.bytes[:, :, TrafficLink.INTER_NODE].sum())
    return StepCommunication(inter, inter + float(cost.bytes[:, :, TrafficLink.INTRA_NODE].sum()), seconds)


def _numbers(traffic: StepCommunication) -> list[float]:
    return [traffic.inter_node_bytes, traffic.total_bytes, traffic.exposed_seconds]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _ratio(now: float, then: float) -> float:
    if then > 0:
        return now / then
    return 1.0 if now <= 0 else math.inf
