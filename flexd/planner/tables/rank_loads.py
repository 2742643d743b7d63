"""Loads of all ranks under a placement of tables, with exact maxima of every possible place of one more piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.placement import RankLayout
from flexd.planner.tables.options import Part, ShardingKind, TableOption, TableOptions


@dataclass(frozen=True)
class ShardAssignment:
    """The pieces of all tables: column pieces of a table follow each other.

    Attributes:
        table, option: int64[p].
        place: int64[p], rank or node; 0 where an option has one place.
    """

    table: Int64Array
    option: Int64Array
    place: Int64Array


class RankLoads:
    """Loads of the ranks by axis; the last axis is memory.

    Args:
        capacity: float64[W], bytes of memory of each rank.
    """

    def __init__(self, tables: TableOptions, layout: RankLayout, capacity: Float64Array) -> None:
        self.tables, self.layout = tables, layout
        self.capacity = capacity.reshape(layout.nodes, layout.local_ranks)
        # float64[T, O, 4, K + 1]
        self.option_loads = np.concatenate([tables.loads, tables.memory_bytes[..., None]], axis=3)
        self.total = np.zeros((self.option_loads.shape[3], layout.nodes, layout.local_ranks))

    @classmethod
    def of(cls, tables: TableOptions, layout: RankLayout, capacity: Float64Array, pieces: ShardAssignment) -> RankLoads:
        """Return the loads of these pieces."""
        result = cls(tables, layout, capacity)
        every = result.option_loads[pieces.table, pieces.option]
        result.total += every[:, Part.EVERYWHERE].sum(axis=0)[:, None, None]
        axes, ranks = result.total.shape[0], layout.world_size
        flat = result.total.reshape(axes, ranks)
        for at, option in enumerate(tables.options):
            mine = pieces.option == at
            if option.everywhere or not mine.any():
                continue
            parts, place = every[mine], pieces.place[mine]
            node = place if option.rule is ShardingKind.TABLE_ROW_WISE else place // layout.local_ranks
            for axis in range(axes):
                by_node = np.bincount(node, weights=parts[:, Part.HOME_NODE, axis], minlength=layout.nodes)
                result.total[axis] += by_node[:, None]
                if option.rule is ShardingKind.TABLE_ROW_WISE:
                    continue
                rail = place % layout.local_ranks
                by_rail = np.bincount(rail, weights=parts[:, Part.HOME_RAIL, axis], minlength=layout.local_ranks)
                result.total[axis] += by_rail[None, :]
                flat[axis] += np.bincount(place, weights=parts[:, Part.HOME_RANK, axis], minlength=ranks)
        return result

    def add(self, table: int, option: int, place: int, sign: float = 1.0) -> None:
        """Add a piece to its place, or take it away with ``sign`` -1."""
        add_piece(self.total, sign * self.option_loads[table, option], self.tables.options[option], place)

    def maxima(self) -> Float64Array:
        """float64[P]: the largest load of a rank in each phase."""
        return self._by_phase(self.total[:-1].max(axis=(1, 2))[:, None])[:, 0]

    def axis_targets(self) -> Float64Array:
        """float64[K]: the largest load of each axis' phase."""
        return np.asarray(self.maxima()[self.tables.axis_phase], dtype=np.float64)

    def seconds(self) -> float:
        """Seconds of a step that the busiest ranks take, phase by phase."""
        return float(self.tables.seconds_per_unit @ self.maxima())

    def over_memory(self) -> float:
        """Bytes above the capacity, of all ranks together."""
        return float(np.maximum(self.total[-1] - self.capacity, 0.0).sum())

    def _by_phase(self, axes: Float64Array) -> Float64Array:
        """float64[P, n] maxima of float64[K, n]."""
        return np.asarray(np.maximum.reduceat(axes, self.tables.phase_starts, axis=0), dtype=np.float64)

    def seconds_at(self, table: int, option: int, around: GroupMaxima) -> Float64Array:
        """Return float64[places]: seconds of a step with one more piece at each place, inf where the ranks that would
        hold it have no memory for it."""
        parts, held = self.option_loads[table, option], self.tables.options[option]
        every = parts[Part.EVERYWHERE]
        total = self.total
        if held.everywhere:
            most = total[:-1].max(axis=(1, 2)) + every[:-1]
            fits = bool((total[-1] + every[-1] <= self.capacity).all())
            return self.tables.seconds_per_unit @ self._by_phase(most[:, None]) if fits else np.full(1, np.inf)
        node = every + parts[Part.HOME_NODE]
        if held.rule is ShardingKind.TABLE_ROW_WISE:
            most = np.maximum(around.other_nodes + every[:-1, None], around.node + node[:-1, None])
            short = around.short_node + node[-1]
        else:
            rail = every + parts[Part.HOME_RAIL]
            here = node + parts[Part.HOME_RAIL] + parts[Part.HOME_RANK]
            most = np.maximum(around.elsewhere + every[:-1, None, None], around.rest_of_node + node[:-1, None, None])
            most = np.maximum(most, around.rest_of_rail + rail[:-1, None, None])
            most = np.maximum(most, total[:-1] + here[:-1, None, None]).reshape(len(total) - 1, -1)
            short = (total[-1] - self.capacity + here[-1]).ravel()
        return np.where(short <= 0, self.tables.seconds_per_unit @ self._by_phase(most), np.inf)

    def group_maxima(self) -> GroupMaxima:
        """Return the maxima around every place."""
        loads = self.total[:-1]
        node, rest_of_node = loads.max(axis=2), _of_others(loads, 2)
        short = (self.total[-1] - self.capacity).max(axis=1)
        return GroupMaxima(
            node, _of_others(node, 1), rest_of_node, _of_others(loads, 1), _of_others(rest_of_node, 1), short
        )


def add_piece(load: Float64Array, parts: Float64Array, option: TableOption, place: int) -> None:
    """Add float64[4, axes] ``parts`` of a piece at its place to float64[axes, N, L] ``load``."""
    every, node, rail, rank = parts
    if every.any():
        load += every[:, None, None]
    if option.rule is ShardingKind.TABLE_ROW_WISE:
        load[:, place] += node[:, None]
    elif not option.everywhere:
        at, local = divmod(place, load.shape[2])
        load[:, at] += node[:, None]
        load[:, :, local] += rail[:, None]
        load[:, at, local] += rank


@dataclass(frozen=True)
class GroupMaxima:
    """Maxima over the ranks that share only a part of a place, -inf where there are none.

    Attributes:
        node, other_nodes: float64[K, N], of a node, and of all others.
        rest_of_node, rest_of_rail, elsewhere: float64[K, N, L], of the other ranks of its node, of its rail, and of
            those that share neither.
        short_node: float64[N], largest excess of memory over the capacity.
    """

    node: Float64Array
    other_nodes: Float64Array
    rest_of_node: Float64Array
    rest_of_rail: Float64Array
    elsewhere: Float64Array
    short_node: Float64Array


def _of_others(values: Float64Array, axis: int) -> Float64Array:
    """Return for each entry the maximum of the others along an axis."""
    count = values.shape[axis]
    if count == 1:
        return np.full(values.shape, -np.inf)
    first = np.expand_dims(values.argmax(axis=axis), axis)
    two = np.partition(values, count - 2, axis=axis)
    top = np.take(two, [count - 1], axis=axis)
    second = np.take(two, [count - 2], axis=axis)
    result = np.broadcast_to(top, values.shape).copy()
    np.put_along_axis(result, first, second, axis=axis)
    return result
