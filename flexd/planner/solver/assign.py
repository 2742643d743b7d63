"""Tiers for the rows of one dim-group within every rank's slots, once each row's gain at each tier is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout, Tier
from flexd.planner.solver.exact import Core, best_within_slots, core_rows
from flexd.planner.solver.limits import FREE, GroupLimits
from flexd.planner.solver.relaxation import best_price, single_tier_bound

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]

_SMALL_PROBLEM_ROWS = 20_000
"""Up to so many rows more prices are tried, and the last slots are packed exactly; beyond, one row hardly counts."""
_PRICE_FACTORS = (0.5, 0.8, 1.25, 2.0)
_UNEVEN_STEPS = 8


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
        found = Core(self.layout, self.keys[core], self.decision[:, core], slots).best()
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
        """Return uint8[n] tiers that fit every rank."""
        return _fill(self.layout, self.keys, self.decision, self.slots, slot_prices)


def _fill(
    layout: RankLayout, keys: Int64Array, decision: Float64Array, slots: Int64Array, slot_prices: Float64Array
) -> UInt8Array:
    """Return uint8[n] tiers that fit every rank: DEVICE where it is best at these prices, NODE into what is left.

    Args:
        decision: float64[tier, n] gains.
        slots: int64[world].
        slot_prices: float64[tier, world] by tier and home.
    """
    tiers = np.zeros(len(keys), np.uint8)
    net = decision - slot_prices[:, layout.home_rank(keys)]
    device = np.flatnonzero((net.argmax(axis=0) == Tier.DEVICE) & (decision[Tier.DEVICE] > 0))
    if len(device) and layout.local_ranks > 1:
        fits = best_within_slots(decision[Tier.DEVICE, device], layout.home_rank(keys[device]), slots)
        tiers[device[fits]] = Tier.DEVICE
    if layout.nodes == 1:
        return tiers
    free = slots - layout.replica_slots_used(keys, tiers)
    rest = np.flatnonzero((tiers == Tier.HOME) & (decision[Tier.NODE] > 0))
    rail = keys[rest] % layout.local_ranks
    for local in range(layout.local_ranks):
        rows = rest[rail == local]
        if len(rows):
            fits = best_within_slots(
                decision[Tier.NODE, rows], layout.home_node(keys[rows]), free[layout.rail_ranks(local)]
            )
            tiers[rows[fits]] = Tier.NODE
    _upgrade(layout, keys, tiers, decision, slots)
    return tiers


def _upgrade(
    layout: RankLayout, keys: Int64Array, tiers: UInt8Array, decision: Float64Array, slots: Int64Array
) -> None:
    """Raise NODE rows to DEVICE, in place, in the slots that are left: exact, given the rows at NODE.

    Their own rail holds these rows already, so an upgrade takes a slot on every rank of the other rails.
    """
    rows = np.flatnonzero(tiers == Tier.NODE)
    more = decision[Tier.DEVICE, rows] - decision[Tier.NODE, rows]
    rows, more = rows[more > 0], more[more > 0]
    if len(rows) and layout.local_ranks > 1:
        free = slots - layout.replica_slots_used(keys, tiers)
        least = free.reshape(layout.nodes, layout.local_ranks).min(axis=0)
        fits = best_within_slots(more, keys[rows] % layout.local_ranks, least)
        tiers[rows[fits]] = Tier.DEVICE
