"""Drift: the live placement against the plan that would be made now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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


@dataclass(frozen=True)
class StepCommunication:
    """Expected communication per rank and step.

    Attributes:
        inter_node_bytes: sent by a rank.
        exposed_seconds: what a step waits for.
    """

    inter_node_bytes: float
    exposed_seconds: float


@dataclass(frozen=True)
class PlacementCommunication:
    """Communication of one placement under one profile.

    Attributes:
        total: with the collectives' latencies.
        tables: by name. Bytes sum to the total's; a table's seconds are those of its bytes, priced as if its messages
            travelled alone, without latencies.
    """

    total: StepCommunication
    tables: Mapping[str, StepCommunication]


@dataclass(frozen=True)
class Drift:
    """The regret of keeping the live placement: its price over that of the plan that would be made now.

    Both are priced under the present profile, for the same ranks at the same prices, so that a change of the accesses
    that no other placement serves better is no drift, and one that leaves the price of the live placement as it was may
    be much.
    """

    plan: PlacementCommunication
    live: PlacementCommunication

    @property
    def ratio(self) -> float:
        """Exposed seconds of a step, live / plan: 1 is no drift, above 1 another placement is better."""
        return _ratio(self.live.total.exposed_seconds, self.plan.total.exposed_seconds)

    @cached_property
    def table_ratios(self) -> dict[str, float]:
        """Exposed seconds of each table alone, live / plan; infinite for one that the plan would rid of them all."""
        return {
            name: _ratio(live.exposed_seconds, self.plan.tables[name].exposed_seconds)
            for name, live in self.live.tables.items()
        }

    def reason_to_plan(self, threshold: float) -> str | None:
        """Return the reason to plan again, with the table that would gain the most; None up to the threshold."""
        if not self.ratio > threshold:
            return None
        gains = {
            name: live.exposed_seconds - self.plan.tables[name].exposed_seconds
            for name, live in self.live.tables.items()
        }
        return f"drift {self.ratio:.2f} > {threshold:.2f} (table {max(gains, key=gains.__getitem__)})"


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

    A replicated row that the profile no longer lists counts as a mean unlisted row of its table. Moved rows count as if
    they were at home: what moves save is known of samples, not of rows.

    Raises:
        PlanError: as ``make_loads``.
    """
    shape, placement = shape or TrainingShape(), placement.copies
    loads = make_loads(profile, keyspace, layout, shape)
    total = _communication(placement_cost(loads, placement, keyspace, layout, cluster, exchange), latency=True)
    table_of = keyspace.table_of(placement.keys)
    order = np.argsort(table_of, kind="stable")
    edges = np.searchsorted(table_of[order], np.arange(len(keyspace.tables) + 1))
    tables: dict[str, StepCommunication] = {}
    for index, spec in enumerate(keyspace.tables):
        seen = profile.tables[index]
        if seen.weight <= 0:
            tables[spec.name] = StepCommunication(0.0, 0.0)
            continue
        # A table by itself is a job of one table: its own key space, whose keys are its rows.
        mine = order[edges[index] : edges[index + 1]]
        alone = KeySpace([spec])
        rows = Placement.of(placement.keys[mine] - keyspace.first_key[index], placement.tiers[mine], placement.version)
        own = make_loads(Profile(tables=(seen,)), alone, layout, shape.of_table(spec.name))
        tables[spec.name] = _communication(placement_cost(own, rows, alone, layout, cluster, exchange), latency=False)
    return PlacementCommunication(total, tables)


def _communication(cost: CostBreakdown, *, latency: bool) -> StepCommunication:
    seconds = cost.exposed_seconds
    if not latency:
        seconds = float(cost.exposed_share @ cost.transfer_seconds.sum(axis=(0, 2)))
    return StepCommunication(float(cost.bytes[:, :, TrafficLink.INTER_NODE].sum()), seconds)


def _ratio(live: float, plan: float) -> float:
    if plan > 0:
        return live / plan
    return 1.0 if live <= 0 else math.inf
