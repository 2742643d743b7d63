"""The optimiser: the tier of every listed row that makes the step's exposed communication shortest.

Time is linear in the rows once the price of a byte is known, so a row's *gain* at a tier (its time at HOME minus its
time there) does not depend on the other rows, and only the replica slots tie them together. A Lagrange multiplier on
slots makes each row's choice independent; bisection on it gives both the mix of tiers and a lower bound on any plan's
time. The slots of each single rank, which differ because homes do, are then met exactly (``quota``).

Which tiers exist: with one node the node owner is the home, so NODE would be HOME; with one rank a node NODE and DEVICE
hold the same copies, and NODE is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.errors import PlanError
from flexd.layout import RankLayout, Tier
from flexd.planner.cost import CostBreakdown, Exchange, exposed_share, group_cost, latencies, prices
from flexd.planner.quota import best_within_slots
from flexd.planner.traffic import chain_traffic, migration_bytes
from flexd.planner.workload import GroupLoad, statistics
from flexd.topology.model import Cluster, Collective, Link

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]

_BISECTIONS = 48
_PRICE_ROUNDS = 4
"""At most: prices depend on the message sizes, which depend on the plan."""
_UNEVEN_STEPS = 24
_FEW_ROWS = 20_000
"""Up to here more multipliers around the best one are tried than pay for themselves with many rows."""


@dataclass(frozen=True)
class TierChoice:
    """Tiers for one dim-group.

    Attributes:
        tiers: uint8[h], of the load's listed rows.
        gains: float64[h], exposed seconds a step that the row saves at its tier against HOME (0 at HOME).
        cost: of these tiers.
        objective_seconds: what was minimised: exposed seconds with the row bounds, plus migration over the horizon.
        lower_bound_seconds: no tiers within the slots have a smaller objective (at the prices of these tiers' messages;
            for a cluster without size-dependent bandwidths: at all).
    """

    tiers: UInt8Array
    gains: Float64Array
    cost: CostBreakdown
    objective_seconds: float
    lower_bound_seconds: float


def usable_tiers(layout: RankLayout) -> tuple[Tier, ...]:
    """The tiers above HOME that differ from the others in this layout."""
    tiers = []
    if layout.nodes > 1:
        tiers.append(Tier.NODE)
    if layout.local_ranks > 1:
        tiers.append(Tier.DEVICE)
    return tuple(tiers)


def canonical_tiers(tiers: UInt8Array, layout: RankLayout) -> UInt8Array:
    """The same copies named by usable tiers: NODE of one node is HOME, DEVICE of one rank a node is NODE."""
    names = np.array([Tier.HOME, Tier.NODE, Tier.DEVICE], np.uint8)
    if layout.nodes == 1:
        names[Tier.NODE] = Tier.HOME
    if layout.local_ranks == 1:
        names[Tier.DEVICE] = names[Tier.NODE]
    return names[tiers]


def row_seconds(load: GroupLoad, layout: RankLayout, cluster: Cluster, sent: Float64Array) -> Float64Array:
    """float64[tier, statistic]: exposed seconds of one row as factors of its statistics.

    Args:
        sent: float64[3, 5, 3] bytes by (tier, phase, link): the message sizes at which bytes are priced.
    """
    table = chain_traffic(layout, load.row_bytes)
    seconds: Float64Array = np.einsum("tpls,tpl,p->ts", table, prices(sent, cluster), exposed_share(cluster))
    return seconds


def migration_seconds(load: GroupLoad, layout: RankLayout, cluster: Cluster) -> Float64Array:
    """float64[tier]: time to bring one row up to the tier, bandwidth only."""
    link = Link.INTER_NODE if layout.nodes > 1 else Link.INTRA_NODE
    curve = cluster.curve(link, Collective.ALL_GATHER)
    sizes = migration_bytes(layout, load.row_bytes + load.state_bytes)
    # Rows migrate in large messages: the curve's last point.
    return sizes * curve.seconds_per_byte(curve.points[-1][0])


def choose_tiers(
    load: GroupLoad,
    layout: RankLayout,
    cluster: Cluster,
    replica_slots: int,
    live_tiers: UInt8Array,
    horizon_steps: float,
) -> TierChoice:
    """The best tiers for one dim-group within ``replica_slots`` on every rank.

    A row that is now below a tier must pay with its lower access bound, and pay for its migration within
    ``horizon_steps``; a row that is there now stays as long as its upper bound pays. So rows near the threshold do not
    flap. The result never costs more than the same chain with every row at HOME, and changes nothing that fits unless
    the change pays by this measure.

    Args:
        live_tiers: uint8[h], tiers of the listed rows now.

    Raises:
        PlanError: negative slots, or a horizon that is not above 0.
    """
    if replica_slots < 0:
        raise PlanError(f"replica slots: {replica_slots}", remedy="give at least 0")
    if not horizon_steps > 0:
        raise PlanError(f"horizon_steps: {horizon_steps}", remedy="give a number of steps above 0")
    problem = _Problem(load, layout, cluster, replica_slots, canonical_tiers(live_tiers, layout), horizon_steps)
    sent = problem.first_sizes()
    best: _Solution | None = None
    for _ in range(1 if cluster.is_affine else _PRICE_ROUNDS):
        solution = problem.solve(sent)
        if best is None or solution.objective < best.objective:
            best = solution
        sizes = solution.cost.bytes
        if np.array_equal(np.where(sizes > 0, sizes, sent), sent):
            break
        sent = np.where(sizes > 0, sizes, sent)
    if best is None:
        raise PlanError("no tiers were tried", remedy="report this")
    gains = np.take_along_axis(best.plain_gains, best.tiers[None, :].astype(np.int64), axis=0)[0]
    return TierChoice(best.tiers, gains, best.cost, best.objective, min(best.lower_bound, best.objective))


@dataclass(frozen=True)
class _Solution:
    tiers: UInt8Array
    cost: CostBreakdown
    objective: float
    lower_bound: float
    plain_gains: Float64Array


@dataclass(frozen=True)
class _Problem:
    load: GroupLoad
    layout: RankLayout
    cluster: Cluster
    slots: int
    live: UInt8Array
    horizon_steps: float

    @cached_property
    def listed(self) -> Float64Array:
        return statistics(self.load.accesses, self.layout)

    def cost(self, tiers: UInt8Array) -> CostBreakdown:
        return group_cost(self.load, tiers, self.layout, self.cluster, listed=self.listed)

    def first_sizes(self) -> Float64Array:
        """Message sizes before any plan: the exchange with all rows at HOME, the sync of as many rows as fit."""
        home = np.zeros(len(self.load.keys), np.uint8)
        sizes = self.cost(home).bytes
        hottest = np.argsort(-self.load.accesses, kind="stable")[: self.slots]
        for tier in usable_tiers(self.layout):
            tiers = home.copy()
            tiers[hottest] = tier
            sizes[tier] = self.cost(tiers).bytes[tier]
        return sizes

    def gains(self, sent: Float64Array) -> tuple[Float64Array, Float64Array]:
        """(decision gains with bounds and migration, plain gains of the estimates), both float64[tier, h]."""
        factors = row_seconds(self.load, self.layout, self.cluster, sent)
        factors = factors[Tier.HOME] - factors
        plain = factors @ self.listed
        low, high = (
            factors @ statistics(accesses, self.layout)
            for accesses in (self.load.accesses_lower, self.load.accesses_upper)
        )
        # A gain need not grow with the accesses, so the bound is taken of both ends.
        low, high = np.minimum(low, plain), np.maximum(high, plain)
        paid = (migration_seconds(self.load, self.layout, self.cluster) / self.horizon_steps)[:, None]
        decision = low - paid
        decision[Tier.HOME] = 0.0
        at_node, at_device = self.live == Tier.NODE, self.live == Tier.DEVICE
        decision[Tier.NODE, at_node | at_device] = high[Tier.NODE, at_node | at_device]
        decision[Tier.DEVICE, at_device] = high[Tier.DEVICE, at_device]
        step = np.minimum(low[Tier.DEVICE] - low[Tier.NODE], plain[Tier.DEVICE] - plain[Tier.NODE])
        from_node = high[Tier.NODE] + step - paid[Tier.DEVICE]
        decision[Tier.DEVICE, at_node] = from_node[at_node]
        return decision, plain

    def solve(self, sent: Float64Array) -> _Solution:
        decision, plain = self.gains(sent)
        best = np.zeros(len(self.load.keys), np.uint8)
        best_cost = self.cost(best)
        base = best_objective = best_cost.exposed_seconds
        candidates, least_change = self.candidates(decision)
        caution = plain - decision
        for tiers in candidates:
            cost = self.cost(tiers)
            extra = np.take_along_axis(caution, tiers[None, :].astype(np.int64), axis=0).sum()
            objective = cost.exposed_seconds + float(extra)
            if objective < best_objective and cost.exposed_seconds < base:
                best, best_cost, best_objective = tiers, cost, objective
        return _Solution(best, best_cost, best_objective, base + least_change, plain)

    def fixed_seconds(self, present: frozenset[int]) -> float:
        """Exposed latency of synchronising these tiers."""
        share = exposed_share(self.cluster)
        with_sync = latencies(self.cluster, self.layout, Exchange.CHAIN, np.array(sorted(present), np.uint8))
        without = latencies(self.cluster, self.layout, Exchange.CHAIN, np.empty(0, np.uint8))
        return float(share @ (with_sync - without).sum(axis=1))

    def candidates(self, decision: Float64Array) -> tuple[list[UInt8Array], float]:
        """Tiers within the slots to choose from, and the least any such tiers add to the cost of HOME (at most 0)."""
        usable, world = usable_tiers(self.layout), self.layout.world_size
        result: list[UInt8Array] = []
        bound = 0.0
        if int(self.layout.replica_slots_used(self.load.keys, self.live).max(initial=0)) <= self.slots:
            result.append(self.live)
        for tier in usable:
            kept = decision.copy()
            kept[[other for other in Tier if other not in (Tier.HOME, tier)]] = -np.inf
            bound = min(bound, -self.most_of_one(decision[tier], tier) + self.fixed_seconds(frozenset({int(tier)})))
            result.append(self.within_slots(kept, self.slot_prices(np.zeros(world))))
        if len(usable) == 2:
            multiplier, dual = self.multiplier(decision)
            bound = min(bound, -dual + self.fixed_seconds(frozenset(int(tier) for tier in usable)))
            node_first = self.slot_prices(np.zeros(world))
            node_first[Tier.DEVICE] = np.inf
            result.append(self.within_slots(decision, node_first))
            few = len(self.load.keys) <= _FEW_ROWS
            for factor in np.geomspace(0.5, 2.0, 33) if few else (1.0,):
                result.append(self.within_slots(decision, self.slot_prices(np.full(world, multiplier * factor))))
            if few and multiplier > 0:
                result.extend(self.uneven_prices(decision, multiplier))
        return result, bound

    def slot_counts(self) -> Float64Array:
        """float64[tier]: slots one row takes on all ranks together."""
        return np.array([0.0, self.layout.nodes - 1.0, self.layout.world_size - 1.0])

    def most_of_one(self, gains: Float64Array, tier: Tier) -> float:
        """The most that rows at this one tier gain if only the slots of all ranks together are limited."""
        rows = self.slots * self.layout.world_size / self.slot_counts()[tier]
        gains = gains[gains > 0]
        if rows >= len(gains):
            return float(gains.sum())
        whole = int(rows)
        best = np.partition(gains, len(gains) - whole - 1)[len(gains) - whole - 1 :]
        return float(best[1:].sum() + (rows - whole) * best[0])

    def multiplier(self, decision: Float64Array) -> tuple[float, float]:
        """(price of a slot at which the slots of all ranks together are just used, dual value there).

        The dual value is the most that any tiers within the slots gain; this holds at every price, and the smallest
        one seen is returned.
        """
        node, device = decision[Tier.NODE], decision[Tier.DEVICE]
        wanted = (node > 0) | (device > 0)
        node, device = node[wanted], device[wanted]
        _, node_slots, device_slots = self.slot_counts()
        budget = float(self.slots) * self.layout.world_size

        def relaxed(price: float) -> tuple[float, float]:
            at_node, at_device = node - price * node_slots, device - price * device_slots
            best = np.maximum(at_node, at_device)
            replicated = best > 0
            devices = np.count_nonzero(replicated & (at_device > at_node))
            nodes = np.count_nonzero(replicated) - devices
            gain = float(best.sum(where=replicated)) + price * budget
            return gain, node_slots * nodes + device_slots * devices

        dual, used = relaxed(0.0)
        if used <= budget:
            return 0.0, dual
        low, high = 0.0, max(float(node.max()) / node_slots, float(device.max()) / device_slots)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            value, used = relaxed(middle)
            dual = min(dual, value)
            low, high = (middle, high) if used > budget else (low, middle)
            if high - low <= 1e-9 * high or used == budget:
                break
        return middle if used == budget else high, dual

    def slot_prices(self, of_rank: Float64Array) -> Float64Array:
        """float64[tier, world]: what the slots of a row cost by tier and home, at a price per slot of each rank."""
        by_node = of_rank.reshape(self.layout.nodes, self.layout.local_ranks)
        rail = np.broadcast_to(by_node.sum(axis=0), by_node.shape).reshape(-1)
        return np.stack([np.zeros_like(of_rank), rail - of_rank, of_rank.sum() - of_rank])

    def uneven_prices(self, decision: Float64Array, price: float) -> Iterator[UInt8Array]:
        """Tiers at slot prices that rise on ranks with too many replicas and fall on the others (subgradient steps)."""
        layout, keys = self.layout, self.load.keys
        homes = layout.home_rank(keys)
        of_rank = np.full(layout.world_size, price)
        for step in range(1, _UNEVEN_STEPS + 1):
            tiers = (decision - self.slot_prices(of_rank)[:, homes]).argmax(axis=0).astype(np.uint8)
            excess = layout.replica_slots_used(keys, tiers) - self.slots
            of_rank = np.maximum(of_rank + price / step * excess / max(self.slots, 1), 0.0)
            yield self.within_slots(decision, self.slot_prices(of_rank))

    def within_slots(self, decision: Float64Array, slot_prices: Float64Array) -> UInt8Array:
        """uint8[h] tiers that fit every rank: DEVICE where it is best at these prices, NODE into what is left."""
        layout, keys = self.layout, self.load.keys
        tiers = np.zeros(len(keys), np.uint8)
        net = decision - slot_prices[:, layout.home_rank(keys)]
        device = np.flatnonzero((net.argmax(axis=0) == Tier.DEVICE) & (decision[Tier.DEVICE] > 0))
        world = layout.world_size
        if len(device) and layout.local_ranks > 1:
            fits = best_within_slots(
                decision[Tier.DEVICE, device], keys[device] % world, np.full(world, self.slots, np.int64)
            )
            tiers[device[fits]] = Tier.DEVICE
        if layout.nodes == 1:
            return tiers
        free = self.slots - layout.replica_slots_used(keys, tiers)
        rest = np.flatnonzero((tiers == Tier.HOME) & (decision[Tier.NODE] > 0))
        rail = keys[rest] % layout.local_ranks
        for local in range(layout.local_ranks):
            rows = rest[rail == local]
            if len(rows):
                fits = best_within_slots(
                    decision[Tier.NODE, rows], layout.home_node(keys[rows]), free[layout.rail_ranks(local)]
                )
                tiers[rows[fits]] = Tier.NODE
        self.upgrade(tiers, decision)
        return tiers

    def upgrade(self, tiers: UInt8Array, decision: Float64Array) -> None:
        """Raises NODE rows to DEVICE, in place, in the slots that are left: exact, given the rows at NODE.

        Their own rail holds these rows already, so an upgrade takes a slot on every rank of the other rails.
        """
        layout, keys = self.layout, self.load.keys
        more = decision[Tier.DEVICE] - decision[Tier.NODE]
        rows = np.flatnonzero((tiers == Tier.NODE) & (more > 0))
        if len(rows) and layout.local_ranks > 1:
            free = self.slots - layout.replica_slots_used(keys, tiers)
            least = free.reshape(layout.nodes, layout.local_ranks).min(axis=0)
            fits = best_within_slots(more[rows], keys[rows] % layout.local_ranks, least)
            tiers[rows[fits]] = Tier.DEVICE
