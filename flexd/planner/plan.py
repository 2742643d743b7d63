"""Make a plan: the target placement, its cost against the live one and other strategies, and the delta to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier, by_slots
from flexd.core.placement import Delta, Placement
from flexd.planner.delta import moved_bytes, plan_delta, rows_by_tier
from flexd.planner.model.cost import CostBreakdown, LoadSums, joint_cost
from flexd.planner.model.gains import canonical_tiers, migration_seconds
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import GroupLoad, make_loads
from flexd.planner.replication_summary import replication_words
from flexd.planner.solver.limits import FREE, GroupLimits, PlanLimits, slots_of_ranks, slots_used
from flexd.planner.solver.relaxation import missed_share
from flexd.planner.solver.tiers import choose_jointly
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]


BASELINES = {"row_wise_dedup": Exchange.DIRECT_DEDUP, "two_hop": Exchange.CHAIN}
"""Strategies that every plan is shown beside, all rows at HOME: row-wise with dedup is TorchRec's ``use_index_dedup``
(and flexd's direct exchange), two-hop flexd's own chain. Homes are cyclic (``key % W``): hot rows spread better than in
blocks."""


@dataclass(frozen=True)
class Plan:
    """One plan. Costs are per rank and step.

    Attributes:
        plan_id, parent_id: this plan and the one the live placement came from ("" if none).
        topology_generation, profile_generation: what it was made for and from.
        reason: trigger of the plan.
        created_unix_seconds: given by the caller.
        target: the planned placement; its version is the live one's.
        gains: float64[len(target)], exposed seconds per step each of its rows saves against HOME.
        delta: the changes from the live placement, in the order to apply them.
        before, after: cost of the live placement and of the target.
        baselines: cost of the other strategies by name; ``two_hop`` is the same chain without replicas.
        objective_seconds: what the optimiser minimised: ``after`` with row bounds and migration over the horizon.
        lower_bound_seconds: no plan within the slots has a smaller objective.
        migration_bytes: values and optimizer state of the promoted rows, once each.
        migration_seconds: time to move them, bandwidth only.
        cluster: at whose prices.
        slots: int64[groups, world], replica slots of the ranks.
        exchange: that the job runs, under which the plan is priced.
        home_seconds: objective of the placement with every row at HOME that is not pinned elsewhere.
        live_fits: whether the live placement keeps to slots, pins and excluded tables. If not, the plan is needed
            whatever it saves.
        step_seconds: measured wall time of a step; None if it is not known.
        moves_save_seconds: exposed seconds a step that rows which move to other nodes or back save, beside the costs.
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
    slots: Int64Array
    exchange: Exchange
    home_seconds: float
    live_fits: bool
    step_seconds: float | None = None
    moves_save_seconds: float = 0.0

    @property
    def saved_seconds(self) -> float:
        """Exposed seconds that a step would take less than at the live placement, in the mean over the ranks."""
        return self.before.exposed_seconds - self.after.exposed_seconds + self.moves_save_seconds

    @property
    def saved_share(self) -> float | None:
        """The saving as a share of the measured step; None if that is not known."""
        return self.saved_seconds / self.step_seconds if self.step_seconds else None

    @property
    def recommended_exchange(self) -> Exchange:
        """The plan's exchange, or the direct one with dedup if that is cheaper than the plan."""
        dedup = self.baselines["row_wise_dedup"].exposed_seconds
        return Exchange.DIRECT_DEDUP if dedup < self.after.exposed_seconds else self.exchange

    @property
    def gap(self) -> float:
        """Largest share that the plan may miss of what any plan could save against every row at HOME, 0 to 1, in the
        mean over the ranks.

        An empty plan has 1 where some plan could save anything, and 0 where none can."""
        return missed_share(self.objective_seconds, self.home_seconds, self.lower_bound_seconds)

    @property
    def promotions(self) -> int:
        """Rows that get copies, or move to another node."""
        return int(np.count_nonzero(by_slots(self.delta.new_tiers) > by_slots(self.delta.old_tiers)))

    @property
    def demotions(self) -> int:
        return len(self.delta) - self.promotions

    def summary(self) -> dict[str, Any]:
        """Return everything but the rows, JSON-able, with units in the names."""
        return {
            "plan_id": self.plan_id,
            "parent_id": self.parent_id,
            "topology_generation": self.topology_generation,
            "profile_generation": self.profile_generation,
            "reason": self.reason,
            "created_unix_seconds": self.created_unix_seconds,
            "cluster": self.cluster.name,
            "replica_slots": self.slots.min(axis=1).tolist(),
            "rows": rows_by_tier(self.target),
            "moved_rows": len(self.target.moved),
            "moves_save_seconds": self.moves_save_seconds,
            "promotions": self.promotions,
            "demotions": self.demotions,
            "migration_bytes": self.migration_bytes,
            "migration_seconds": self.migration_seconds,
            "objective_seconds": self.objective_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap": self.gap,
            "saved_seconds": self.saved_seconds,
            "saved_share": self.saved_share,
            "step_seconds": self.step_seconds,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "exchange": {
                "planned": self.exchange.value,
                "recommended": self.recommended_exchange.value,
                "recommended_exposed_seconds": min(
                    self.after.exposed_seconds, self.baselines["row_wise_dedup"].exposed_seconds
                ),
            },
            "baselines": {name: cost.to_dict() for name, cost in self.baselines.items()},
            "replication": {
                "messages": replication_words(
                    self.baselines["two_hop" if self.exchange is Exchange.CHAIN else "row_wise_dedup"],
                    self.after,
                    self.cluster,
                    self.baselines["row_wise_dedup"],
                )
            },
        }


def make_plan(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    replica_slots: Sequence[int | Int64Array],
    live: Placement,
    *,
    plan_id: str,
    parent_id: str,
    topology_generation: int,
    horizon_steps: float,
    now_unix_seconds: float,
    reason: str,
    shape: TrainingShape | None = None,
    limits: PlanLimits | None = None,
    exchange: Exchange = Exchange.CHAIN,
    step_seconds: float | None = None,
) -> Plan:
    """Choose the tier of every row. Deterministic; does not depend on the order in which rows are listed.

    Rows above HOME that the profile no longer lists are demoted, unless they are pinned. Moved rows of ``live`` count
    as rows at HOME; ``flexd.planner.moves`` adds those of the plan.

    Args:
        replica_slots: per dim-group, replica slots of every rank (one number) or of each (int64[world]).
        horizon_steps: steps within which a promotion must pay for its migration.
        shape: how the job trains.
        limits: pins, excluded tables.
        exchange: what the job runs, which cannot change while it runs.
        step_seconds: measured wall time of a step, of which the plan states its saving as a share.

    Raises:
        PlanError: the profile is empty, is of other tables or does not know the accesses of a step; the slots are not
            one entry per dim-group; a number is out of range; the limits name what does not exist, or pinned rows do
            not fit.
    """
    if len(replica_slots) != len(keyspace.groups):
        raise PlanError(
            f"{len(replica_slots)} numbers of replica slots for {len(keyspace.groups)} dim-groups",
            remedy="give one number of slots per dim-group",
        )
    cluster, live = cluster.of_layout(layout.nodes, layout.local_ranks), live.copies
    shape, limits = shape or TrainingShape(), limits or PlanLimits()
    limits.check(keyspace)
    slots = [slots_of_ranks(group, layout) for group in replica_slots]
    loads = make_loads(profile, keyspace, layout, shape, limits.replicated_keys(keyspace))
    sums = [LoadSums(load, layout) for load in loads]
    group_limits = [
        GroupLimits(of_group, limits.fixed_tiers(load.keys, keyspace))
        for load, of_group in zip(loads, slots, strict=True)
    ]
    live_tiers = [live.tiers_of(load.keys) for load in loads]
    choice = choose_jointly(sums, cluster, group_limits, live_tiers, horizon_steps, exchange)
    keys = np.concatenate([load.keys for load in loads])
    tiers = np.concatenate(choice.tiers)
    target = Placement.of(keys, tiers, live.version)
    gains = np.concatenate(choice.gains)[tiers != Tier.HOME]
    delta = plan_delta(live, target, gains, keyspace, layout, slots)
    at_home = [np.zeros(len(group.load.keys), np.uint8) for group in sums]
    baselines = {name: joint_cost(sums, at_home, cluster, way) for name, way in BASELINES.items()}
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
        before=_placement_cost(sums, live, keyspace, cluster, exchange),
        after=choice.cost,
        baselines=baselines,
        objective_seconds=choice.objective_seconds,
        lower_bound_seconds=choice.lower_bound_seconds,
        migration_bytes=int(moved_bytes(delta, keyspace, layout).sum()),
        migration_seconds=_migration_seconds(delta, loads, keyspace, layout, cluster),
        cluster=cluster,
        slots=np.stack(slots),
        exchange=exchange,
        home_seconds=choice.home.exposed_seconds,
        live_fits=_fits(live, limits, keyspace, layout, np.stack(slots)),
        step_seconds=step_seconds,
    )


