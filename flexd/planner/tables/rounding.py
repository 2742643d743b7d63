"""From shares of options to a placement: options by regret, pieces in descending size, each to where it is cheapest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.tables.options import Part, ShardingKind, TableOptions
from flexd.planner.tables.rank_loads import ShardAssignment
from flexd.planner.tables.relaxation import Relaxation

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_POWER = 8
"""Loads over their targets are raised to it: the higher, the more the fullest rank counts."""
_REGRET = 0.2
"""Options whose price is above the best one's by no more than this share of it are decided where a table is placed."""
_WHOLE = 0.999
"""A share from which an option counts as chosen."""
_MEMORY_WEIGHT = 0.1
"""Of memory against the average axis, so that it fills evenly before it binds."""


def pieces_of(tables: TableOptions, chosen: Int64Array) -> ShardAssignment:
    """Return the pieces of tables with these options, all at place 0."""
    number = tables.pieces[chosen]
    table = np.repeat(np.arange(len(chosen)), number)
    return ShardAssignment(table, chosen[table], np.zeros(len(table), np.int64))


def round_shares(
    tables: TableOptions, layout: RankLayout, capacity: Float64Array, relaxed: Relaxation
) -> ShardAssignment:
    """Return a placement near a relaxation.

    Tables that the relaxation spreads over all ranks are. The others are placed in descending order of what they
    add to the fullest axis, with the option and the place that raise the sum of powers of the loads over their targets
    least, among those with memory for them; if there are none, the next option counts.
    """
    return _Rounding(tables, layout, capacity, relaxed).run()


