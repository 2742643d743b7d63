"""Move single tables, exchange two, or take a few away and put them back, while that shortens a step.

Maxima of every place are exact. Taking away and putting back is Shaw's large neighbourhood search (CP 1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array
from flexd.core.placement import RankLayout
from flexd.planner.tables.options import Part, ShardingKind, TableOptions
from flexd.planner.tables.rank_loads import GroupMaxima, RankLoads, ShardAssignment

_CANDIDATES = 12
"""Pieces of the busiest rank that are tried, those that load it most."""
_PARTNERS = 12
"""Pieces that each of them is tried to be exchanged with."""
_REBUILT_AFTER = 256
"""Moves after which loads are added up again, so that rounding does not gather."""
_LEAST_GAIN = 1e-6
_TAKEN = 6
"""Most pieces that are taken away at once."""
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
            _, option, place = self._best(int(at), math.inf, self._rank_seconds())
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

    def _rank_seconds(self) -> Float64Array:
        """float64[N, L]: what each rank has to do, to tell places apart that are as good for the busiest."""
        of_rank = np.tensordot(self.tables.axis_seconds, self.loads.total[:-1], axes=1)
        return np.asarray(of_rank * _TIE, dtype=np.float64)

    def _best(self, at: int, most: float, tie: Float64Array | None = None) -> tuple[float, int, int]:
        """(seconds, option, place) of the best place of a piece that was taken away; its own if none takes less than
        ``most``."""
        around = self.loads.group_maxima()
        best = (most, int(self.option[at]), int(self.place[at]))
        for option in self._options(at):
            self.evaluations -= 1
            seconds = self._seconds_at(at, option, around)
            if tie is not None and self.tables.options[option].rule is ShardingKind.TABLE_ROW_WISE:
                seconds = seconds + tie.max(axis=1)
            elif tie is not None:
                seconds = seconds + (tie.ravel() if len(seconds) > 1 else tie.mean())
            least = int(seconds.argmin())
            if seconds[least] < best[0]:
                best = (float(seconds[least]), option, least)
        return best

    def _seconds_at(self, at: int, option: int, around: GroupMaxima) -> Float64Array:
        """float64[places]: of a step with this piece."""
        seconds = self.loads.seconds_at(int(self.table[at]), option, around)
        seconds[self._siblings(at)] = np.inf
        return seconds

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
