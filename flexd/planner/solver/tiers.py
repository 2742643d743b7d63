"""The optimiser: the tier of every listed row that makes the step's exposed communication shortest.

Time is linear in the rows once the price of a byte is known, so a row's *gain* at a tier (its time at HOME minus its
time there) does not depend on the other rows; only the replica slots tie rows together (``assign``), and the
fixed cost of synchronising a tier at all, which dim-groups share, ties the dim-groups together. There are four sets of
tiers that may be synchronised; each is solved for all dim-groups, and the best is taken. The Lagrangian relaxation
bounds what any tiers could gain.

Which tiers exist: with one node the node owner is the home, so NODE would be HOME; with one rank a node NODE and DEVICE
hold the same copies, and NODE is used.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Self

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.cost import (
    CostBreakdown,
    canonical_tiers,
    decision_gains,
    joint_cost,
    missed_share,
    sync_latency,
    usable_tiers,
)
from flexd.planner.model.prices import Exchange, linear_exposure
from flexd.planner.model.workload import GroupLoad
from flexd.planner.solver.assign import FREE, Assignment, GroupLimits
from flexd.planner.solver.budget import CopyMemory, Demand, Division, divide
from flexd.topology.cluster import Cluster

# At most: prices depend on the message sizes, which depend on the plan.
_PRICE_ROUNDS = 4
# Memory for copies of which a smaller share is used is enough.
_FULL = 0.97


@dataclass(frozen=True)
class Optimum:
    """The minimum that was found, in exposed seconds (mean over the ranks).

    Attributes:
        objective_seconds: with the row bounds, plus migration over the horizon.
        lower_bound_seconds: no tiers within the limits have a smaller objective (at the prices of these tiers'
            messages; for a cluster without size-dependent bandwidths: at all).
        home_seconds: objective of every row at HOME that is not pinned elsewhere.
    """

    objective_seconds: float
    lower_bound_seconds: float
    home_seconds: float

    @property
    def gap(self) -> float:
        """Largest share that may be missed of what any tiers could save against every row at HOME, 0 to 1.

        No copies at all have 1 where some could save anything, and 0 where none can."""
        return missed_share(self.objective_seconds, self.home_seconds, self.lower_bound_seconds)


@dataclass(frozen=True)
class JointChoice:
    """Tiers for all dim-groups.

    Attributes:
        tiers: of each group uint8[h], of the load's listed rows.
        gains: of each group float64[h], exposed seconds a step that the row saves at its tier against HOME (0 at HOME).
        cost: of these tiers.
        slots: of a rank for each group's copies: with memory, what is its part.
        twice_saves_seconds: exposed seconds that a step would take less with as much memory for copies again.
    """

    tiers: tuple[UInt8Array, ...]
    gains: tuple[Float64Array, ...]
    cost: CostBreakdown
    optimum: Optimum
    slots: tuple[int, ...]
    twice_saves_seconds: float = 0.0


def choose_jointly(
    loads: Sequence[GroupLoad],
    cluster: Cluster,
    limits: Sequence[GroupLimits],
    live_tiers: Sequence[UInt8Array],
    horizon_steps: float,
    exchange: Exchange = Exchange.CHAIN,
    memory: CopyMemory | None = None,
) -> JointChoice:
    """The best tiers for all dim-groups within their limits.

    A row that is now below a tier must pay with its lower access bound, and pay for its migration within
    ``horizon_steps``; a row that is there now stays as long as its upper bound pays. So rows near the threshold do not
    flap. The result never costs more (in the mean over the ranks) than the same exchange with every row at HOME and
    pinned rows at their pins, and changes nothing that fits unless the change pays by this measure.

    Args:
        live_tiers: of each group uint8[h], tiers of the listed rows now.
        memory: of a rank for the copies of all dim-groups; None: the slots alone are limits.

    Raises:
        PlanError: a horizon that is not above 0, or pinned rows that do not fit.
    """
    if not horizon_steps > 0:
        raise PlanError(f"horizon_steps: {horizon_steps}", remedy="give a number of steps above 0")
    layout = loads[0].layout
    live = [canonical_tiers(tiers, layout) for tiers in live_tiers]
    home = joint_cost(loads, [np.zeros(len(load.keys), np.uint8) for load in loads], cluster, exchange)
    linear = linear_exposure(cluster, home.phase_seconds.sum(axis=1))
    problem = _Problem(tuple(loads), cluster, linear, tuple(limits), tuple(live), horizon_steps, exchange, memory)
    sent = problem.first_sizes(home)
    best: JointChoice | None = None
    for _ in range(1 if cluster.is_affine else _PRICE_ROUNDS):
        choice = problem.solve(sent)
        if best is None or choice.optimum.objective_seconds < best.optimum.objective_seconds:
            best = choice
        sizes = choice.cost.bytes
        if np.array_equal(np.where(sizes > 0, sizes, sent), sent):
            break
        sent = np.where(sizes > 0, sizes, sent)
    assert best is not None  # noqa: S101
    return replace(best, twice_saves_seconds=problem.twice_saves(best, sent))


@dataclass(frozen=True)
class _Group:
    """One dim-group at given prices."""

    load: GroupLoad
    assignment: Assignment
    plain: Float64Array
    live: UInt8Array

    @cached_property
    def trained(self) -> BoolArray | None:
        """bool[h]; None if all rows are."""
        trained = self.load.listed.trained
        return None if trained is None else trained > 0

    def allowing(self, tiers: frozenset[Tier]) -> Float64Array:
        """float64[tier, h]: the gains, with -inf at other tiers than these. Rows never synchronised may take any."""
        decision = self.assignment.decision
        usable = self.assignment.allowed
        if len(usable) == 2 and set(usable) <= tiers:
            return decision
        decision = decision.copy()
        for tier in (Tier.NODE, Tier.DEVICE):
            if tier not in tiers or tier not in usable:
                closed = slice(None) if self.trained is None or tier not in usable else self.trained
                decision[tier, closed] = -np.inf
        return decision

    def demand(self, tiers: frozenset[Tier], copy_bytes: int) -> Demand:
        """Return the rows that gain if only rows at these tiers are synchronised, beside the pinned ones."""
        decision, limits = self.allowing(tiers), self.assignment.limits
        rows = np.flatnonzero((np.maximum(decision[Tier.NODE], decision[Tier.DEVICE]) > 0) & (limits.fixed == FREE))
        room = int(limits.slots.min()) - self.pinned_slots
        return Demand(decision[Tier.NODE, rows], decision[Tier.DEVICE, rows], copy_bytes, max(room, 0))

    @cached_property
    def pinned_slots(self) -> int:
        """Slots of the fullest rank that pinned rows take."""
        return int(self.load.layout.replica_slots_used(self.load.keys, self.assignment.base).max(initial=0))

    def with_slots(self, slots: int) -> Self:
        """Return the same with so many slots of each rank for rows that are not pinned."""
        limits = self.assignment.limits
        given = GroupLimits(np.full_like(limits.slots, self.pinned_slots + slots), limits.fixed)
        return replace(self, assignment=replace(self.assignment, limits=given))

    def total(self, gains: Float64Array, tiers: UInt8Array) -> float:
        """Gains of the rows that are not pinned."""
        chosen = np.flatnonzero((tiers != self.assignment.base) & (tiers != Tier.HOME))
        return float(gains[tiers[chosen], chosen].sum())

    def synced(self, tiers: UInt8Array) -> frozenset[Tier]:
        """Tiers above HOME that hold trained rows."""
        at = tiers if self.trained is None else tiers[self.trained]
        return frozenset(tier for tier in (Tier.NODE, Tier.DEVICE) if bool((at == tier).any()))

    def solve(self, tiers: frozenset[Tier]) -> tuple[UInt8Array, float]:
        """(tiers of the rows, the most they could gain) if only rows at these tiers are synchronised."""
        chosen, bound = self.assignment.best(self.allowing(tiers))
        live_gain = self.total(self.assignment.decision, self.live)
        if (
            live_gain >= self.total(self.assignment.decision, chosen)
            and self.live.any()
            and self.synced(self.live) <= tiers
            and self.assignment.limits.fits(self.load.keys, self.live, self.load.layout)
        ):
            chosen, bound = self.live, max(bound, live_gain)
        if self.total(self.plain, chosen) <= 0:
            # Upper bounds may keep rows that the estimates would not; not if nothing is won by them together.
            chosen = self.assignment.base
        return chosen, bound


@dataclass(frozen=True)
class _Problem:
    loads: tuple[GroupLoad, ...]
    cluster: Cluster
    linear: Cluster
    """Its exposure is that of small changes of all rows at HOME: gains are added up by it."""
    limits: tuple[GroupLimits, ...]
    live: tuple[UInt8Array, ...]
    horizon_steps: float
    exchange: Exchange
    memory: CopyMemory | None

    @property
    def layout(self) -> RankLayout:
        return self.loads[0].layout

    def cost(self, tiers: Sequence[UInt8Array]) -> CostBreakdown:
        return joint_cost(self.loads, tiers, self.cluster, self.exchange)

    def first_sizes(self, home: CostBreakdown) -> Float64Array:
        """Message sizes before any plan: the exchange with all rows at HOME, the sync of as many rows as fit."""
        sizes = home.bytes.copy()
        if self.cluster.is_affine:
            return sizes
        for tier in usable_tiers(self.layout, self.exchange):
            filled = []
            for load, limits in zip(self.loads, self.limits, strict=True):
                tiers = np.zeros(len(load.keys), np.uint8)
                tiers[np.argsort(-load.listed.accesses, kind="stable")[: int(limits.slots.min(initial=0))]] = tier
                filled.append(tiers)
            sizes[tier] = self.cost(filled).bytes[tier]
        return sizes

    def fixed_seconds(self, synced: frozenset[Tier]) -> float:
        """Exposed latency of synchronising these tiers."""
        return sync_latency(self.loads, self.cluster, self.exchange, self.linear.exposed, synced)

    def sets_of_tiers(self, pinned: frozenset[Tier], frozen: bool) -> Iterator[frozenset[Tier]]:
        """Sets of tiers that may be synchronised; the empty one matters only to rows that are not."""
        usable = usable_tiers(self.layout, self.exchange)
        for size in range(0 if frozen or pinned else 1, len(usable) + 1):
            for chosen in combinations(usable, size):
                if pinned <= frozenset(chosen) or size == len(usable):
                    yield frozenset(chosen) | pinned

    def groups(self, sent: Float64Array) -> list[_Group]:
        usable = usable_tiers(self.layout, self.exchange)
        result = []
        for load, limits, live in zip(self.loads, self.limits, self.live, strict=True):
            decision, plain = decision_gains(load, live, self.linear, sent, self.exchange, self.horizon_steps)
            fixed = np.where(limits.fixed == FREE, FREE, canonical_tiers(limits.fixed % len(Tier), self.layout))
            limits = GroupLimits(limits.slots, fixed.astype(np.uint8))
            result.append(_Group(load, Assignment(self.layout, load.keys, decision, limits, usable), plain, live))
        return result

    def divided(self, groups: Sequence[_Group], tiers: frozenset[Tier], times: int = 1) -> Division | None:
        """Return the slots of each dim-group within ``times`` the memory; None without a limit of memory."""
        if self.memory is None:
            return None
        sizes = self.memory.copy_bytes
        left = times * self.memory.memory_bytes - sum(
            group.pinned_slots * size for group, size in zip(groups, sizes, strict=True)
        )
        if left < 0:
            raise PlanError(
                "the pinned rows take more memory than there is for copies",
                remedy="pin fewer rows, or raise copies_memory_bytes of the collection",
            )
        demands = [group.demand(tiers, size) for group, size in zip(groups, sizes, strict=True)]
        if times > 1:
            demands = [replace(demand, room=len(demand.node)) for demand in demands]
        return divide(demands, self.layout, left)

    def twice_saves(self, choice: JointChoice, sent: Float64Array) -> float:
        """Return the exposed seconds that a step would take less with twice the memory, and with slots for it."""
        if self.memory is None:
            return 0.0
        used = sum(
            size * int(self.layout.replica_slots_used(load.keys, tiers).max(initial=0))
            for load, tiers, size in zip(self.loads, choice.tiers, self.memory.copy_bytes, strict=True)
        )
        if used < _FULL * self.memory.memory_bytes:
            return 0.0
        groups = self.groups(sent)
        synced = (group.synced(tiers) for group, tiers in zip(groups, choice.tiers, strict=True))
        open_tiers = frozenset[Tier]().union(*synced) or frozenset(usable_tiers(self.layout, self.exchange))
        more = self.divided(groups, open_tiers, times=2)
        assert more is not None  # noqa: S101
        tiers = [group.with_slots(n).solve(open_tiers)[0] for group, n in zip(groups, more.slots, strict=True)]
        return max(0.0, choice.cost.exposed_seconds - self.cost(tiers).exposed_seconds)

    def solve(self, sent: Float64Array) -> JointChoice:
        groups = self.groups(sent)
        home_tiers = [group.assignment.base for group in groups]
        home = self.cost(home_tiers)
        pinned = frozenset[Tier]().union(*(group.synced(group.assignment.base) for group in groups))
        pinned_seconds = self.fixed_seconds(pinned)
        best_tiers, best_cost, best_objective, best_value = home_tiers, home, home.exposed_seconds, 0.0
        best_within: Sequence[_Group] | None = None
        bound = 0.0
        for tiers_open in self.sets_of_tiers(pinned, any(group.trained is not None for group in groups)):
            division, within = self.divided(groups, tiers_open), groups
            if division is not None:
                within = [group.with_slots(slots) for group, slots in zip(groups, division.slots, strict=True)]
            best_within = best_within or within
            solved = [group.solve(tiers_open) for group in within]
            tiers = [chosen for chosen, _ in solved]
            fixed = self.fixed_seconds(tiers_open) - pinned_seconds
            most = sum(of_group for _, of_group in solved)
            bound = max(bound, (most if division is None or division.bound is None else division.bound) - fixed)
            if all(chosen is group.assignment.base for chosen, group in zip(tiers, within, strict=True)):
                continue
            cost = self.cost(tiers)
            decided = sum(g.total(g.assignment.decision, t) for g, t in zip(groups, tiers, strict=True))
            plain = sum(g.total(g.plain, t) for g, t in zip(groups, tiers, strict=True))
            objective = cost.exposed_seconds + (plain - decided)
            if objective < best_objective and cost.exposed_seconds < home.exposed_seconds:
                synced = frozenset[Tier]().union(*(g.synced(t) for g, t in zip(groups, tiers, strict=True)))
                best_value = decided - (self.fixed_seconds(synced | pinned) - pinned_seconds)
                best_tiers, best_cost, best_objective, best_within = tiers, cost, objective, within
        if not math.isinf(self.cluster.exposed.cover_seconds):
            best_value = home.exposed_seconds - best_objective  # at most the sum of the gains
        gains = (
            np.take_along_axis(group.plain, chosen[None, :].astype(np.int64), axis=0)[0]
            for group, chosen in zip(groups, best_tiers, strict=True)
        )
        optimum = Optimum(best_objective, best_objective - max(bound - best_value, 0.0), home.exposed_seconds)
        slots = tuple(int(group.assignment.limits.slots.min()) for group in best_within or groups)
        return JointChoice(tuple(best_tiers), tuple(gains), best_cost, optimum, slots)
