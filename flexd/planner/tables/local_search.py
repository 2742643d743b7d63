"""Move single tables, exchange two, or take a few away and put them back, while that shortens a step.

The loads of all ranks have exact maxima of every possible place of one more piece. Taking away and putting back is
Shaw's large neighbourhood search (CP 1998).
"""

from __future__ import annotations

import math
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


# Pieces of the busiest rank that are tried, those that load it most.
_CANDIDATES = 12
# Pieces that each of them is tried to be exchanged with.
_PARTNERS = 12
# Moves after which loads are added up again, so that rounding does not gather.
_REBUILT_AFTER = 256
_LEAST_GAIN = 1e-6
# Most pieces that are taken away at once.
_TAKEN = 6
_TIE = 1e-4
_SEED = 19


@dataclass
class LocalSearch:
    """Search around one placement.

    Attributes:
        evaluations: placements of single pieces that may still be priced; a number, not a time, so that equal problems
            have equal plans.
    """

    tables: TableOptions
    layout: RankLayout
    capacity: Float64Array
    pieces: ShardAssignment
    evaluations: int

    def __post_init__(self) -> None:
        self.table, self.option, self.place = (
            np.array(values) for values in (self.pieces.table, self.pieces.option, self.pieces.place)
        )
        self.single = np.bincount(self.table, minlength=len(self.tables.names))[self.table] == 1
        self.loads = RankLoads.of(self.tables, self.layout, self.capacity, self.pieces)
        self.moves = 0

    def run(self) -> ShardAssignment:
        """Return the pieces where no move of the tried ones shortens a step, or evaluations are used up."""
        self._descend()
        rng = np.random.default_rng(_SEED)
        while self.evaluations > 0 and len(self.table) > 1 and self.loads.over_memory() <= 0:
            self._recreate(rng)
        return self._now()

    def _descend(self) -> None:
        while self.evaluations > 0 and self._improve():
            self.moves += 1
            if self.moves % _REBUILT_AFTER == 0:
                self.loads = RankLoads.of(self.tables, self.layout, self.capacity, self._now())

    def _recreate(self, rng: np.random.Generator) -> None:
        """Take a few pieces away, of busy ranks and of any, and put each back where the step is shortest; undo that if
        the step is longer than before."""
        axes = self._critical_axes()
        axis = axes[int(rng.integers(0, len(axes)))] if axes else 0
        busy = self._on_rank(int(self.loads.total[axis].argmax()), axis)
        count = int(rng.integers(2, _TAKEN + 1))
        some = rng.permutation(busy)[: (count + 1) // 2].tolist()
        some += rng.integers(0, len(self.table), count - len(some)).tolist()
        taken = list(dict.fromkeys(int(at) for at in some))
        before = [(at, int(self.option[at]), int(self.place[at])) for at in taken]
        now = self._cost()
        for at, option, place in before:
            self.loads.add(int(self.table[at]), option, place, -1.0)
        for at in rng.permutation(taken).tolist():
            # What each rank has to do, to tell places apart that are as good for the busiest.
            tie = _TIE * np.tensordot(self.tables.axis_seconds, self.loads.total[:-1], axes=1)
            _, option, place = self._best(int(at), math.inf, tie)
            self.option[at], self.place[at] = option, place
            self.loads.add(int(self.table[at]), option, place)
        self.moves += 1
        if self._cost() < now * (1 - _LEAST_GAIN):
            self._descend()
            return
        for at, option, place in before:
            self._put(at, option, place)
        if self.moves % _REBUILT_AFTER == 0:
            self.loads = RankLoads.of(self.tables, self.layout, self.capacity, self._now())

    def _best(self, at: int, most: float, tie: Float64Array | None = None) -> tuple[float, int, int]:
        """(seconds, option, place) of the best place of a piece that was taken away; its own if none takes less than
        ``most``."""
        around = self.loads.group_maxima()
        best = (most, int(self.option[at]), int(self.place[at]))
        for option in self._options(at):
            self.evaluations -= 1
            seconds = self.loads.seconds_at(int(self.table[at]), option, around)
            seconds[self._siblings(at)] = np.inf
            if tie is not None and self.tables.options[option].rule is ShardingKind.TABLE_ROW_WISE:
                seconds = seconds + tie.max(axis=1)
            elif tie is not None:
                seconds = seconds + (tie.ravel() if len(seconds) > 1 else tie.mean())
            least = int(seconds.argmin())
            if seconds[least] < best[0]:
                best = (float(seconds[least]), option, least)
        return best

    def _now(self) -> ShardAssignment:
        return ShardAssignment(self.table.copy(), self.option.copy(), self.place.copy())

    def _cost(self) -> float:
        short = self.loads.over_memory()
        return math.inf if short > 1e-6 * float(self.capacity.sum()) else self.loads.seconds()

    def _improve(self) -> bool:
        """Make the first move that pays, of the pieces on the busiest ranks; return whether there was one."""
        total = self.loads.total
        over = total[-1] - self.loads.capacity
        crowded = bool((over > 0).any())
        axes = [len(total) - 1] if crowded else self._critical_axes()
        tried: set[int] = set()
        for axis in axes:
            rank = int((over if crowded else total[axis]).argmax())
            for at in self._on_rank(rank, axis):
                if at in tried:
                    continue
                tried.add(at)
                if self._move(at) or self._exchange(at, axis, rank):
                    return True
                if self.evaluations <= 0:
                    return False
        return False

    def _critical_axes(self) -> list[int]:
        """The axis that decides each phase, those first whose busiest rank is farthest above the mean."""
        loads = self.loads.total[:-1]
        most, mean = loads.max(axis=(1, 2)), loads.mean(axis=(1, 2))
        result: dict[int, int] = {}
        for axis, phase in enumerate(self.tables.axis_phase.tolist()):
            if most[axis] > 0 and (phase not in result or most[axis] > most[result[phase]]):
                result[phase] = axis
        gain = (most - mean) * self.tables.axis_seconds
        return sorted(result.values(), key=lambda axis: -gain[axis])

    def _on_rank(self, rank: int, axis: int) -> list[int]:
        """The pieces that load a rank most on an axis, beyond what they give to all ranks."""
        node, local = divmod(rank, self.layout.local_ranks)
        parts = self.loads.option_loads[self.table, self.option, :, axis]
        rules = np.array([option.rule.value for option in self.tables.options])[self.option]
        on_rank = (rules == ShardingKind.TABLE_WISE) | (rules == ShardingKind.COLUMN_WISE)
        home = np.where(on_rank, self.place // self.layout.local_ranks, self.place)
        load = np.where(
            (on_rank | (rules == ShardingKind.TABLE_ROW_WISE)) & (home == node), parts[:, Part.HOME_NODE], 0.0
        )
        load += np.where(on_rank & (self.place % self.layout.local_ranks == local), parts[:, Part.HOME_RAIL], 0.0)
        load += np.where(on_rank & (self.place == rank), parts[:, Part.HOME_RANK], 0.0)
        # Loads of all ranks count too: another option may have less of them.
        load += np.where(self.single, parts[:, Part.EVERYWHERE], 0.0) * 1e-3
        order = np.argsort(-load, kind="stable")[:_CANDIDATES]
        return [int(at) for at in order if load[at] > 0]

    def _put(self, at: int, option: int, place: int) -> None:
        self.loads.add(int(self.table[at]), int(self.option[at]), int(self.place[at]), -1.0)
        self.option[at], self.place[at] = option, place
        self.loads.add(int(self.table[at]), option, place)

    def _move(self, at: int) -> bool:
        """Give a piece its best option and place, if that shortens the step."""
        table, option, place = int(self.table[at]), int(self.option[at]), int(self.place[at])
        crowded = self.loads.over_memory() > 0
        now = math.inf if crowded else self.loads.seconds()
        self.loads.add(table, option, place, -1.0)
        best = self._best(at, now * (1 - _LEAST_GAIN))
        if crowded and best[0] == math.inf:
            best = self._roomiest(at, best)
        self.loads.add(table, best[1], best[2])
        moved = (option, place) != best[1:]
        self.option[at], self.place[at] = best[1], best[2]
        return moved

    def _roomiest(self, at: int, best: tuple[float, int, int]) -> tuple[float, int, int]:
        """Move to where memory is short least, if shorter than before (the piece is taken away here)."""
        table = int(self.table[at])
        self.loads.add(table, best[1], best[2])
        before = self.loads.over_memory()
        self.loads.add(table, best[1], best[2], -1.0)
        for option in self._options(at):
            places = self.tables.options[option].places(self.layout)
            free = (self.loads.capacity - self.loads.total[-1]).min(axis=1) if places == self.layout.nodes else (
                self.loads.capacity - self.loads.total[-1]
            ).ravel()  # fmt: skip
            place = int(free.argmax()) if places > 1 else 0
            self.loads.add(table, option, place)
            after = self.loads.over_memory()
            self.loads.add(table, option, place, -1.0)
            if after < before * (1 - 1e-9):
                before, best = after, (best[0], option, place)
        return best

    def _siblings(self, at: int) -> list[int]:
        """Ranks of the other column pieces of its table, as far as there are ranks enough."""
        if self.single[at]:
            return []
        others = np.flatnonzero(self.table == self.table[at])
        ranks = [int(self.place[other]) for other in others if other != at]
        return ranks if len(ranks) < self.layout.world_size else []

    def _options(self, at: int) -> list[int]:
        """Options that a piece may have: a column piece keeps its own."""
        if not self.single[at]:
            return [int(self.option[at])]
        table = int(self.table[at])
        return [
            option for option in np.flatnonzero(self.tables.allowed[table]).tolist() if self.tables.pieces[option] == 1
        ]

    def _exchange(self, at: int, axis: int, rank: int) -> bool:
        """Exchange a piece with a smaller one of the rank that has least on this axis, if that shortens the step."""
        option = int(self.option[at])
        rule = self.tables.options[option].rule
        if self.tables.options[option].everywhere:
            return False
        load = self.loads.total[axis]
        other = int((load.max(axis=1) if rule is ShardingKind.TABLE_ROW_WISE else load.ravel()).argmin())
        place = int(self.place[at])
        if other == place:
            return False
        same = np.array([o.rule is rule or {o.rule, rule} == {ShardingKind.TABLE_WISE, ShardingKind.COLUMN_WISE}
                         for o in self.tables.options])[self.option]  # fmt: skip
        there = np.flatnonzero(same & (self.place == other))
        size = self.loads.option_loads[self.table, self.option, 1:, axis].sum(axis=1)
        there = there[size[there] < size[at]]
        excess = 0.5 * float(load.max() - load.min())
        order = np.argsort(np.abs(size[at] - size[there] - excess), kind="stable")[:_PARTNERS]
        now = self._cost()
        if other in self._siblings(at):
            return False
        for partner in there[order].tolist():
            self.evaluations -= 1
            if place in self._siblings(partner):
                continue
            self._put(at, option, other)
            self._put(partner, int(self.option[partner]), place)
            if self._cost() < now * (1 - _LEAST_GAIN):
                return True
            self._put(at, option, place)
            self._put(partner, int(self.option[partner]), other)
        return False