@dataclass
class _Rounding:
    tables: TableOptions
    layout: RankLayout
    capacity: Float64Array
    relaxed: Relaxation

    def __post_init__(self) -> None:
        tables = self.tables
        target = self.relaxed.target
        seconds = tables.axis_seconds * target
        goal = np.append(target, float(self.capacity.mean()))
        weight = np.append(seconds, _MEMORY_WEIGHT * float(seconds.mean()))
        # An axis without load in the relaxation costs as if it had a thousandth of the largest.
        idle = (goal <= 0) & (np.append(tables.axis_seconds, 1.0) > 0)
        most = float(seconds.max(initial=0.0))
        axis_seconds = np.append(tables.axis_seconds, 1.0)
        goal = np.where(idle, 1e-3 * most / np.where(axis_seconds > 0, axis_seconds, 1.0), goal)
        weight = np.where(idle, 1e-3 * most, weight)
        live = (goal > 0) & (weight > 0)
        self.live, self.goal = live, goal[live]
        self.weight = weight[live] / (_POWER * self.layout.world_size)
        self.room = (self.capacity / self.capacity.mean()).reshape(self.layout.nodes, self.layout.local_ranks)
        self.rules = [option.rule for option in tables.options]
        self.load = np.zeros((len(self.goal), self.layout.nodes, self.layout.local_ranks))

    def run(self) -> ShardAssignment:
        tables, count = self.tables, len(self.tables.names)
        prices = np.where(tables.allowed, self.relaxed.reduced_seconds, np.inf)
        order = np.argsort(prices, axis=1, kind="stable")
        best = np.take_along_axis(prices, order[:, :1], axis=1)[:, 0]
        chosen = np.where(self.relaxed.shares.max(axis=1) > 0, self.relaxed.shares.argmax(axis=1), order[:, 0])
        near = prices <= (best + _REGRET * np.abs(best))[:, None]
        near[np.arange(count), chosen] = True
        even = np.array([rule in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL) for rule in self.rules])
        plain = even[chosen] & (self.relaxed.shares[np.arange(count), chosen] > _WHOLE)
        # What is known from the start: tables that every rank has a part of.
        for table in np.flatnonzero(plain).tolist():
            self.load += self._parts(table, int(chosen[table]))[Part.EVERYWHERE][:, None, None]
        self.power = _power(self.load)
        result: list[tuple[int, int, list[int]]] = [(t, int(chosen[t]), [0]) for t in np.flatnonzero(plain).tolist()]
        rest = np.flatnonzero(~plain)
        for table in rest[np.argsort(-self._sizes(rest, chosen[rest]), kind="stable")].tolist():
            options = [int(chosen[table]), *(o for o in np.flatnonzero(near[table]).tolist() if o != chosen[table])]
            result.append((table, *self._place(table, options, order[table][prices[table][order[table]] < np.inf])))
        result.sort()
        return ShardAssignment(
            np.array([t for t, _, places in result for _ in places], np.int64),
            np.array([o for _, o, places in result for _ in places], np.int64),
            np.array([p for _, _, places in result for p in places], np.int64),
        )

    def _parts(self, table: int, option: int) -> Float64Array:
        """float64[4, live axes], over the goals."""
        tables = self.tables
        parts = np.concatenate([tables.loads[table, option], tables.memory_bytes[table, option][:, None]], axis=1)
        scaled: Float64Array = parts[:, self.live] / self.goal
        return scaled

    def _sizes(self, rest: Int64Array, chosen: Int64Array) -> Float64Array:
        tables = self.tables
        parts = np.concatenate([tables.loads[rest, chosen], tables.memory_bytes[rest, chosen][..., None]], axis=2)
        sizes: Float64Array = (parts[:, Part.HOME_NODE :, self.live].sum(axis=1) / self.goal).max(axis=1, initial=0.0)
        return sizes

    def _place(self, table: int, options: list[int], every: Int64Array) -> tuple[int, list[int]]:
        """(option, places of the pieces) of the cheapest of ``options`` that fits, else the first of ``every``."""
        found: list[tuple[float, int, list[int]]] = []
        for option in options:
            number = int(self.tables.pieces[option])
            if number > 1 and len(options) > 1:
                # Its pieces are placed one after the other: worth it only where the relaxation has chosen it.
                if option == options[0]:
                    options = [option]
                else:
                    continue
            worse, place = self._cheapest(table, option, ())
            if place is not None:
                found.append((worse, option, [place]))
            if len(options) == 1:
                break
        if not found:
            for option in every.tolist():
                _, place = self._cheapest(table, option, ())
                if place is not None:
                    found.append((0.0, option, [place]))
                    break
            else:
                found.append((0.0, int(every[0]), [0]))
        _, option, places = min(found)
        self._add(table, option, places[0])
        for _ in range(int(self.tables.pieces[option]) - 1):
            _, place = self._cheapest(table, option, places)
            places.append(places[-1] if place is None else place)
            self._add(table, option, places[-1])
        return option, places

    def _cheapest(self, table: int, option: int, taken: tuple[int, ...] | list[int]) -> tuple[float, int | None]:
        """(seconds that a piece adds, its place); None if there is no memory for it anywhere."""
        every, node, rail, rank = self._parts(table, option)
        memory = self.load[-1] - self.room
        rule = self.rules[option]
        # All ranks carry this part wherever the piece is.
        grown = _power(self.load + every[:, None, None]) - self.power if every.any() else np.zeros(1)
        total = float(self.weight @ grown.sum(axis=(1, 2))) if every.any() else 0.0
        if rule in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL):
            return total, 0 if (memory + every[-1] <= 0).all() else None
        here = every + node
        of_node = _power(self.load + here[:, None, None]) - self.power - grown if node.any() else np.zeros((1, 1, 1))
        if rule is ShardingKind.TABLE_ROW_WISE:
            worse = self.weight @ of_node.sum(axis=2) if node.any() else np.zeros(self.layout.nodes)
            fits = (memory + here[-1] <= 0).all(axis=1)
        else:
            here = here + rail + rank
            each = _power(self.load + here[:, None, None]) - self.power - grown
            if node.any():
                each = each + of_node.sum(axis=2, keepdims=True) - of_node
            if rail.any():
                of_rail = _power(self.load + (every + rail)[:, None, None]) - self.power - grown
                each = each + of_rail.sum(axis=1, keepdims=True) - of_rail
            worse = np.tensordot(self.weight, each, axes=1).ravel()
            fits = (memory + here[-1] <= 0).ravel()
            if taken and len(taken) < self.layout.world_size:
                fits[list(taken)] = False
        if not fits.any():
            return np.inf, None
        place = int(np.where(fits, worse, np.inf).argmin())
        return total + float(worse[place]), place

    def _add(self, table: int, option: int, place: int) -> None:
        every, node, rail, rank = self._parts(table, option)
        rule = self.rules[option]
        if every.any():
            self.load += every[:, None, None]
        if rule is ShardingKind.TABLE_ROW_WISE:
            self.load[:, place] += node[:, None]
        elif rule not in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL):
            at, local = divmod(place, self.layout.local_ranks)
            self.load[:, at] += node[:, None]
            self.load[:, :, local] += rail[:, None]
            self.load[:, at, local] += rank
        self.power = _power(self.load)


def _power(load: Float64Array) -> Float64Array:
    """The load to the power of 8."""
    load = load * load
    load = load * load
    return load * load
