"""A plan: what the planner wants, what it costs beside what there is, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.errors import PlanError
from flexd.keyspace import KeySpace
from flexd.layout import RankLayout, Tier
from flexd.placement import Delta, Placement
from flexd.planner.account import replication_account
from flexd.planner.baselines import BASELINES, TWO_HOP
from flexd.planner.cost import CostBreakdown, group_cost, total_cost
from flexd.planner.delta import moved_bytes, plan_delta, rows_by_tier
from flexd.planner.tiers import canonical_tiers, choose_tiers, migration_seconds
from flexd.planner.workload import GroupLoad, make_loads
from flexd.sketch.profile import Profile
from flexd.topology.model import Cluster

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """One plan. Costs are per rank and step.

    Attributes:
        plan_id, parent_id: this plan and the one the live placement came from ("" if none).
        topology_generation, profile_generation: what it was made for and from.
        reason: why a plan was asked for.
        created_unix_seconds: given by the caller.
        target: the wanted placement; its version is the live one's.
        gains: float64[len(target)], exposed seconds a step each of its rows saves against HOME.
        delta: the changes from the live placement, in the order to apply them.
        before, after: cost of the live placement and of the target.
        baselines: cost of the other strategies by name; ``two_hop`` is the same chain without replicas.
        objective_seconds: what the optimiser minimised: ``after`` with row bounds and migration over the horizon.
        lower_bound_seconds: no plan within the slots has a smaller objective.
        migration_bytes: values and optimizer state of the promoted rows, once each.
        migration_seconds: time to move them, bandwidth only.
        cluster: at whose prices.
        replica_slots: per dim-group, of each rank.
    """

    plan_id: str
    parent_id: str
    topology_generation: int
    profile_generation: int
    reason: str
    created_unix_seconds: float
    target: Placement
    gains: Float64Array
    delta: Delta
    before: CostBreakdown
    after: CostBreakdown
    baselines: Mapping[str, CostBreakdown]
    objective_seconds: float
    lower_bound_seconds: float
    migration_bytes: int
    migration_seconds: float
    cluster: Cluster
    replica_slots: tuple[int, ...]

    @property
    def gap(self) -> float:
        """How far above the lower bound the objective is at most, as a share of it."""
        if self.objective_seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - self.lower_bound_seconds / self.objective_seconds)

    @property
    def promotions(self) -> int:
        return int(np.count_nonzero(self.delta.new_tiers > self.delta.old_tiers))

    @property
    def demotions(self) -> int:
        return len(self.delta) - self.promotions

    def summary(self) -> dict[str, Any]:
        """Everything but the rows, JSON-able, with units in the names."""
        return {
            "plan_id": self.plan_id,
            "parent_id": self.parent_id,
            "topology_generation": self.topology_generation,
            "profile_generation": self.profile_generation,
            "reason": self.reason,
            "created_unix_seconds": self.created_unix_seconds,
            "cluster": self.cluster.name,
            "replica_slots": list(self.replica_slots),
            "rows": rows_by_tier(self.target),
            "promotions": self.promotions,
            "demotions": self.demotions,
            "migration_bytes": self.migration_bytes,
            "migration_seconds": self.migration_seconds,
            "objective_seconds": self.objective_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap": self.gap,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "baselines": {name: cost.to_dict() for name, cost in self.baselines.items()},
            "replication": replication_account(self.baselines[TWO_HOP.name], self.after, self.cluster),
        }


def make_plan(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    replica_slots: Sequence[int],
    live: Placement,
    *,
    plan_id: str,
    parent_id: str,
    topology_generation: int,
    horizon_steps: float,
    now_unix_seconds: float,
    reason: str,
) -> Plan:
    """Chooses the tier of every row. Deterministic; does not depend on the order in which rows are listed.

    Rows above HOME that the profile no longer lists are demoted.

    Args:
        replica_slots: replica slots of each rank, one number per dim-group.
        horizon_steps: steps within which a promotion must pay for its migration.

    Raises:
        PlanError: the profile is empty, is of other tables or does not know the accesses of a step; the slots are not
            one number per dim-group; a number is out of range.
    """
    if len(replica_slots) != len(keyspace.groups):
        raise PlanError(
            f"{len(replica_slots)} replica budgets for {len(keyspace.groups)} dim-groups",
            remedy="give one number of slots per dim-group",
        )
    loads = make_loads(profile, keyspace, layout)
    choices = [
        choose_tiers(load, layout, cluster, int(slots), live.tiers_of(load.keys), horizon_steps)
        for load, slots in zip(loads, replica_slots, strict=True)
    ]
    keys = np.concatenate([load.keys for load in loads])
    tiers = np.concatenate([choice.tiers for choice in choices])
    target = Placement.of(keys, tiers, live.version)
    gains = np.concatenate([choice.gains for choice in choices])[tiers != Tier.HOME]
    delta = plan_delta(live, target, gains, keyspace, layout, replica_slots)
    return Plan(
        plan_id=plan_id,
        parent_id=parent_id,
        topology_generation=topology_generation,
        profile_generation=profile.generation,
        reason=reason,
        created_unix_seconds=now_unix_seconds,
        target=target,
        gains=gains,
        delta=delta,
        before=placement_cost(loads, live, keyspace, layout, cluster),
        after=total_cost(choice.cost for choice in choices),
        baselines={baseline.name: baseline.price(loads, layout, cluster) for baseline in BASELINES},
        objective_seconds=sum(choice.objective_seconds for choice in choices),
        lower_bound_seconds=sum(choice.lower_bound_seconds for choice in choices),
        migration_bytes=int(moved_bytes(delta, keyspace, layout).sum()),
        migration_seconds=_migration_seconds(delta, loads, keyspace, layout, cluster),
        cluster=cluster,
        replica_slots=tuple(int(slots) for slots in replica_slots),
    )


def placement_cost(
    loads: Sequence[GroupLoad], placement: Placement, keyspace: KeySpace, layout: RankLayout, cluster: Cluster
) -> CostBreakdown:
    """Cost of any placement under these loads.

    Rows above HOME that a load does not list are priced at the mean frequency of its unlisted rows.
    """
    group = keyspace.group_of(placement.keys)
    costs = []
    for load in loads:
        tiers = canonical_tiers(placement.tiers[group == load.group], layout)
        listed = canonical_tiers(placement.tiers_of(load.keys), layout)
        unlisted = np.bincount(tiers, minlength=len(Tier)) - np.bincount(listed, minlength=len(Tier))
        unlisted[Tier.HOME] = 0
        costs.append(group_cost(load, listed, layout, cluster, unlisted=unlisted.astype(np.float64)))
    return total_cost(costs)


def _migration_seconds(
    delta: Delta,
    loads: Sequence[GroupLoad],
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
) -> float:
    moves = moved_bytes(delta, keyspace, layout) > 0
    group = keyspace.group_of(delta.keys)
    return sum(
        float(migration_seconds(load, layout, cluster)[delta.new_tiers[moves & (group == load.group)]].sum())
        for load in loads
    )
