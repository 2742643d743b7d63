"""Drift: the live placement against the plan that would be made now."""

import math
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement, RankLayout
from flexd.planner.model.prices import Exchange, exposed_share
from flexd.planner.model.workload import TrainingShape, make_loads
from flexd.planner.plan import placement_cost
from flexd.sketch.profile import Profile
from flexd.topology.cluster import INTER, Cluster

PLAN, LIVE = range(2)
"""The placements that are compared: first axis of the figures of a ``Drift``."""


@dataclass(frozen=True)
class Drift:
    """The regret of keeping the live placement: its price over that of the plan that would be made now.

    Both are priced under the present profile, for the same ranks at the same prices, so that a change of the accesses
    that no other placement serves better is no drift, and one that leaves the price of the live placement as it was may
    be much.

    Attributes:
        tables: names, in the order of the key space.
        exposed_seconds: float64[2], what a step waits for, with the collectives' latencies.
        inter_node_bytes: float64[2], sent by a rank in one step.
        table_seconds: float64[2, tables], of each table's bytes, priced as if its messages travelled alone, without
            latencies.
        table_bytes: float64[2, tables], which sum to ``inter_node_bytes``.
    """

    tables: tuple[str, ...]
    exposed_seconds: Float64Array
    inter_node_bytes: Float64Array
    table_seconds: Float64Array
    table_bytes: Float64Array

    @property
    def ratio(self) -> float:
        """Exposed seconds of a step, live / plan: 1 is no drift, above 1 another placement is better."""
        return _ratio(float(self.exposed_seconds[LIVE]), float(self.exposed_seconds[PLAN]))

    @property
    def table_ratios(self) -> dict[str, float]:
        """Exposed seconds of each table alone, live / plan; infinite for one that the plan would rid of them all."""
        by_table = zip(self.tables, *self.table_seconds.tolist(), strict=True)
        return {name: _ratio(live, plan) for name, plan, live in by_table}

    def reason_to_plan(self, threshold: float) -> str | None:
        """Return the reason to plan again, with the table that would gain the most; None up to the threshold."""
        if not self.ratio > threshold:
            return None
        most = int((self.table_seconds[LIVE] - self.table_seconds[PLAN]).argmax())
        return f"drift {self.ratio:.2f} > {threshold:.2f} (table {self.tables[most]})"


def compare_placements(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    plan: Placement,
    live: Placement,
    shape: TrainingShape | None = None,
    exchange: Exchange = Exchange.CHAIN,
) -> Drift:
    """Price two placements, in total and by table, as ``make_plan`` does with the same shape and exchange.

    A replicated row that the profile no longer lists counts as a mean unlisted row of its table. Re-homed rows count
    as if they were at home: what moves save is known of samples, not of rows.

    Raises:
        PlanError: as ``make_loads``.
    """
    shape, placements = shape or TrainingShape(), (plan.copies, live.copies)
    loads = make_loads(profile, keyspace, layout, shape)
    totals = [placement_cost(loads, each, keyspace, cluster, exchange) for each in placements]
    seconds, sent = np.zeros((2, len(placements), len(keyspace.tables)))
    for index, (spec, seen) in enumerate(zip(keyspace.tables, profile.tables, strict=True)):
        if seen.weight <= 0:
            continue
        # A table by itself is a job of one table: its own key space, whose keys are its rows.
        alone, first = KeySpace([spec]), int(keyspace.first_key[index])
        own = make_loads(Profile(tables=(seen,)), alone, layout, shape.of_table(spec.name))
        for at, placement in enumerate(placements):
            start, end = np.searchsorted(placement.keys, [first, first + spec.rows])
            rows = Placement(placement.keys[start:end] - first, placement.tiers[start:end])
            cost = placement_cost(own, rows, alone, cluster, exchange)
            seconds[at, index] = exposed_share(cost.exposed) @ cost.transfer_seconds.sum(axis=(0, 2))
            sent[at, index] = cost.bytes[:, :, INTER].sum()
    return Drift(
        tuple(spec.name for spec in keyspace.tables),
        np.array([cost.exposed_seconds for cost in totals]),
        np.array([cost.bytes[:, :, INTER].sum() for cost in totals]),
        seconds,
        sent,
    )


def _ratio(live: float, plan: float) -> float:
    if plan > 0:
        return live / plan
    return 1.0 if live <= 0 else math.inf
