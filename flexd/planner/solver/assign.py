"""Tiers for the rows of one dim-group within every rank's slots, once each row's gain at each tier is known.

The Lagrangian relaxation of the slots gives the price of a slot, and an upper bound of the gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.placement import RankLayout, Tier
from flexd.planner.solver.exact import best_core, best_within_slots, core_rows
from flexd.planner.solver.limits import FREE, GroupLimits

_SMALL_PROBLEM_ROWS = 20_000
"""Up to so many rows more prices are tried, and the last slots are packed exactly; beyond, one row hardly counts."""
_PRICE_FACTORS = (0.5, 0.8, 1.25, 2.0)
_UNEVEN_STEPS = 8
_BISECTIONS = 48


@dataclass(frozen=True)
class Assignment:
    """Choose tiers for the rows that can gain; the others stay where their pin or HOME has them.

    Attributes:
        keys: int64[h], all listed rows.
        decision: float64[tier, h] gains; HOME is 0.
        allowed: tiers above HOME that rows may take at all.

    Raises (``base``):
        PlanError: the pinned rows alone take more slots than there are.
    """

    layout: RankLayout
    keys: Int64Array
    decision: Float64Array
    limits: GroupLimits
    allowed: tuple[Tier, ...]

    @cached_property
    def base(self) -> UInt8Array:
        """uint8[h]: pinned rows at their tiers, all others at HOME."""
        fixed = self.limits.fixed
        tiers = np.where(fixed == FREE, 0, fixed).astype(np.uint8)
        if not self.limits.fits(self.keys, tiers, self.layout):
            raise PlanError(
                "the pinned rows take more replica slots than there are",
                remedy="pin fewer rows, or raise the replica slots of the ranks",
            )
        return tiers

    def best(self, decision_of: Float64Array) -> tuple[UInt8Array, float]:
        """(uint8[h] tiers within all limits, the most that any such tiers gain).

        Args:
            decision_of: float64[tier, h] like ``decision``, with -inf where a tier is not allowed this time.
        """
        gains = np.maximum(decision_of[Tier.NODE], decision_of[Tier.DEVICE]) > 0
        rows = np.flatnonzero(gains & (self.limits.fixed == FREE))
        tiers = self.base.copy()
        if not len(rows) or not self.allowed:
            return tiers, 0.0
        slots = self.limits.slots - self.layout.replica_slots_used(self.keys, self.base)
        part = _GainingRows(self.layout, self.keys[rows], np.ascontiguousarray(decision_of[:, rows]), slots)
        chosen, bound = part.best(self.allowed)
        tiers[rows] = chosen
        return tiers, bound


@dataclass(frozen=True)
class _GainingRows:
    """Rows that gain at some tier, and the slots that are free for them."""

    layout: RankLayout
    keys: Int64Array
    decision: Float64Array
    slots: Int64Array

    @cached_property
    def home(self) -> Int64Array:
        return self.layout.home_rank(self.keys)

    @property
    def few(self) -> bool:
        return len(self.keys) <= _SMALL_PROBLEM_ROWS

    @cached_property
    def exact_rows(self) -> int:
        """Number of rows that can be chosen exactly."""
        return core_rows(self.layout.world_size)

    def gain(self, tiers: UInt8Array) -> float:
        return float(np.take_along_axis(self.decision, tiers[None, :].astype(np.int64), axis=0).sum())

    def best(self, allowed: tuple[Tier, ...]) -> tuple[UInt8Array, float]:
        world = self.layout.world_size
        has = [tier for tier in allowed if bool((self.decision[tier] > 0).any())]
        node_slots, device_slots = self.layout.nodes - 1.0, world - 1.0
        all_slots = float(self.slots.sum())
        node, device = self.decision[Tier.NODE], self.decision[Tier.DEVICE]
        price, bound = best_price(node, device, node_slots, device_slots, all_slots)
        if len(has) == 1:
            bound = single_tier_bound(
                self.decision[has[0]], all_slots / (node_slots if has[0] == Tier.NODE else device_slots)
            )
        best, most = np.zeros(len(self.keys), np.uint8), 0.0
        for tiers in self.candidates(has, price):
            gain = self.gain(tiers)
            if gain > most:
                best, most = tiers, gain
        if len(has) > 1 and self.few and bound > most:
            best, bound = self.refine(best, bound, price)
        return best, max(bound, self.gain(best))

    def refine(self, tiers: UInt8Array, bound: float, price: float) -> tuple[UInt8Array, float]:
        """(uint8[n] tiers no worse than these, bound no looser): the rows nearest to a threshold are chosen exactly."""
        if not self.exact_rows:
            return tiers, bound
        core = np.arange(len(self.keys))
        if len(core) > self.exact_rows:
            core = np.sort(np.argsort(self.margin(price), kind="stable")[: self.exact_rows])
        rest = tiers.copy()
        rest[core] = Tier.HOME
        slots = self.slots - self.layout.replica_slots_used(self.keys, rest)
        found = best_core(self.layout, self.keys[core], self.decision[:, core], slots)
        if found is None:
            return tiers, bound
        rest[core], most = found
        return (
            rest if self.gain(rest) > self.gain(tiers) else tiers,
            min(bound, most) if len(core) == len(self.keys) else bound,
        )

    def margin(self, price: float) -> Float64Array:
        """Return float64[n]: lead of a row's best tier over its second best at this price of a slot."""
        slots = np.array([0.0, self.layout.nodes - 1.0, self.layout.world_size - 1.0])[:, None]
        net = np.sort(self.decision - price * slots, axis=0)
        lead: Float64Array = net[-1] - net[-2]
        return lead

    def candidates(self, has: list[Tier], price: float) -> Iterator[UInt8Array]:
        world = self.layout.world_size
        if len(has) < 2:
            yield self.fit_slots(self.slot_prices(np.zeros(world)))
            return
        node_first = self.slot_prices(np.zeros(world))
        node_first[Tier.DEVICE] = np.inf
        yield self.fit_slots(node_first)
        yield self.fit_slots(self.slot_prices(np.full(world, price)))
        if self.few and price > 0 and len(self.keys) > self.exact_rows:
            for factor in _PRICE_FACTORS:
                yield self.fit_slots(self.slot_prices(np.full(world, price * factor)))
            yield from self.uneven_prices(price)

    def slot_prices(self, of_rank: Float64Array) -> Float64Array:
        """Return float64[tier, world]: price of a row's slots by tier and home, at a price per slot of each rank."""
        by_node = of_rank.reshape(self.layout.nodes, self.layout.local_ranks)
        rail = np.broadcast_to(by_node.sum(axis=0), by_node.shape).reshape(-1)
        return np.stack([np.zeros_like(of_rank), rail - of_rank, of_rank.sum() - of_rank])

    def uneven_prices(self, price: float) -> Iterator[UInt8Array]:
        """Yield tiers at prices that rise on ranks with too many replicas and fall on others (subgradient steps)."""
        of_rank = np.full(self.layout.world_size, price)
        for step in range(1, _UNEVEN_STEPS + 1):
            slot_prices = self.slot_prices(of_rank)
            tiers = (self.decision - slot_prices[:, self.home]).argmax(axis=0).astype(np.uint8)
            excess = self.layout.replica_slots_used(self.keys, tiers) - self.slots
            of_rank = np.maximum(of_rank + price / step * excess / np.maximum(self.slots, 1), 0.0)
            yield self.fit_slots(self.slot_prices(of_rank))

    def fit_slots(self, slot_prices: Float64Array) -> UInt8Array:
        """Return uint8[n] tiers that fit every rank: DEVICE where it is best at these prices, NODE into what is left.

        Args:
            slot_prices: float64[tier, world] by tier and home.
        """
        layout, decision = self.layout, self.decision
        tiers = np.zeros(len(self.keys), np.uint8)
        net = decision - slot_prices[:, self.home]
        device = np.flatnonzero((net.argmax(axis=0) == Tier.DEVICE) & (decision[Tier.DEVICE] > 0))
        if len(device) and layout.local_ranks > 1:
            fits = best_within_slots(decision[Tier.DEVICE, device], self.home[device], self.slots)
            tiers[device[fits]] = Tier.DEVICE
        if layout.nodes == 1:
            return tiers
        free = self.slots - layout.replica_slots_used(self.keys, tiers)
        rest = np.flatnonzero((tiers == Tier.HOME) & (decision[Tier.NODE] > 0))
        rail = self.keys[rest] % layout.local_ranks
        for local in range(layout.local_ranks):
            rows = rest[rail == local]
            if len(rows):
                fits = best_within_slots(
                    decision[Tier.NODE, rows], layout.home_node(self.keys[rows]), free[layout.rail_ranks(local)]
                )
                tiers[rows[fits]] = Tier.NODE
        self.upgrade(tiers)
        return tiers

    def upgrade(self, tiers: UInt8Array) -> None:
        """Raise NODE rows to DEVICE, in place, in the slots that are left: exact, given the rows at NODE.

        Their own rail holds these rows already, so an upgrade takes a slot on every rank of the other rails.
        """
        layout, rows = self.layout, np.flatnonzero(tiers == Tier.NODE)
        more = self.decision[Tier.DEVICE, rows] - self.decision[Tier.NODE, rows]
        rows, more = rows[more > 0], more[more > 0]
        if len(rows) and layout.local_ranks > 1:
            free = self.slots - layout.replica_slots_used(self.keys, tiers)
            least = free.reshape(layout.nodes, layout.local_ranks).min(axis=0)
            fits = best_within_slots(more, self.keys[rows] % layout.local_ranks, least)
            tiers[rows[fits]] = Tier.DEVICE


