"""Rows of one dim-group by the rank that they are at home on, for the bound of the busiest ranks (``busiest``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.balance import sums_by_home
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.row_bytes import Exchange, byte_factors
from flexd.planner.solver.assign import Assignment
from flexd.planner.solver.limits import FREE

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]

_BUCKETS_AN_OCTAVE = 4
_OCTAVES = 24
"""Below the hottest row of a dim-group; colder rows share a class."""


@dataclass(frozen=True)
class LevelGroup:
    """One dim-group.

    Attributes:
        plain: float64[tier, h], gains of the estimates; the assignment's have row bounds and migration in them, and the
            difference counts in the objective.
    """

    sums: LoadSums
    assignment: Assignment
    plain: Float64Array
    exchange: Exchange

    @property
    def layout(self) -> RankLayout:
        return self.sums.layout

    @cached_property
    def factors(self) -> Float64Array:
        load = self.sums.load
        return byte_factors(self.layout, load.wire_bytes, self.exchange, at_home=load.sums_at_home)

    @cached_property
    def wanted(self) -> list[int]:
        """Statistics that cost bytes on a link."""
        return [int(each) for each in np.flatnonzero(self.factors[:, :, 1:].any(axis=(0, 1, 2)))]

    @cached_property
    def free(self) -> BoolArray | None:
        """bool[h], rows that are not pinned; None: all."""
        fixed = self.assignment.limits.fixed
        return None if fixed is None else fixed == FREE

    @cached_property
    def penalty(self) -> Float64Array:
        """float64[tier, h]: what the objective has on top of the exposed time."""
        return self.plain - self.assignment.decision

    @cached_property
    def slots(self) -> Float64Array:
        """float64[world] that pinned rows leave."""
        used = self.layout.replica_slots_used(self.assignment.keys, self.assignment.base)
        left: Float64Array = (self.assignment.limits.slots - used).astype(np.float64)
        return left

    def by_home(self, tiers: UInt8Array) -> Float64Array:
        """float64[tier, statistic, world]."""
        even = self.sums.even(np.zeros(len(Tier)))
        return sums_by_home(self.sums.listed, tiers, self.sums.home_rank, even, self.layout, self.wanted)

    def home_gain(self, weights: Float64Array) -> Float64Array:
        """float64[tier, statistic, world]: weighted seconds less than at HOME, as factors of a row's statistics.

        Args:
            weights: float64[tier, phase, link, world] of ``home_weights``.
        """
        seconds = np.einsum("tplw,tpls->tsw", weights, self.factors[..., self.wanted], optimize=True)
        gain: Float64Array = seconds[Tier.HOME] - seconds
        return gain

    @cached_property
    def classes(self) -> _Classes:
        load, world = self.sums.load, self.layout.world_size
        width = _BUCKETS_AN_OCTAVE * _OCTAVES
        top = float(load.accesses.max(initial=0.0))
        with np.errstate(divide="ignore"):
            below = _BUCKETS_AN_OCTAVE * (np.log2(max(top, 1e-300)) - np.log2(load.accesses))
        bucket = np.minimum(below, width - 1).astype(np.int64)
        if load.trained is not None:
            bucket += width * (load.trained <= 0)
            width *= 2
        code = self.sums.home_rank * width + bucket
        weight = None if self.free is None else self.free.astype(np.float64)

        def summed(values: Float64Array | None) -> Float64Array:
            if weight is not None:
                values = weight if values is None else values * weight
            return np.bincount(code, weights=values, minlength=world * width).reshape(world, width).astype(np.float64)

        penalty = np.zeros((len(Tier), world, width))
        for tier in self.assignment.allowed:
            penalty[tier] = summed(self.penalty[tier])
        # One rank sends nothing: no statistic is wanted.
        wanted = np.zeros((len(self.wanted), world, width))
        for at, statistic in enumerate(self.wanted):
            wanted[at] = summed(self.sums.listed[statistic])
        return _Classes(code, summed(None), wanted, penalty)

    def class_gain(self, gain: Float64Array) -> Float64Array:
        """float64[tier, world, k]: what whole classes save, of ``home_gain``."""
        saved = np.full((len(Tier), *self.classes.rows.shape), -np.inf)
        saved[Tier.HOME] = 0.0
        for tier in self.assignment.allowed:
            weighted = np.einsum("sw,swk->wk", gain[tier], self.classes.statistics)
            saved[tier] = np.where(self.classes.rows > 0, weighted - self.classes.penalty[tier], 0.0)
        return saved

    def slot_seconds(self, of_rank: Float64Array) -> Float64Array:
        """float64[tier, world]: price of the slots that a row takes, by tier and home."""
        by_node = of_rank.reshape(self.layout.nodes, self.layout.local_ranks)
        rail = np.broadcast_to(by_node.sum(axis=0), by_node.shape).reshape(-1)
        return np.stack([np.zeros_like(of_rank), rail - of_rank, of_rank.sum() - of_rank])

    def most(
        self, weights: Float64Array, of_rank: Float64Array, sets: Sequence[frozenset[Tier]]
    ) -> tuple[list[float], Float64Array]:
        """(for each set of synchronised tiers the most that any rows save at these weights, float64[tier, h] net)."""
        gain = self.home_gain(weights)
        home, listed = self.sums.home_rank, self.sums.listed
        paid = self.slot_seconds(of_rank)
        net = np.full((len(Tier), len(home)), -np.inf)
        net[Tier.HOME] = 0.0
        for tier in self.assignment.allowed:
            used = np.flatnonzero(gain[tier].any(axis=1))
            mine = -self.penalty[tier] - paid[tier][home]
            for at in used:
                mine += gain[tier, at][home] * listed[self.wanted[at]]
            net[tier] = mine
        free, trained = self.free, self.sums.load.trained
        best = []
        for tiers in sets:
            most = np.zeros(len(home))
            for tier in self.assignment.allowed:
                mine = np.maximum(most, net[tier])
                if tier not in tiers:
                    mine = most if trained is None else np.where(trained > 0, most, mine)
                most = mine
            best.append(float(most.sum() if free is None else most[free].sum()) + float(of_rank @ self.slots))
        return best, net


@dataclass(frozen=True)
class _Classes:
    """Rows of one dim-group by home and frequency; pinned rows count nothing.

    Attributes:
        code: int64[h], class of each row: home * k + frequency.
        rows: float64[world, k].
        statistics: float64[statistic, world, k], summed, of the statistics that cost bytes.
        penalty: float64[tier, world, k], summed.
    """

    code: Int64Array
    rows: Float64Array
    statistics: Float64Array
    penalty: Float64Array


def slots_used(layout: RankLayout, rows: Float64Array) -> Float64Array:
    """float64[world] of float64[tier, world, k] rows by home."""
    by_home = rows.sum(axis=2)
    node = by_home[Tier.NODE].reshape(layout.nodes, layout.local_ranks)
    on_rail = (node.sum(axis=0, keepdims=True) - node).reshape(-1)
    used: Float64Array = on_rail + by_home[Tier.DEVICE].sum() - by_home[Tier.DEVICE]
    return used
