"""Decide sharding type and pooling place of every table: relaxation, rounding, local search, and what the result may
miss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.errors import PlanError
from flexd.core.placement import RankLayout
from flexd.planner.model.cost import missed_share
from flexd.planner.tables.local_search import LocalSearch, RankLoads, ShardAssignment, add_piece
from flexd.planner.tables.options import Part, PoolingAt, ShardingKind, TableOption, TableOptions
from flexd.planner.tables.relaxation import Relaxation, relax

# Loads over their targets are raised to it: the higher, the more the fullest rank counts.
_POWER = 8
# Options whose price is above the best one's by no more than this share of it are decided where a table is placed.
_REGRET = 0.2
# A share from which an option counts as chosen.
_WHOLE = 0.999
# Of memory against the average axis, so that it fills evenly before it binds.
_MEMORY_WEIGHT = 0.1
_ROUNDINGS = 4
# A placement whose bound is this share of its seconds is the best there is: HiGHS is no more exact.
_SETTLED = 1 - 1e-6
EVALUATIONS = 6000
"""Of the local search around the rounded relaxation."""


@dataclass(frozen=True)
class TablePlacement:
    """A sharding type and a pooling place for every table.

    Attributes:
        pieces: of all tables, in their order.
        seconds: of a step, of the busiest rank phase by phase, with fixed seconds.
        bound_seconds: no placement takes less.
        spread_seconds: of the first option for every table.
        loads: float64[K, W], by axis.
        memory_bytes: float64[W].
    """

    tables: TableOptions
    layout: RankLayout
    pieces: ShardAssignment
    seconds: float
    bound_seconds: float
    spread_seconds: float
    loads: Float64Array
    memory_bytes: Float64Array

    @property
    def gap(self) -> float:
        """Largest share of the largest possible saving, against the first option for all, that this misses: 0 to 1."""
        return missed_share(self.seconds, self.spread_seconds, self.bound_seconds)

    @property
    def balance(self) -> float:
        """Least over most, of the ranks' seconds of all phases together (AutoShard's measure): 0 to 1."""
        of_rank = self.tables.axis_seconds @ self.loads
        return float(of_rank.min() / of_rank.max()) if of_rank.max() > 0 else 1.0

    def by_table(self) -> list[tuple[TableOption, list[int]]]:
        """Return (option, places of the pieces) of each table."""
        starts = np.searchsorted(self.pieces.table, np.arange(len(self.tables.names) + 1)).tolist()
        return [
            (self.tables.options[int(self.pieces.option[first])], self.pieces.place[first:end].tolist())
            for first, end in pairwise(starts)
        ]

    def rules(self) -> list[tuple[str, PoolingAt]]:
        """Return (sharding type, pooling place) of each table: "row_wise", "table_row_wise:3", "table_wise:12",
        "column_wise:4,12", "data_parallel"."""
        return [
            (
                str(option.rule) if option.everywhere else f"{option.rule}:{','.join(map(str, places))}",
                option.pooling_at,
            )
            for option, places in self.by_table()
        ]


def place_tables(
    tables: TableOptions,
    layout: RankLayout,
    memory_bytes: float,
    evaluations: int = EVALUATIONS,
) -> TablePlacement:
    """Return the placement of the shortest step that was found; deterministic.

    Candidates are the rounded relaxation with all pooling places and with the requester alone, improved by moves of
    single tables, and the first option for every table.

    Args:
        memory_bytes: of a rank, for the rows and optimizer state of these tables.
        evaluations: of single moves in each local search.

    Raises:
        PlanError: no placement within the memory was found.
    """
    if not (np.isfinite(memory_bytes) and memory_bytes > 0):
        raise PlanError(f"memory of a rank: {memory_bytes!r}", remedy="give bytes above 0")
    return _Solver(tables, layout, np.full(layout.world_size, float(memory_bytes)), evaluations).solve()


@dataclass
class _Solver:
    tables: TableOptions
    layout: RankLayout
    capacity: Float64Array
    evaluations: int

    def solve(self) -> TablePlacement:
        count = len(self.tables.names)
        spread = _pieces_of(self.tables, np.zeros(count, np.int64))
        candidates = [spread]
        even = self._even()
        if even.any():
            even_pieces = _pieces_of(self.tables, even)
            candidates += [even_pieces, self._search(even_pieces, self.tables, self.evaluations // _ROUNDINGS)]
        priced = [self.seconds(pieces) for pieces in candidates]
        relaxed = [
            (found, tables, fixed)
            for tables, fixed in self._restricted()
            if (found := relax(tables, self.layout, self.capacity)) is not None
        ]
        relaxed.sort(key=lambda one: one[0].bound_seconds + one[2])
        # Where the first option has several places, tables that have it must be placed still.
        placed = self.tables.options[0].places(self.layout) > 1
        for number, (found, tables, fixed) in enumerate(relaxed):
            if found.bound_seconds + fixed >= min(priced) * _SETTLED:
                break
            if placed or (found.shares[:, 0] < 1 - 1e-9).any():
                candidates.append(self._rounded(tables, found, thorough=number == 0))
                priced.append(self.seconds(candidates[-1]))
        best = int(np.argmin(priced))
        if not np.isfinite(priced[best]):
            memory = self.tables.mean(self.tables.memory_bytes, self.layout) * self.layout.world_size
            least = float(np.where(self.tables.allowed, memory, np.inf).min(axis=1).sum()) / 1e9
            raise PlanError(
                f"{count} tables of {least:.1f} GB find no place within the memory of "
                f"{self.layout.world_size} ranks, {float(self.capacity.sum()) / 1e9:.1f} GB",
                remedy="give more memory or more ranks, or allow tables to be spread over all ranks",
            )
        bound = min((found.bound_seconds + fixed for found, _, fixed in relaxed), default=np.inf)
        loads = RankLoads.of(self.tables, self.layout, self.capacity, candidates[best]).total
        flat = loads.reshape(len(loads), -1)
        return TablePlacement(
            self.tables,
            self.layout,
            candidates[best],
            priced[best],
            priced[best] if bound >= priced[best] * _SETTLED else bound,
            self.seconds(spread, check_memory=False),
            flat[:-1],
            flat[-1],
        )

    def _even(self) -> Int64Array:
        """int64[T]: of the options that load all ranks alike the one of least time."""
        tables = self.tables
        alike = np.array([option.rule is ShardingKind.ROW_WISE for option in tables.options])
        alike[0] = True
        seconds = tables.mean(tables.loads, self.layout) @ tables.axis_seconds
        return np.asarray(np.where(tables.allowed & alike, seconds, np.inf).argmin(axis=1), dtype=np.int64)

    def _rounded(self, tables: TableOptions, relaxed: Relaxation, *, thorough: bool) -> ShardAssignment:
        """Round towards targets that move to what was reached: where no placement reaches the relaxation's, the axes
        that can still be lowered must decide. Without ``thorough`` round once."""
        rounded: list[tuple[float, int, ShardAssignment]] = []
        near = relaxed
        for number in range(_ROUNDINGS):
            placed = _Rounding(tables, self.layout, self.capacity, near).run()
            found = self._search(placed, tables, self.evaluations // _ROUNDINGS)
            if not thorough:
                return found
            rounded.append((self.seconds(found), number, found))
            most = RankLoads.of(tables, self.layout, self.capacity, placed).maxima()[tables.axis_phase]
            near = replace(near, target=0.5 * (near.target + np.maximum(most, relaxed.target)))
        return self._search(min(rounded)[2], tables, self.evaluations)

    def seconds(self, pieces: ShardAssignment, *, check_memory: bool = True) -> float:
        """Return the seconds of a step, inf if memory does not suffice."""
        loads = RankLoads.of(self.tables, self.layout, self.capacity, pieces)
        if check_memory and loads.over_memory() > 1e-9 * float(self.capacity.sum()):
            return float("inf")
        used = {self.tables.options[option].pooling_at for option in np.unique(pieces.option)}
        fixed = sum(seconds for pooling_at, seconds in self.tables.pooling_seconds if pooling_at in used)
        return loads.seconds() + fixed

    def _restricted(self) -> Sequence[tuple[TableOptions, float]]:
        """(tables without some of the pooling places that cost fixed seconds, fixed seconds of the others)."""
        fixed = {pooling_at: seconds for pooling_at, seconds in self.tables.pooling_seconds if seconds > 0}
        result = []
        for count in range(len(fixed) + 1):
            for left_out in combinations(fixed, count):
                kept = np.array([option.pooling_at not in left_out for option in self.tables.options])
                allowed = self.tables.allowed & kept
                if allowed[:, 0].all():
                    rest = sum(seconds for pooling_at, seconds in fixed.items() if pooling_at not in left_out)
                    result.append((replace(self.tables, allowed=allowed), rest))
        return result

    def _search(self, pieces: ShardAssignment, tables: TableOptions, evaluations: int) -> ShardAssignment:
        return LocalSearch(tables, self.layout, self.capacity, pieces, evaluations).run()


def _pieces_of(tables: TableOptions, chosen: Int64Array) -> ShardAssignment:
    """Return the pieces of tables with these options, all at place 0."""
    number = tables.pieces[chosen]
    table = np.repeat(np.arange(len(chosen)), number)
    return ShardAssignment(table, chosen[table], np.zeros(len(table), np.int64))


@dataclass
class _Rounding:
    """A placement near a relaxation: options by regret, pieces in descending size, each to where it is cheapest.

    Tables that the relaxation spreads over all ranks are. The others are placed in descending order of what they
    add to the fullest axis, with the option and the place that raise the sum of powers of the loads over their targets
    least, among those with memory for them; if there are none, the next option counts.
    """

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
        self.load = np.zeros((len(self.goal), self.layout.nodes, self.layout.local_ranks))

    def run(self) -> ShardAssignment:
        tables, count = self.tables, len(self.tables.names)
        prices = np.where(tables.allowed, self.relaxed.reduced_seconds, np.inf)
        order = np.argsort(prices, axis=1, kind="stable")
        best = np.take_along_axis(prices, order[:, :1], axis=1)[:, 0]
        chosen = np.where(self.relaxed.shares.max(axis=1) > 0, self.relaxed.shares.argmax(axis=1), order[:, 0])
        near = prices <= (best + _REGRET * np.abs(best))[:, None]
        near[np.arange(count), chosen] = True
        even = np.array([option.everywhere for option in tables.options])
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
        pieces = self.tables.pieces
        # Pieces of a table are placed one after the other: worth it only where the relaxation has chosen that.
        options = options[:1] if pieces[options[0]] > 1 else [option for option in options if pieces[option] == 1]
        found = min(self._fitting(table, options), default=None)
        _, option, place = found or next(self._fitting(table, every.tolist()), (0.0, int(every[0]), 0))
        places = [place]
        self._add(table, option, place)
        for _ in range(int(pieces[option]) - 1):
            _, another = self._cheapest(table, option, places)
            places.append(places[-1] if another is None else another)
            self._add(table, option, places[-1])
        return option, places

    def _fitting(self, table: int, options: list[int]) -> Iterator[tuple[float, int, int]]:
        """Yield (seconds that the first piece adds, option, its place) of the options that there is memory for."""
        for option in options:
            worse, place = self._cheapest(table, option, [])
            if place is not None:
                yield worse, option, place

    def _cheapest(self, table: int, option: int, taken: list[int]) -> tuple[float, int | None]:
        """(seconds that a piece adds, its place); None if there is no memory for it anywhere."""
        every, node, rail, rank = self._parts(table, option)
        memory = self.load[-1] - self.room
        held = self.tables.options[option]
        # All ranks carry this part wherever the piece is.
        grown = _power(self.load + every[:, None, None]) - self.power if every.any() else np.zeros(1)
        total = float(self.weight @ grown.sum(axis=(1, 2))) if every.any() else 0.0
        if held.everywhere:
            return total, 0 if (memory + every[-1] <= 0).all() else None
        here = every + node
        of_node = _power(self.load + here[:, None, None]) - self.power - grown if node.any() else np.zeros((1, 1, 1))
        if held.rule is ShardingKind.TABLE_ROW_WISE:
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
                fits[taken] = False
        if not fits.any():
            return np.inf, None
        place = int(np.where(fits, worse, np.inf).argmin())
        return total + float(worse[place]), place

    def _add(self, table: int, option: int, place: int) -> None:
        add_piece(self.load, self._parts(table, option), self.tables.options[option], place)
        self.power = _power(self.load)


def _power(load: Float64Array) -> Float64Array:
    """The load to the power of 8."""
    load = load * load
    load = load * load
    return load * load
