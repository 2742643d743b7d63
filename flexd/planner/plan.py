"""Make a plan: the target placement, its cost against the live one and other strategies, and the delta to it; order the
delta and split it into chunks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from flexd.core import units
from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Delta, Placement, RankLayout, Tier, by_slots, is_rehomed, without_moves
from flexd.planner.model.cost import CostBreakdown, canonical_tiers, joint_cost, migration_seconds
from flexd.planner.model.prices import Exchange, TrafficPhase
from flexd.planner.model.workload import GroupLoad, TrainingShape, make_loads
from flexd.planner.solver.assign import FREE, GroupLimits, PlanLimits, slots_used
from flexd.planner.solver.budget import CopyMemory
from flexd.planner.solver.tiers import Optimum, choose_jointly
from flexd.planner.whole_tables import whole_tables, with_copies
from flexd.sketch.profile import Profile
from flexd.topology.cluster import INTER, Cluster, Collective, Link

_MIN_BLOCK_ROWS = 64
_MAX_BLOCKS = 512


def moved_bytes(delta: Delta, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    """Return int64[n]: bytes of values and optimizer state that each change moves; 0 if it only drops copies. A row
    that leaves a node to which it moved goes by way of its home."""
    copies = np.array([1, layout.nodes, layout.world_size])
    payload = np.array(keyspace.copy_bytes, dtype=np.int64)
    promoted = copies[without_moves(delta.new_tiers)] > copies[without_moves(delta.old_tiers)]
    times = promoted.astype(np.int64) + is_rehomed(delta.old_tiers) + is_rehomed(delta.new_tiers)
    return times * payload[keyspace.group_of(delta.keys)]


def plan_delta(
    live: Placement,
    target: Placement,
    gains: Float64Array,
    keyspace: KeySpace,
    layout: RankLayout,
    replica_slots: Sequence[int],
) -> Delta:
    """Return the changes from ``live`` to ``target``, the most useful first.

    Promotions, and rows that move to other nodes, come by gain per byte; demotions, and rows that come home, as late
    as the slots that those need allow. Every prefix leaves every rank within its slots (unless ``live`` does not: then
    demotions come first until it does).

    Args:
        gains: float64[len(target)], of each row of ``target`` at its tier.
        replica_slots: of a rank, by dim-group.

    Raises:
        PlanError: the target itself takes more slots than there are.
    """
    slots = np.array(replica_slots, dtype=np.int64)[:, None]
    if bool((slots_used(target.keys, target.tiers, keyspace, layout) > slots).any()):
        raise PlanError("the plan takes more replica slots than the ranks have", remedy="plan again with these slots")
    changes = live.delta_to(target)
    up = by_slots(changes.new_tiers) > by_slots(changes.old_tiers)
    demotions, promotions = changes.select(np.flatnonzero(~up)), changes.select(np.flatnonzero(up))
    # By gain per byte moved, equal ones by key.
    gain = gains[np.searchsorted(target.keys, promotions.keys)]
    density = gain / np.maximum(moved_bytes(promotions, keyspace, layout), 1)
    promotions = promotions.select(np.lexsort((promotions.keys, -density)))
    block = max(_MIN_BLOCK_ROWS, -(-len(changes) // _MAX_BLOCKS))
    freed = _cumulative(demotions, block, keyspace, layout)
    taken = _cumulative(promotions, block, keyspace, layout)
    used = slots_used(live.keys, live.tiers, keyspace, layout)
    pieces: list[Delta] = []
    done = 0
    for i in range(1, len(taken)):
        while done + 1 < len(freed) and bool((used + freed[done] + taken[i] > slots).any()):
            pieces.append(demotions.select(slice(done * block, (done + 1) * block)))
            done += 1
        pieces.append(promotions.select(slice((i - 1) * block, i * block)))
    pieces.append(demotions.select(slice(done * block, None)))
    return Delta(
        np.concatenate([piece.keys for piece in pieces]),
        np.concatenate([piece.old_tiers for piece in pieces]),
        np.concatenate([piece.new_tiers for piece in pieces]),
    )


def delta_chunks(
    delta: Delta, keyspace: KeySpace, layout: RankLayout, rows_per_chunk: int, bytes_per_chunk: int
) -> Iterator[Delta]:
    """Yield successive slices of at most ``rows_per_chunk`` rows that move at most ``bytes_per_chunk``.

    One row is always allowed, however large.
    """
    rows_per_chunk = max(1, rows_per_chunk)
    moved = np.cumsum(moved_bytes(delta, keyspace, layout))
    start = 0
    while start < len(delta):
        before = int(moved[start - 1]) if start else 0
        by_bytes = int(np.searchsorted(moved, before + bytes_per_chunk, side="right"))
        end = min(max(by_bytes, start + 1), start + rows_per_chunk, len(delta))
        yield delta.select(slice(start, end))
        start = end


def _cumulative(delta: Delta, block: int, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    """Return int64[blocks + 1, groups, world_size]: slots used (below 0: freed) by the first i blocks."""
    changes = [np.zeros((len(keyspace.groups), layout.world_size), np.int64)]
    for start in range(0, len(delta), block):
        part = delta.select(slice(start, start + block))
        new, old = (slots_used(part.keys, tiers, keyspace, layout) for tiers in (part.new_tiers, part.old_tiers))
        changes.append(new - old)
    return np.cumsum(np.stack(changes), axis=0)


BASELINES = {"row_wise_dedup": Exchange.DIRECT_DEDUP, "two_hop": Exchange.CHAIN}
"""Strategies that every plan is shown beside, all rows at HOME: row-wise with dedup is TorchRec's ``use_index_dedup``
(and flexd's direct exchange), two-hop flexd's own chain. Homes are cyclic (``key % W``): hot rows spread better than in
blocks."""


@dataclass(frozen=True)
class PlanOrigin:
    """The name of a plan, the plan before it, and the reason to make it.

    Attributes:
        plan_id, parent_id: this plan and the one the live placement came from ("" if none).
        topology_generation: of the ranks.
        reason: trigger of the plan.
        created_unix_seconds: given by the caller.
        profile_generation: filled in by ``make_plan``.
    """

    plan_id: str
    parent_id: str
    topology_generation: int
    reason: str
    created_unix_seconds: float
    profile_generation: int = 0


@dataclass(frozen=True)
class PlanCosts:
    """Costs per rank and step at the prices of one cluster.

    Attributes:
        exchange: that the job runs, under which ``before`` and ``after`` are priced.
        before, after: cost of the live placement and of the target.
        baselines: cost of the other strategies by name; ``two_hop`` is the same chain without replicas.
    """

    cluster: Cluster
    exchange: Exchange
    before: CostBreakdown
    after: CostBreakdown
    baselines: Mapping[str, CostBreakdown]

    @property
    def home(self) -> CostBreakdown:
        """Cost of the same exchange with every row at HOME."""
        return self.baselines["two_hop" if self.exchange is Exchange.CHAIN else "row_wise_dedup"]

    @property
    def recommended_exchange(self) -> Exchange:
        """The plan's exchange, or the direct one with dedup if that is cheaper than the plan."""
        dedup = self.baselines["row_wise_dedup"].exposed_seconds
        return Exchange.DIRECT_DEDUP if dedup < self.after.exposed_seconds else self.exchange

    def messages(self) -> list[str]:
        """Return gain and cost of replicas per rank and step against the same exchange without, in sentences."""
        messages = _compared(self)
        dedup, plan = self.baselines["row_wise_dedup"].exposed_seconds, self.after.exposed_seconds
        if dedup < plan:
            messages.append(
                f"row-wise sharding with dedup (exchange 'direct') would take {units.seconds(dedup)} a step, this "
                f"plan {units.seconds(plan)}: latency dominates here. A running job cannot change its exchange; start "
                "the next one with it"
            )
        return messages


@dataclass(frozen=True)
class MemoryOfCopies:
    """Memory of a rank that the copies of a plan take, and the worth of more.

    Attributes:
        used_bytes: on the rank that holds most.
        memory_bytes: that a rank has for copies; None: it has said a number of slots alone.
        twice_saves_seconds: exposed seconds that a step would take less with as much memory again.
    """

    used_bytes: int
    memory_bytes: int | None = None
    twice_saves_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One plan.

    Attributes:
        target: the planned placement; its version is that of the live placement from which the plan starts.
        gains: float64[len(target)], exposed seconds per step each of its rows saves against HOME.
        delta: the changes from the live placement, in the order to apply them.
        row_bytes: int64[len(delta)], values and optimizer state that each change moves.
        migration_seconds: time to move them, bandwidth only.
        optimum: what the optimiser minimised, and what it may miss.
        slots: replica slots of a rank, by dim-group: with a limit of memory, the dim-group's part of it.
        memory: that the copies take.
        live_fits: whether the live placement keeps to slots, pins and excluded tables. If not, the plan is needed
            whatever it saves.
        step_seconds: measured wall time of a step; None if it is not known.
        moves_save_seconds: exposed seconds per step that rows which move to other nodes or back save, beside the costs.
    """

    origin: PlanOrigin
    target: Placement
    gains: Float64Array
    delta: Delta
    row_bytes: Int64Array
    migration_seconds: float
    costs: PlanCosts
    optimum: Optimum
    slots: tuple[int, ...]
    live_fits: bool
    step_seconds: float | None = None
    moves_save_seconds: float = 0.0
    memory: MemoryOfCopies = MemoryOfCopies(0)

    @property
    def plan_id(self) -> str:
        return self.origin.plan_id

    @property
    def migration_bytes(self) -> int:
        """Values and optimizer state of the promoted rows, once each."""
        return int(self.row_bytes.sum())

    @property
    def saved_seconds(self) -> float:
        """Exposed seconds that a step would take less than at the live placement, in the mean over the ranks."""
        return self.costs.before.exposed_seconds - self.costs.after.exposed_seconds + self.moves_save_seconds

    @property
    def saved_share(self) -> float | None:
        """The saving as a share of the measured step; None if that is not known."""
        return self.saved_seconds / self.step_seconds if self.step_seconds else None

    @property
    def promotions(self) -> int:
        """Rows that get copies, or move to another node."""
        return int(np.count_nonzero(by_slots(self.delta.new_tiers) > by_slots(self.delta.old_tiers)))

    @property
    def demotions(self) -> int:
        return len(self.delta) - self.promotions

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Everything but the rows, JSON-able, with units in the names. Worked out once: every scrape shows it."""
        costs = self.costs
        return {
            **asdict(self.origin),
            "cluster": costs.cluster.name,
            "replica_slots": list(self.slots),
            "copies": asdict(self.memory),
            "rows": {tier.name: int(np.count_nonzero(self.target.tiers == tier)) for tier in (Tier.NODE, Tier.DEVICE)},
            "rehomed_rows": len(self.target.rehomed),
            "moves_save_seconds": self.moves_save_seconds,
            "promotions": self.promotions,
            "demotions": self.demotions,
            "migration_bytes": self.migration_bytes,
            "migration_seconds": self.migration_seconds,
            "objective_seconds": self.optimum.objective_seconds,
            "lower_bound_seconds": self.optimum.lower_bound_seconds,
            "gap": self.optimum.gap,
            "saved_seconds": self.saved_seconds,
            "saved_share": self.saved_share,
            "step_seconds": self.step_seconds,
            "before": costs.before.to_dict(),
            "after": costs.after.to_dict(),
            "exchange": {
                "planned": costs.exchange.value,
                "recommended": costs.recommended_exchange.value,
                "recommended_exposed_seconds": min(
                    costs.after.exposed_seconds, costs.baselines["row_wise_dedup"].exposed_seconds
                ),
            },
            "baselines": {name: cost.to_dict() for name, cost in costs.baselines.items()},
            "replication": {"messages": costs.messages()},
        }


def make_plan(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    replica_slots: Sequence[int],
    live: Placement,
    origin: PlanOrigin,
    *,
    horizon_steps: float,
    shape: TrainingShape | None = None,
    limits: PlanLimits | None = None,
    exchange: Exchange = Exchange.CHAIN,
    step_seconds: float | None = None,
    copies_memory_bytes: int | None = None,
) -> Plan:
    """Choose the tier of every row. Deterministic; does not depend on the order in which rows are listed.

    Rows above HOME that the profile no longer lists are demoted, unless they are pinned. Re-homed rows of ``live``
    count as rows at HOME; ``flexd.planner.moves`` adds those of the plan.

    Args:
        replica_slots: of a rank, by dim-group.
        horizon_steps: steps within which a promotion must pay for its migration.
        shape: how the job trains.
        limits: pins, excluded tables.
        exchange: what the job runs, which cannot change while it runs.
        step_seconds: measured wall time of a step, of which the plan states its saving as a share.
        copies_memory_bytes: of a rank, for the copies of all dim-groups together; None: the slots alone limit them.

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
    limits = limits or PlanLimits()
    limits.check(keyspace)
    loads = make_loads(profile, keyspace, layout, shape, limits.replicated_keys(keyspace))
    group_limits = [
        GroupLimits(np.full(layout.world_size, slots, np.int64), limits.fixed_tiers(load.keys, keyspace))
        for load, slots in zip(loads, replica_slots, strict=True)
    ]
    live_tiers = [live.tiers_of(load.keys) for load in loads]
    memory = None if copies_memory_bytes is None else CopyMemory(copies_memory_bytes, keyspace.copy_bytes)
    choice = choose_jointly(loads, cluster, group_limits, live_tiers, horizon_steps, exchange, memory)
    keys = np.concatenate([load.keys for load in loads])
    tiers = np.concatenate(choice.tiers)
    target = Placement.of(keys, tiers, live.version)
    gains, cost = np.concatenate(choice.gains)[tiers != Tier.HOME], choice.cost
    more = whole_tables(target, profile, keyspace, layout, limits, replica_slots, copies_memory_bytes)
    if len(more):
        whole = with_copies(target, more, layout)
        of_whole = placement_cost(loads, whole, keyspace, cluster, exchange)
        if of_whole.exposed_seconds <= cost.exposed_seconds:
            of_rows = np.zeros(len(whole))
            of_rows[np.searchsorted(whole.keys, target.keys)] = gains
            target, cost, gains = whole, of_whole, of_rows
    delta = plan_delta(live, target, gains, keyspace, layout, replica_slots)
    row_bytes, group = moved_bytes(delta, keyspace, layout), keyspace.group_of(delta.keys)
    at_home = [np.zeros(len(load.keys), np.uint8) for load in loads]
    baselines = {name: joint_cost(loads, at_home, cluster, way) for name, way in BASELINES.items()}
    before = placement_cost(loads, live, keyspace, cluster, exchange)
    return Plan(
        origin=replace(origin, profile_generation=profile.generation),
        target=target,
        gains=gains,
        delta=delta,
        row_bytes=row_bytes,
        migration_seconds=sum(
            float(migration_seconds(load, cluster)[delta.new_tiers[(row_bytes > 0) & (group == load.group)]].sum())
            for load in loads
        ),
        costs=PlanCosts(cluster, exchange, before, cost, baselines),
        optimum=choice.optimum,
        slots=tuple(np.maximum(choice.slots, _fullest(target, keyspace, layout)).tolist()),
        live_fits=_fits(live, limits, keyspace, layout, replica_slots, copies_memory_bytes),
        step_seconds=step_seconds,
        memory=MemoryOfCopies(copies_bytes(target, keyspace, layout), copies_memory_bytes, choice.twice_saves_seconds),
    )


def _fullest(placement: Placement, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    fullest: Int64Array = slots_used(placement.keys, placement.tiers, keyspace, layout).max(axis=1)
    return fullest


def copies_bytes(placement: Placement, keyspace: KeySpace, layout: RankLayout) -> int:
    """Return the bytes that copies of a placement take on the rank that holds most."""
    used = slots_used(placement.keys, placement.tiers, keyspace, layout)
    return int((np.array(keyspace.copy_bytes)[:, None] * used).sum(axis=0).max(initial=0))


def _fits(
    live: Placement,
    limits: PlanLimits,
    keyspace: KeySpace,
    layout: RankLayout,
    slots: Sequence[int],
    memory_bytes: int | None,
) -> bool:
    """Return whether a placement keeps to slots, memory, pins and excluded tables."""
    if memory_bytes is not None and copies_bytes(live, keyspace, layout) > memory_bytes:
        return False
    if bool((slots_used(live.keys, live.tiers, keyspace, layout) > np.array(slots)[:, None]).any()):
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
    cluster: Cluster,
    exchange: Exchange = Exchange.CHAIN,
) -> CostBreakdown:
    """Return the cost of any placement under these loads.

    Rows above HOME that a load does not list are priced at the mean frequency of its unlisted rows.
    """
    group_of, layout = keyspace.group_of(placement.keys), loads[0].layout
    listed, unlisted = [], []
    for load in loads:
        tiers = canonical_tiers(placement.tiers[group_of == load.group], layout)
        listed.append(canonical_tiers(placement.tiers_of(load.keys), layout))
        more = np.bincount(tiers, minlength=len(Tier)) - np.bincount(listed[-1], minlength=len(Tier))
        more[Tier.HOME] = 0
        unlisted.append(more.astype(np.float64))
    return joint_cost(loads, listed, cluster.of_layout(layout.nodes, layout.local_ranks), exchange, unlisted)


def _compared(costs: PlanCosts) -> list[str]:
    home, plan, cluster = costs.home, costs.after, costs.cluster
    exchanged, alone, synced = plan.all_to_all_bytes(INTER), home.all_to_all_bytes(INTER), plan.sync_bytes(INTER)
    wire = cluster.link(Link.INTER_NODE).wire_bytes_per_second
    reduce, to_all = (
        cluster.curve(Link.INTER_NODE, collective).bandwidth(size)
        for collective, size in (
            (Collective.ALL_REDUCE, synced), (Collective.ALL_TO_ALL, max(exchanged, alone)),
        )
    )  # fmt: skip
    bandwidth = (
        f"between nodes an all-reduce moves {units.size(reduce)}/s a rank ({reduce / wire:.0%} of the wire), an "
        f"all-to-all {units.size(to_all)}/s ({to_all / wire:.0%}): {reduce / to_all:.2f} times as much"
    )
    if plan.summed_at_home:
        bandwidth = (
            "gradients travel narrower than they are added (in float32), so copies are summed at their homes and "
            "receive the sums by all-to-all; an all-reduce would round at every addition"
        )
    if plan.rows[Tier.NODE] + plan.rows[Tier.DEVICE] == 0:
        return [
            "no row is replicated: at these bandwidths, latencies and budgets no copy pays for its synchronisation "
            f"({bandwidth})"
        ]
    share = cluster.exposed
    ids_seconds = float((home.phase_seconds - plan.phase_seconds)[TrafficPhase.FORWARD_IDS].sum())
    return [
        _saving(home.exposed_seconds - plan.exposed_seconds),
        f"ids: {units.count(home.ids_sent - plan.ids_sent)} requests per rank and step are not sent "
        f"({units.seconds(ids_seconds)})",
        bandwidth[0].upper() + bandwidth[1:],
        f"the forward exchange takes {units.seconds(home.forward_seconds - plan.forward_seconds)} less and "
        f"sends {units.size(_forward_bytes(home) - _forward_bytes(plan))} less between nodes; the backward exchange "
        f"takes {units.seconds(home.backward_seconds - plan.backward_seconds)} less; the synchronisation takes "
        f"{units.seconds(plan.sync_seconds)} "
        f"(exposed: forward {share.forward:.0%}, backward {share.backward:.0%}, synchronisation {share.sync:.0%})",
        f"replication saves time, not bytes: {units.size(alone - exchanged)} of all-to-all "
        f"between nodes become {units.size(synced)} of synchronisation",
    ]


def _saving(seconds: float) -> str:
    against = "exposed communication per step against the same chain with every row at home"
    if seconds >= 0:
        return f"replicas save {units.seconds(seconds)} of {against}"
    return f"replicas cost {units.seconds(-seconds)} more {against}"


def _forward_bytes(cost: CostBreakdown) -> float:
    return float(cost.bytes[:, [TrafficPhase.FORWARD_IDS, TrafficPhase.FORWARD_ROWS], INTER].sum())
