"""The busiest rank of every collective: a lower bound over all placements, and rows to copy that level the ranks.

A collective ends when its busiest rank does, so a step waits for the sum over phases and links of the largest bytes of
any rank in either direction. For weights of the ranks that add up to the price of a byte of each phase and link, the
weighted bytes are no larger, and linear in the rows: a row's gain then depends on the rank that it is at home on. With
a price of a slot of every rank each row takes its best tier alone, and what all rows then take is a lower bound for
every placement within the slots (Lagrangian relaxation; Boyd and Vandenberghe, Convex Optimization, section 5.1), for
any weights and prices. Good ones are found on classes of rows (dim-group, home rank, frequency) by multiplicative
updates (Arora, Hazan and Kale, Theory of Computing 8, 2012); the bound is then evaluated row by row.
The mean over the rounds of what the classes take levels the ranks: rounded to rows it is a candidate for the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.balance import home_weights, rank_bytes
from flexd.planner.model.prices import exposed_share, prices
from flexd.planner.model.row_bytes import EXCHANGE_PHASES, Exchange, Phase, TrafficLink, byte_factors
from flexd.planner.solver.rank_classes import LevelGroup, slots_used
from flexd.topology.cluster import Cluster

Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]

_ROUNDING = 1e-12
_ROUNDS = 120
_SETTLED_ROUNDS, _SETTLED = 30, 1e-3
"""A bound alone needs no more rounds when so many have won no more than this share of what it could still win."""
_SLOT_BISECTIONS = 24
_EDGE = 1e-4
"""Of the price of a slot: classes this close to it are divided."""
_SHARPNESS = 6.0
"""Of the softened maximum: over the lead of the busiest rank."""
_PARTS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0)
_STEP = 2.0
"""Of the first round, in the logarithm of a weight; falls with the square root of the rounds."""


@dataclass(frozen=True)
class BusiestBound:
    """The objective of the busiest rank of every phase, and how much better it could be.

    Attributes:
        objective_seconds: of the chosen tiers: exposed seconds of the busiest ranks with row bounds and migration.
        home_seconds: of every row at HOME that is not pinned elsewhere.
        lower_bound_seconds: no tiers within the limits have a smaller objective, at the prices of these
            tiers' messages; -inf if it was not asked for.
    """

    objective_seconds: float
    home_seconds: float
    lower_bound_seconds: float

    @property
    def gap(self) -> float:
        """Largest share of the largest possible saving, against every row at HOME, that the tiers may miss: 0 to 1."""
        return missed_share(self.objective_seconds, self.home_seconds, self.lower_bound_seconds)


def missed_share(objective_seconds: float, home_seconds: float, lower_bound_seconds: float) -> float:
    """Return what may be missed of the largest possible saving, 0 to 1; 0 where nothing can be saved."""
    if lower_bound_seconds == -math.inf:
        return 1.0
    missed, possible = max(0.0, objective_seconds - lower_bound_seconds), home_seconds - lower_bound_seconds
    # Below the rounding of the sums.
    return min(1.0, missed / possible) if possible > _ROUNDING * home_seconds else 0.0


def byte_prices(
    sent: Float64Array, peak: Float64Array, linear: Cluster, layout: RankLayout, micro_batches: int, exchange: Exchange
) -> Float64Array:
    """Return float64[phase, link]: exposed seconds of a byte of the busiest rank, no more than any placement pays.

    Args:
        sent: float64[tier, phase, link], the message sizes at which bytes are priced.
        peak: the same of the plan's busiest ranks: of an all-to-all over the world, the slower link counts.
        linear: with exposure that is linear (``linear_exposure``).
    """
    each = prices(sent, linear, micro_batches, exchange)
    # Prices differ between tiers only in a direct exchange.
    used = byte_factors(layout, 1, exchange).any(axis=3) | byte_factors(layout, 1, exchange, at_home=True).any(axis=3)
    least: Float64Array = np.where(used, each, np.inf).min(axis=0)
    least[~used.any(axis=0)] = 0.0
    least[:, TrafficLink.SELF] = 0.0
    if exchange is not Exchange.CHAIN:
        seconds = (peak * each).sum(axis=0)
        for phase in (*EXCHANGE_PHASES, Phase.SYNC_SUMS):
            slower = int(seconds[phase].argmax()) or (TrafficLink.INTER_NODE if layout.nodes > 1 else 1)
            least[phase, np.arange(len(TrafficLink)) != slower] = 0.0
    exposed: Float64Array = least * exposed_share(linear)[:, None]
    return exposed


@dataclass(frozen=True)
class Multipliers:
    """Weights of the ranks, and prices of their slots, that give a bound.

    Attributes:
        sent, received: float64[phase, link, world], adding up to the price of a byte of each phase and link.
        slot_seconds: of each dim-group float64[world].
        shares: of each dim-group float64[tier, world, k], mean share of each class that takes a tier.
    """

    sent: Float64Array
    received: Float64Array
    slot_seconds: tuple[Float64Array, ...]
    shares: tuple[Float64Array, ...]


@dataclass(frozen=True)
class BusiestRank:
    """The largest expected bytes of a rank, phase by phase, of all dim-groups.

    Attributes:
        price: float64[phase, link] of ``byte_prices``.
    """

    groups: tuple[LevelGroup, ...]
    price: Float64Array
    exchange: Exchange

    @property
    def layout(self) -> RankLayout:
        return self.groups[0].layout

    def _bytes(self, by_home: Sequence[Float64Array]) -> tuple[Float64Array, Float64Array]:
        """(sent, received) float64[phase, link, world] of all tiers and dim-groups."""
        sent = received = np.zeros(1)
        for group, mine in zip(self.groups, by_home, strict=True):
            ranks = rank_bytes(mine, group.factors, self.layout, self.exchange)
            sent, received = sent + ranks.sent.sum(axis=0), received + ranks.received.sum(axis=0)
        return sent, received

    @cached_property
    def _base(self) -> list[Float64Array]:
        return [group.by_home(group.assignment.base) for group in self.groups]

    def bound(self, at: Multipliers, sets: Sequence[frozenset[Tier]]) -> list[float]:
        """Return for each set of synchronised tiers a lower bound of the objective, without fixed latencies: of every
        placement of the rows within the slots that synchronises no other tiers."""
        weights = home_weights(at.sent, at.received, self.layout, self.exchange)
        sent, received = self._bytes(self._base)
        base = float((at.sent * sent).sum() + (at.received * received).sum())
        saved = np.zeros(len(sets))
        for group, of_rank in zip(self.groups, at.slot_seconds, strict=True):
            saved += group.most(weights, of_rank, sets)[0]
        return [base - float(most) for most in saved]

    def solve(self, enough: float = np.inf, *, level: bool = True) -> Multipliers:
        """Return the weights and prices of the best bound of all rounds, and the levelled shares.

        Half of the rounds follow multiplicative updates of the weights; their mean response is then improved by
        conditional gradients (Frank and Wolfe) of the softened maxima, with a line search of the maxima themselves.

        Args:
            enough: a bound that needs no improvement.
            level: the shares are used; otherwise rounds end where the bound has settled.
        """
        world, price = self.layout.world_size, self.price[None, :, :, None]
        log = np.zeros((2, *self.price.shape, world))
        uneven = [np.ones(world) for _ in self.groups]
        shares = [np.zeros((len(Tier), *group.classes.rows.shape)) for group in self.groups]
        best, bytes_, late = (-np.inf, log, uneven), self._base_bytes, 0
        bests: list[float] = []
        for round_ in range(_ROUNDS):
            if updating := round_ < _ROUNDS // 2:
                weight = np.exp(log - log.max(axis=(0, 3), keepdims=True))
            else:
                top, mean = bytes_.max(axis=(0, 3), keepdims=True), bytes_.mean(axis=(0, 3), keepdims=True)
                weight = np.exp(_SHARPNESS * (bytes_ - top) / np.maximum(top - mean, 1e-300))
            weight *= price / weight.sum(axis=(0, 3), keepdims=True)
            value, slots, chosen = self._relaxed(weight, uneven)
            if value > best[0]:
                best = value, weight, slots
            bests.append(best[0])
            if value >= enough or (not level and _has_settled(bests, enough)):
                break
            found = self._class_bytes(chosen)
            if updating:
                mean = found.mean(axis=(0, 3), keepdims=True)
                spread = np.abs(found - mean).max(axis=(0, 3), keepdims=True)
                log += _STEP / np.sqrt(round_ + 1) * (found - mean) / np.maximum(spread, 1e-300)
                part = 1.0 / (late + 1)
                late += 4 * round_ >= _ROUNDS
            else:
                part = self._best_part(shares, bytes_, chosen, found)
            bytes_ = (1 - part) * bytes_ + part * found
            shares = [(1 - part) * mine + part * new for mine, new in zip(shares, chosen, strict=True)]
            for at, group in enumerate(self.groups):
                response = chosen[at] if updating else shares[at]
                over = slots_used(self.layout, response * group.classes.rows) / np.maximum(group.slots, 1.0) - 1.0
                uneven[at] = uneven[at] * np.exp(over.clip(-1, 1) / np.sqrt(round_ + 1))
                uneven[at] /= uneven[at].mean()
        return Multipliers(best[1][0], best[1][1], tuple(best[2]), tuple(shares))

    def _best_part(
        self,
        shares: Sequence[Float64Array],
        bytes_: Float64Array,
        chosen: Sequence[Float64Array],
        found: Float64Array,
    ) -> float:
        """Return how much of the way from the shares to what was chosen gives the smallest objective."""

        def paid(of: Sequence[Float64Array]) -> float:
            return float(sum((mine * g.classes.penalty).sum() for mine, g in zip(of, self.groups, strict=True)))

        before, after = paid(shares), paid(chosen)
        values = [
            float((self.price * ((1 - part) * bytes_ + part * found).max(axis=(0, 3))).sum())
            + (1 - part) * before
            + part * after
            for part in _PARTS
        ]
        return _PARTS[int(np.argmin(values))]

    def _relaxed(
        self, weight: Float64Array, uneven: Sequence[Float64Array]
    ) -> tuple[float, list[Float64Array], list[Float64Array]]:
        """(bound of whole classes, price of every rank's slots by dim-group, float64[tier, world, k] 1 where a class
        takes a tier): at these weights, and prices of slots in these proportions."""
        of_homes = home_weights(weight[0], weight[1], self.layout, self.exchange)
        value, slots, chosen = float((weight * self._base_bytes).sum()), [], []
        for group, each in zip(self.groups, uneven, strict=True):
            saved = group.class_gain(group.home_gain(of_homes))
            paid = group.slot_seconds(each)[:, :, None] * group.classes.rows
            scale = _slot_scale(saved, paid, float(each @ group.slots))
            room = float(each @ group.slots)
            slots.append(scale * each)
            value -= float((saved - scale * paid).max(axis=0).sum()) + scale * room
            chosen.append(_filling(saved, paid, scale, room))
        return value, slots, chosen

    @cached_property
    def _base_bytes(self) -> Float64Array:
        """float64[sent or received, phase, link, world]."""
        return np.stack(self._bytes(self._base))

    def _class_bytes(self, chosen: Sequence[Float64Array]) -> Float64Array:
        by_home = []
        for base, group, mine in zip(self._base, self.groups, chosen, strict=True):
            moved = base.copy()
            for tier in group.assignment.allowed:
                summed = (group.classes.statistics * mine[tier]).sum(axis=2)
                moved[tier, group.wanted] += summed
                moved[Tier.HOME, group.wanted] -= summed
            by_home.append(moved)
        return np.stack(self._bytes(by_home))

    def levelled(self, at: Multipliers) -> list[UInt8Array]:
        """Return of each dim-group uint8[h]: the classes' shares as rows, within all limits."""
        weights = home_weights(at.sent, at.received, self.layout, self.exchange)
        result = []
        for group, of_rank, shares in zip(self.groups, at.slot_seconds, at.shares, strict=True):
            _, net = group.most(weights, of_rank, ())
            classes = group.classes
            wanted = np.zeros(len(classes.code), np.uint8)
            rows = np.flatnonzero((shares.sum(axis=0).ravel() > 0)[classes.code])
            if group.free is not None:
                rows = rows[group.free[rows]]
            # The hottest of a class first.
            rows = rows[np.lexsort((-group.sums.load.accesses[rows], classes.code[rows]))]
            code = classes.code[rows]
            place = np.arange(len(rows)) - np.searchsorted(code, code)
            number = np.cumsum(shares[::-1] * classes.rows, axis=0)[::-1].reshape(len(Tier), -1)
            wanted[rows[place + 0.5 < number[Tier.NODE][code]]] = Tier.NODE
            wanted[rows[place + 0.5 < number[Tier.DEVICE][code]]] = Tier.DEVICE
            result.append(group.assignment.within_limits(wanted, net))
        return result


