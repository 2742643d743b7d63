"""Explain the tier of a row: its estimate, its cost in each tier, and the thresholds between tiers.

A row's cost in a tier is linear in its statistics once bytes have a price (``gains``), so it is computed row by
row. Rows depend on each other only through the price of a replica slot: the gain of the least useful replica where
slots ran out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array, Int64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import Homes, KeySpace, homes_of
from flexd.core.placement import Placement, RankLayout, Tier, nodes_of_rehomed
from flexd.planner.model.cost import migration_seconds, row_seconds, sync_latency, usable_tiers
from flexd.planner.model.prices import linear_exposure
from flexd.planner.model.workload import (
    ANYWHERE,
    PER_NODE,
    PER_RANK,
    GroupLoad,
    RowLoads,
    TouchRelation,
    TrainingShape,
    make_loads,
)
from flexd.planner.plan import Plan
from flexd.planner.solver.assign import FREE, PlanLimits, slots_used
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.cluster import Cluster


class TierReason(StrEnum):
    """Reason for the planned tier of a row."""

    SAVES = "saves"
    """Its copies save more than their slots are worth."""
    PINNED = "pinned"
    """The user pinned the row to its tier."""
    EXCLUDED = "excluded"
    """The user excluded its table."""
    NO_GAIN = "no_gain"
    """Copies cost more than they save, at any number of slots."""
    SLOT_PRICE = "slot_price"
    """Copies would save time, but other rows save more with the same slots."""
    MIGRATION = "migration"
    """By the lower bound of its accesses, copies save less than the migration costs."""
    LATENCY = "latency"
    """All rows that would gain save less together than the latency of synchronisation."""


@dataclass(frozen=True)
class RowExplanation:
    """Explanation of one row. Accesses are expected look-ups; seconds are exposed communication per step.

    Attributes:
        place: 1 for the table's most frequent listed row; 0 if the profile does not list it: the mean of the unlisted
            rows stands in then.
        accesses: estimate, lower and upper bound, of the whole job per step.
        touches: presence probabilities u, v and w of docs/cost-model.md, by a rank, by a node and anywhere.
        seconds: float64[3], by tier.
        live, planned: tiers now and if a plan were made now.
        home_rank: of the authoritative copy.
        moved_to: the node in which it lives instead; None if it has not moved.
        source_node_share: shares of its accesses by node, or None if not known.
    """

    row: int
    key: int
    place: int
    accesses: tuple[float, float, float]
    touches: tuple[float, float, float]
    seconds: Float64Array
    live: Tier
    planned: Tier
    reason: TierReason
    home_rank: int
    moved_to: int | None
    source_node_share: tuple[float, ...] | None


@dataclass(frozen=True)
class TierThreshold:
    """Accesses from which a row of the table belongs in a tier, in look-ups of the whole job per step.

    Attributes:
        slots: replica slots that one row takes over all ranks.
        slot_seconds: price of one slot, exposed seconds per step; 0 while there are free ones.
        promote_accesses, demote_accesses: a row below the tier is promoted from the first on; a row of the tier is
            demoted below the second; None if no frequency pays.
    """

    tier: Tier
    slots: int
    slot_seconds: float
    promote_accesses: float | None
    demote_accesses: float | None


@dataclass(frozen=True)
class TableExplanation:
    """Explanation of a table and of the requested rows.

    Attributes:
        live_rows, planned_rows: int64[3], by tier.
        slots_used, slots: of the fullest rank in the table's dim-group, in the plan.
        sync_latency_seconds: fixed exposed cost of synchronising the planned tiers (all dim-groups share it).
    """

    table: str
    rows: int
    accesses_per_step: float
    distinct_rows: float
    coverage: float
    live_rows: Int64Array
    planned_rows: Int64Array
    slots_used: int
    slots: int
    sync_latency_seconds: float
    thresholds: tuple[TierThreshold, ...]
    explained: tuple[RowExplanation, ...]


# Accesses per rank and step among which a threshold is looked for, 64 a factor of ten.
_GRID = np.geomspace(1e-9, 1e3, 769)
_BISECTIONS = 40
# Slots that every rank may have left although they ran out: homes are not spread exactly evenly.
_FREE_SHARE = 0.01


def explain(
    plan: Plan,
    profile: Profile,
    live: Placement,
    keyspace: KeySpace,
    layout: RankLayout,
    *,
    horizon_steps: float,
    table: str,
    rows: Sequence[int] | None = None,
    hottest: int = 0,
    limits: PlanLimits | None = None,
    shape: TrainingShape | None = None,
) -> TableExplanation:
    """Explain rows of one table by the plan that was made from this profile and placement.

    Args:
        horizon_steps, limits, shape: as the plan was made with.
        rows: row ids; None: the ``hottest`` rows of the profile.

    Raises:
        PlanError: unknown table, a row outside it, or a table that nothing was seen of.
    """
    index = keyspace.index.get(table)
    if index is None:
        raise PlanError(f"no table {table!r}", remedy=f"one of {', '.join(keyspace.index)}"[:500])
    seen = profile.tables[index]
    wanted = seen.hot_rows[: max(0, hottest)] if rows is None else np.array(rows, dtype=np.int64)
    if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < seen.rows:
        raise PlanError(f"a row outside table {table!r}", remedy=f"rows are 0 to {seen.rows - 1}")
    if not seen.weight > 0:
        raise PlanError(f"table {table!r} was not looked up yet", remedy="wait until the stream delivers")
    keys = keyspace.keys(index, wanted)
    limits, shape = limits or PlanLimits(), shape or TrainingShape()
    also = np.unique(np.concatenate([keys, limits.replicated_keys(keyspace)]))
    loads = make_loads(profile, keyspace, layout, shape, also)
    group = int(keyspace.group_of(keyspace.first_key[index : index + 1])[0])
    used = slots_used(plan.target.keys, plan.target.tiers, keyspace, layout)[group]
    pricing = _GroupPricing(
        plan, loads, group, homes_of(keyspace, layout), used, horizon_steps, table not in shape.frozen_tables
    )
    fixed = limits.fixed_tiers(pricing.load.keys, keyspace)
    first, end = int(keyspace.first_key[index]), int(keyspace.first_key[index]) + seen.rows
    return TableExplanation(
        table=table,
        rows=seen.rows,
        accesses_per_step=seen.accesses_per_step,
        distinct_rows=seen.distinct_rows,
        coverage=seen.coverage,
        live_rows=_by_tier(live, first, end),
        planned_rows=_by_tier(plan.target, first, end),
        slots_used=int(used.max(initial=0)),
        slots=pricing.slots,
        sync_latency_seconds=pricing.sync_latency(),
        thresholds=pricing.thresholds(),
        explained=pricing.rows(keys, wanted, seen, live, fixed, table in limits.exclude_tables),
    )


def _by_tier(placement: Placement, first: int, end: int) -> Int64Array:
    """Return int64[3]: rows with keys in [first, end), by tier."""
    placement = placement.copies
    start, stop = np.searchsorted(placement.keys, [first, end])
    counts = np.bincount(placement.tiers[start:stop], minlength=len(Tier)).astype(np.int64)
    counts[Tier.HOME] = end - first - counts.sum()
    return counts


@dataclass(frozen=True)
class _GroupPricing:
    """One dim-group at the prices of the plan.

    Attributes:
        homes: of all rows.
        used: int64[world], slots that the plan uses.
        trained: whether the table that is explained is; its group may hold others.
    """

    plan: Plan
    loads: tuple[GroupLoad, ...]
    group: int
    homes: Homes
    used: Int64Array
    horizon_steps: float
    trained: bool

    @property
    def layout(self) -> RankLayout:
        return self.homes.layout

    @property
    def load(self) -> GroupLoad:
        return self.loads[self.group]

    @cached_property
    def factors(self) -> Float64Array:
        """float64[tier, statistic]: exposed seconds at the message sizes of the plan.

        A tier that is not in use has no message; it is priced as if one of the exchange's size went there."""
        costs, sent = self.plan.costs, self.plan.costs.after.bytes.copy()
        largest = costs.baselines["two_hop"].bytes.sum(axis=0).max(initial=0.0)
        for tier in (Tier.NODE, Tier.DEVICE):
            sent[tier][sent[tier] == 0] = largest
        return row_seconds(self.load, self.cluster, sent, costs.exchange)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster with the exposure by which the plan added up gains."""
        return linear_exposure(self.plan.costs.cluster, self.plan.costs.home.phase_seconds.sum(axis=1))

    @cached_property
    def usable(self) -> tuple[Tier, ...]:
        return usable_tiers(self.layout, self.plan.costs.exchange)

    @cached_property
    def slot_counts(self) -> Int64Array:
        """int64[tier]: slots one row takes on all ranks together."""
        return np.array([0, self.layout.nodes - 1, self.layout.world_size - 1], dtype=np.int64)

    @property
    def slots(self) -> int:
        """Replica slots of a rank."""
        return self.plan.slots[self.group]

    @cached_property
    def paid(self) -> Float64Array:
        """float64[tier]: the copying of one row, a step of the horizon."""
        return migration_seconds(self.load, self.plan.costs.cluster) / self.horizon_steps

    @cached_property
    def slot_seconds(self) -> float:
        """Price of a slot at which rows that each take their best tier use as many slots as the plan does.

        It is the Lagrange multiplier of the slots of all ranks together; a single rank's price differs a little,
        because homes are not spread exactly evenly. 0 while every rank has slots left.
        """
        room = self.slots - self.used
        if not self.used.any() or int(room.min()) > 1 + _FREE_SHARE * self.slots:
            return 0.0
        tiers = list(self.usable)
        counts = self.slot_counts[tiers][:, None]
        gains = self.gains(self.load.statistics)[tiers]
        gains = gains[:, (gains > 0).any(axis=0)]
        taken = int(self.used.sum())

        def bought(price: float) -> int:
            net = gains - price * counts
            best = net.argmax(axis=0)
            return int(counts[best, 0][net.max(axis=0, initial=0.0) > 0].sum())

        low, high = 0.0, float((gains / counts).max(initial=0.0))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if bought(middle) > taken else (low, middle)
        return high

    @cached_property
    def relation(self) -> TouchRelation | None:
        """Presence probabilities by accesses in the dim-group; None where nothing is measured."""
        listed = self.load.listed
        if listed.touches is None:
            return None
        return TouchRelation.fit(listed.accesses / self.load.shape.micro_batches, listed.touches, self.layout)

    def gains(self, statistics: Float64Array) -> Float64Array:
        """float64[statistic, n] -> float64[tier, n]: exposed seconds saved against HOME."""
        gains: Float64Array = (self.factors[Tier.HOME] - self.factors) @ statistics
        return gains

    def gains_at(self, accesses: Float64Array) -> Float64Array:
        """float64[n] accesses per rank and step of an un-pooled row of the table -> float64[tier, n]."""
        passes = self.load.shape.micro_batches
        touches = None if self.relation is None else self.relation.touches(accesses / passes)
        trained = None if self.trained else np.zeros(len(accesses))
        return self.gains(self.load.statistics_of(RowLoads(accesses, trained, touches)))

    def sync_latency(self) -> float:
        """Return the fixed exposed seconds of synchronising the tiers that the plan uses, or would use first."""
        used = set[int]()
        for load in self.loads:
            tiers, trained = self.plan.target.tiers_of(load.keys), load.listed.trained
            used |= set(np.unique(tiers if trained is None else tiers[trained > 0]).tolist())
        used = used - {int(Tier.HOME)} or ({int(tier) for tier in self.usable[:1]} if self.trained else used)
        costs = self.plan.costs
        return sync_latency(self.loads, costs.cluster, costs.exchange, self.cluster.exposed, used)

    def thresholds(self) -> tuple[TierThreshold, ...]:
        return tuple(
            TierThreshold(
                tier, int(self.slot_counts[tier]), self.slot_seconds, self._threshold(tier, True),
                self._threshold(tier, False),
            )
            for tier in self.usable
        )  # fmt: skip

    def _pays(self, accesses: Float64Array, tier: Tier, pay: bool) -> BoolArray:
        """Return bool[n]: the tier gains more than its slots (and migration) cost, and more than lower tiers."""
        net = self.gains_at(accesses) - (self.slot_seconds * self.slot_counts + self.paid * pay)[:, None]
        lower = [below for below in self.usable if below < tier]
        most = np.maximum(net[lower].max(axis=0, initial=0.0), 0.0)
        pays: BoolArray = net[tier] > most
        return pays

    def _threshold(self, tier: Tier, pay: bool) -> float | None:
        """Return the least accesses of the job per step at which the tier pays; None if it never does."""
        pays = self._pays(_GRID, tier, pay)
        if not pays.any():
            return None
        first = int(pays.argmax())
        if first == 0:
            return 0.0
        low, high = float(_GRID[first - 1]), float(_GRID[first])
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if bool(self._pays(np.array([middle]), tier, pay)[0]) else (middle, high)
        return high * self.layout.world_size

    def rows(
        self, keys: Int64Array, rows: Int64Array, seen: TableProfile, live: Placement, fixed: UInt8Array,
        excluded: bool,
    ) -> tuple[RowExplanation, ...]:  # fmt: skip
        load = self.load
        at = np.searchsorted(load.keys, keys)
        statistics = load.statistics[:, at]
        seconds, gains = self.factors @ statistics, self.gains(statistics)
        low = np.minimum(self.gains_at(load.bounds[0, at]), gains)
        accesses = np.stack([load.listed.accesses[at], *load.bounds[:, at]]) * self.layout.world_size
        live_tiers, planned = live.copies.tiers_of(keys), self.plan.target.copies.tiers_of(keys)
        moved_to, homes = nodes_of_rehomed(live.tiers_of(keys)), self.homes.home_rank(keys)
        order = np.argsort(seen.hot_rows, kind="stable")
        spot = np.minimum(np.searchsorted(seen.hot_rows[order], rows), max(0, len(order) - 1))
        listed = seen.hot_rows[order[spot]] == rows if len(order) else np.zeros(len(rows), np.bool_)
        shares = None if seen.sources is None or not len(order) else seen.sources.share(order[spot]).tolist()
        return tuple(
            RowExplanation(
                row=int(rows[i]),
                key=int(keys[i]),
                place=int(order[spot[i]]) + 1 if listed[i] else 0,
                accesses=tuple(accesses[:, i].tolist()),
                touches=tuple(statistics[[PER_RANK, PER_NODE, ANYWHERE], i].tolist()),
                seconds=seconds[:, i],
                live=Tier(int(live_tiers[i])),
                planned=Tier(int(planned[i])),
                reason=self._reason(int(planned[i]), gains[:, i], low[:, i], int(fixed[at[i]]) != FREE, excluded),
                home_rank=int(homes[i]),
                moved_to=int(moved_to[i]) if moved_to[i] >= 0 else None,
                source_node_share=tuple(shares[i]) if shares is not None and listed[i] else None,
            )
            for i in range(len(keys))
        )

    def _reason(self, planned: int, gains: Float64Array, low: Float64Array, pinned: bool, excluded: bool) -> TierReason:
        if excluded or pinned:
            return TierReason.EXCLUDED if excluded else TierReason.PINNED
        if planned != Tier.HOME:
            return TierReason.SAVES
        usable = [int(tier) for tier in self.usable]
        if not usable or not (gains[usable] > 0).any():
            return TierReason.NO_GAIN
        if not (low[usable] - self.paid[usable] > 0).any():
            return TierReason.MIGRATION
        if not len(self.plan.target):
            return TierReason.LATENCY
        return TierReason.SLOT_PRICE