def _fits(live: Placement, limits: PlanLimits, keyspace: KeySpace, layout: RankLayout, slots: Int64Array) -> bool:
    """Return whether a placement keeps to slots, pins and excluded tables."""
    if bool((slots_used(live.keys, live.tiers, keyspace, layout) > slots).any()):
        return False
    keys = np.union1d(live.keys, limits.replicated_keys(keyspace))
    fixed = limits.fixed_tiers(keys, keyspace)
    pinned = fixed != FREE
    wanted = canonical_tiers(fixed[pinned], layout)
    return bool((canonical_tiers(live.tiers_of(keys[pinned]), layout) == wanted).all())


def placement_cost(
    loads: Sequence[GroupLoad],
    placement: Placement,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    exchange: Exchange = Exchange.CHAIN,
) -> CostBreakdown:
    """Return the cost of any placement under these loads.

    Rows above HOME that a load does not list are priced at the mean frequency of its unlisted rows.
    """
    cluster = cluster.of_layout(layout.nodes, layout.local_ranks)
    return _placement_cost([LoadSums(load, layout) for load in loads], placement, keyspace, cluster, exchange)


def _placement_cost(
    sums: Sequence[LoadSums], placement: Placement, keyspace: KeySpace, cluster: Cluster, exchange: Exchange
) -> CostBreakdown:
    group_of = keyspace.group_of(placement.keys)
    listed, unlisted = [], []
    for group in sums:
        tiers = canonical_tiers(placement.tiers[group_of == group.load.group], group.layout)
        listed.append(canonical_tiers(placement.tiers_of(group.load.keys), group.layout))
        more = np.bincount(tiers, minlength=len(Tier)) - np.bincount(listed[-1], minlength=len(Tier))
        more[Tier.HOME] = 0
        unlisted.append(more.astype(np.float64))
    return joint_cost(sums, listed, cluster, exchange, unlisted)


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