def _has_settled(bests: Sequence[float], enough: float) -> bool:
    """Return whether the best bounds after each round have become as good as they will."""
    if len(bests) <= _SETTLED_ROUNDS:
        return False
    return bests[-1] - bests[-1 - _SETTLED_ROUNDS] <= _SETTLED * (enough - bests[-1])


def _filling(saved: Float64Array, paid: Float64Array, scale: float, room: float) -> Float64Array:
    """Return float64[tier, world, k]: the share of each class at each tier that is best at this price of slots; as
    much of the classes that are on its edge as fill the room."""

    def at(price: float) -> Float64Array:
        best = (saved - price * paid).argmax(axis=0)
        taken: Float64Array = (best[None] == np.arange(len(Tier))[:, None, None]).astype(np.float64)
        return taken

    less = at(scale)
    if scale <= 0:
        return less
    more = at(scale * (1 - _EDGE))
    within, above = float((paid * less).sum()), float((paid * more).sum())
    part = min(max((room - within) / (above - within), 0.0), 1.0) if above > within else 0.0
    return (1 - part) * less + part * more


def _slot_scale(saved: Float64Array, paid: Float64Array, room: float) -> float:
    """Return the factor of the prices of slots, float64[tier, world, k], at which classes just use ``room``."""
    gains = (saved > 0).any(axis=0)
    saved, paid = saved[:, gains], paid[:, gains]
    each = np.arange(saved.shape[1])

    def used(scale: float) -> float:
        return float(paid[(saved - scale * paid).argmax(axis=0), each].sum())

    if used(0.0) <= room:
        return 0.0
    low, high = 0.0, float((saved[1:] / np.maximum(paid[1:], 1e-300)).max())
    for _ in range(_SLOT_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if used(middle) > room else (low, middle)
    return high