def best_price(
    node: Float64Array, device: Float64Array, node_slots: float, device_slots: float, slots: float
) -> tuple[float, float]:
    """(price of a slot at which the slots of all ranks together are just used, the most that any tiers within the slots
    gain).

    At any price m, every row takes the tier of the largest gain - m x slots; the sum of those plus m x all slots is at
    least what any tiers within the slots gain.

    Args:
        node, device: float64[n] gains; -inf where the tier is not allowed.
        node_slots, device_slots: slots one row takes on all ranks together.
        slots: of all ranks together.
    """
    wanted = (node > 0) | (device > 0)
    node, device = node[wanted], device[wanted]
    if not len(node):
        return 0.0, 0.0

    def relaxed(price: float) -> tuple[float, float]:
        at_node, at_device = node - price * node_slots, device - price * device_slots
        best = np.maximum(at_node, at_device)
        replicated = best > 0
        devices = np.count_nonzero(replicated & (at_device > at_node))
        nodes = np.count_nonzero(replicated) - devices
        gain = float(best.sum(where=replicated)) + price * slots
        return gain, node_slots * nodes + device_slots * devices

    dual, used = relaxed(0.0)
    if used <= slots:
        return 0.0, dual
    low, high = 0.0, _max_price(node, node_slots, device, device_slots)
    middle = high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        value, used = relaxed(middle)
        dual = min(dual, value)
        low, high = (middle, high) if used > slots else (low, middle)
        if high - low <= 1e-9 * high or used == slots:
            break
    return (middle if used == slots else high), dual


def _max_price(node: Float64Array, node_slots: float, device: Float64Array, device_slots: float) -> float:
    """Return the highest possible price of a slot."""
    at_node = float(node.max()) / node_slots if node_slots > 0 else 0.0
    return max(at_node, float(device.max()) / device_slots, 0.0)


def single_tier_bound(gains: Float64Array, rows: float) -> float:
    """The most that ``rows`` rows at one tier gain; the last may be a fraction of a row."""
    gains = gains[gains > 0]
    if rows >= len(gains):
        return float(gains.sum())
    whole = int(rows)
    best = np.partition(gains, len(gains) - whole - 1)[len(gains) - whole - 1 :]
    return float(best[1:].sum() + (rows - whole) * best[0])
