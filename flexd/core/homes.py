"""Where home copies are: the map from keys to addresses, by the home rules of the tables.

An *address* names a place for a home row: ``turn * world_size + rank``, where turns count the slots of a rank. Rows
that are spread over all ranks are dealt out one after another, so their address *is* their key, and nothing is computed
while all tables are spread. Whatever goes by home ranks (routes, stores, directories, node owners) reads addresses: the
home rank is ``address % world_size``, the rail ``address % local_ranks``. Whatever goes by tables and rows (streams,
plans, chunks, checkpoints) reads keys. ``Homes`` is the only place that knows both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
from flexd.core.home_rules import HomeRule
from flexd.core.keyspace import DimGroup, KeySpace
from flexd.core.layout import RankLayout

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

MAX_ADDRESS = 2**44
"""Requests carry addresses in 44 bits (``COUNT_SHIFT`` of ``flexd.embedding.exchange.route``)."""
NO_KEY = -1
"""In place of a key, for an address that no row has."""
TURN_BITS = 44
"""A rank's turn in one number: ``(rank << TURN_BITS) + turn``."""


@dataclass(frozen=True)
class HomePart:
    """Rows ``[first_row, end_row)`` of a table that follow one rule.

    The row of key k has its home on rank ``first_rank + k % span``, in turn ``k // span + turns``.

    Attributes:
        first_rank, span: the ranks that share the rows.
    """

    table: int
    first_row: int
    end_row: int
    first_rank: int
    span: int
    turns: int


@dataclass(frozen=True)
class HomeRun:
    """Rows of a table on one rank: every ``rows.step``-th row, in consecutive slots from ``first_slot`` on."""

    rows: range
    first_slot: int

    @property
    def slots(self) -> slice:
        return slice(self.first_slot, self.first_slot + len(self.rows))


@dataclass(frozen=True)
class AddressFinder:
    """Finds the part of an address. Parts over all ranks hold ranges of addresses, the others turns of single ranks.

    Attributes:
        wide_starts: int64 [w] first address of each part over all ranks, ascending, after a first one below all.
        wide_parts: int64 [w] their numbers.
        narrow_codes: int64 [2, n] first turn, and the turn after the last, of each rank of each other part:
            ``(rank << TURN_BITS) + turn``, ascending, after a first one below all.
        narrow_parts: int64 [n] their numbers.
    """

    wide_starts: Int64Array
    wide_parts: Int64Array
    narrow_codes: Int64Array
    narrow_parts: Int64Array


class Homes:
    """The homes of all rows of a job. Immutable: a rule that changes makes another map (``flexd.core.home_changes``).

    Args:
        rules: of each table; default those of the table list.
        spare: of each dim-group, slots on each rank beyond those that its rows fill, for rules that change; default 0.

    Raises:
        TopologyError: a rule names a node or rank that the job does not have.
        ConfigError: more rows on a rank than addresses have room for.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        layout: RankLayout,
        rules: Sequence[HomeRule] | None = None,
        spare: Sequence[int] = (),
    ) -> None:
        self.keyspace, self.layout = keyspace, layout
        self.rules = tuple(keyspace.home_rules if rules is None else rules)
        """Of each table; of one that changes, that of its last rows."""
        self.lower_rules: Mapping[int, HomeRule] = {}
        """Of the tables that change, the rule of their first rows."""
        self.linear = all(rule.spread for rule in self.rules) and not any(spare)
        """True if addresses are keys."""
        world = layout.world_size
        parts: list[HomePart] = []
        groups: list[DimGroup] = []
        turns: list[tuple[Int64Array, Int64Array]] = []
        end = 0
        for number, group in enumerate(keyspace.groups):
            first = end + (group.first_key - end) % world
            of_group, begins, ends = _place_group(keyspace, group, layout, self.rules, first)
            if any(spare):
                # One more, since ranks of a rule use the same turns, and those that a table fills may differ by one.
                ends = ends + spare[number] + (spare[number] > 0)
            used = ends > begins
            end = int(((ends - 1) * world + np.arange(world) + 1)[used].max())
            parts += of_group
            groups.append(replace(group, first_key=first, rows=end - first))
            turns.append((begins, ends))
        if end > MAX_ADDRESS:
            raise ConfigError(
                f"{end // world} rows on one of {world} ranks are more than addresses of 44 bits have room for",
                remedy="spread the largest tables over more ranks",
            )
        self.home_parts = tuple(sorted(parts, key=lambda part: int(keyspace.first_key[part.table]) + part.first_row))
        """In the order of their keys."""
        self.groups = tuple(groups)
        """The dim-groups, with ranges of addresses in place of ranges of keys."""
        self._turns = turns

    def with_parts(self, table: int, parts: Sequence[HomePart], rule: HomeRule, lower: HomeRule | None = None) -> Homes:
        """Return a map with other places for the rows of a table.

        Args:
            parts: in the order of their rows.
            rule: of the last rows.
            lower: of the first ones, if they have another.
        """
        made = self.with_places([*(part for part in self.home_parts if part.table != table), *parts])
        made.rules = (*self.rules[:table], rule, *self.rules[table + 1 :])
        changing = {other: of_other for other, of_other in self.lower_rules.items() if other != table}
        made.lower_rules = changing if lower is None else changing | {table: lower}
        return made

    def with_places(self, parts: Sequence[HomePart]) -> Homes:
        """Return a map with other places for all rows, whose rules are not those of the places: to read what was saved
        by slots."""
        made = copy.copy(self)
        for name in ("first_keys", "end_keys", "factors", "finder", "copied_keys", "_parts_of"):
            made.__dict__.pop(name, None)
        first_key = self.keyspace.first_key
        made.home_parts = tuple(sorted(parts, key=lambda part: int(first_key[part.table]) + part.first_row))
        made.linear = False
        return made

    # ---- keys and addresses ----

    def addresses(self, keys: Int64Array) -> Int64Array:
        """Map int64 [n] keys to int64 [n] addresses."""
        if self.linear:
            return keys
        return self._address(np.searchsorted(self.first_keys, keys, side="right") - 1, keys)

    def keys(self, addresses: Int64Array) -> Int64Array:
        """Map int64 [n] addresses to int64 [n] keys; ``NO_KEY`` where no row has the address."""
        if self.linear:
            return addresses
        finder, world = self.finder, self.layout.world_size
        turn = addresses // world
        rank = addresses - turn * world
        code = (rank << TURN_BITS) + turn
        starts, ends = finder.narrow_codes
        narrow = np.searchsorted(starts, code, side="right") - 1
        wide = np.searchsorted(finder.wide_starts, addresses, side="right") - 1
        part = np.where(code < ends[narrow], finder.narrow_parts[narrow], finder.wide_parts[wide])
        shift, span = self.factors[:, part]
        turns = shift // world
        keys = (turn - turns) * span + rank - (shift - turns * world)
        known = (keys >= self.first_keys[part]) & (keys < self.end_keys[part])
        return np.where(known & (self._address(part, keys) == addresses), keys, NO_KEY)

    def _address(self, part: Int64Array, keys: Int64Array) -> Int64Array:
        shift, span = self.factors[:, part]
        addresses: Int64Array = keys + shift + keys // span * (self.layout.world_size - span)
        return addresses

    # ---- ranks of keys ----

    def home_rank(self, keys: Int64Array) -> Int64Array:
        """Map int64 [n] keys to int64 [n] home ranks."""
        return self.layout.home_rank(self.addresses(keys))

    def home_node(self, keys: Int64Array) -> Int64Array:
        """Map int64 [n] keys to the int64 [n] nodes of their home ranks."""
        return self.layout.home_node(self.addresses(keys))

    def rail(self, keys: Int64Array) -> Int64Array:
        """Map int64 [n] keys to the int64 [n] local ranks of their homes and node owners."""
        return self.addresses(keys) % self.layout.local_ranks

    def holds_replica(self, rank: int, keys: Int64Array, tiers: UInt8Array) -> BoolArray:
        """Return bool [n]: true where ``rank`` holds a copy beside the home copy of the row at its tier."""
        return self.layout.holds_replica(rank, self.addresses(keys), tiers)

    def replica_slots_used(self, keys: Int64Array, tiers: UInt8Array) -> Int64Array:
        """Return int64 [ranks]: replica slots that rows at these tiers use on each rank."""
        return self.layout.replica_slots_used(self.addresses(keys), tiers)

    @cached_property
    def copied_keys(self) -> Int64Array:
        """int64 [n] ascending: the keys of all rows that every rank has copies of by their table's rule."""
        parts = [
            self.keyspace.first_key[table] + np.arange(self.keyspace.tables[table].rows, dtype=np.int64)
            for table, rule in enumerate(self.rules)
            if rule.copied
        ]
        return np.sort(np.concatenate([np.empty(0, np.int64), *parts]))

    def copied_slots(self, group: int) -> int:
        """Return the replica slots of each rank that the copies of ``copied_keys`` of a dim-group need at most."""
        tables = self.keyspace.groups[group].tables
        rows = sum(self.keyspace.tables[table].rows for table in tables if self.rules[table].copied)
        return rows if self.layout.world_size > 1 else 0

    # ---- tables ----

    def parts_of(self, table: int) -> Sequence[HomePart]:
        """Return the parts of a table in the order of their rows: two while its rule changes."""
        return self._parts_of[table]

    def boundary(self, table: int) -> int:
        """Return how many of a table's first rows have another rule than its last: 0 unless its rule changes."""
        return self._parts_of[table][0].end_row if table in self.lower_rules else 0

    def group_of(self, table: int) -> int:
        """Return the dim-group of a table."""
        return self._group_of[table]

    def turns(self, group: int) -> tuple[Int64Array, Int64Array]:
        """Return of a dim-group int64 [ranks] the first turn of each rank, and int64 [ranks] the one after its last."""
        return self._turns[group]

    # ---- slots of a rank ----

    def home_rows(self, group: int) -> Int64Array:
        """Return int64 [ranks]: slots for home rows of a dim-group on each rank. A few may have no row."""
        begins, ends = self._turns[group]
        return ends - begins

    def runs(self, table: int, rank: int, rows: range | None = None) -> list[HomeRun]:
        """Return the rows of a table with their home on ``rank``, in ascending order.

        Args:
            rows: of a contiguous range alone.
        """
        first_key, begins = int(self.keyspace.first_key[table]), self._turns[self._group_of[table]][0]
        wanted = range(self.keyspace.tables[table].rows) if rows is None else rows
        found = []
        for part in self._parts_of[table]:
            start, stop = max(part.first_row, wanted.start), min(part.end_row, wanted.stop)
            if not part.first_rank <= rank < part.first_rank + part.span:
                continue
            start += (rank - part.first_rank - first_key - start) % part.span
            if start < stop:
                turn = (first_key + start) // part.span + part.turns
                found.append(HomeRun(range(start, stop, part.span), turn - int(begins[rank])))
        return found

    # ---- numbers of the parts, also for copies of this map on a device ----

    @cached_property
    def first_keys(self) -> Int64Array:
        """int64 [parts], ascending: the first key of each part."""
        firsts = [int(self.keyspace.first_key[part.table]) + part.first_row for part in self.home_parts]
        return np.array(firsts, dtype=np.int64)

    @cached_property
    def end_keys(self) -> Int64Array:
        """int64 [parts]: the key after the last of each part."""
        ends = [int(self.keyspace.first_key[part.table]) + part.end_row for part in self.home_parts]
        return np.array(ends, dtype=np.int64)

    @cached_property
    def factors(self) -> Int64Array:
        """int64 [2, parts]: shift and span of ``address = key + shift + key // span * (world_size - span)``."""
        world = self.layout.world_size
        both = [
            [part.turns * world + part.first_rank for part in self.home_parts],
            [part.span for part in self.home_parts],
        ]
        return np.array(both, dtype=np.int64)

    @cached_property
    def finder(self) -> AddressFinder:
        world = self.layout.world_size
        wide, narrow = [(-1, 0)], [(-1, -1, 0)]
        starts = self._address(np.arange(len(self.home_parts)), self.first_keys).tolist()
        for number, part in enumerate(self.home_parts):
            if part.span == world:
                wide.append((starts[number], number))
                continue
            first, last = int(self.first_keys[number]), int(self.end_keys[number]) - 1
            for place in range(part.span):
                begin, end = (first - place + part.span - 1) // part.span, (last - place) // part.span + 1
                if begin < end:
                    code = ((part.first_rank + place) << TURN_BITS) + part.turns
                    narrow.append((code + begin, code + end, number))
        of_wide = np.array(sorted(wide), dtype=np.int64).T
        of_narrow = np.array(sorted(narrow), dtype=np.int64).T
        return AddressFinder(of_wide[0].copy(), of_wide[1].copy(), of_narrow[:2].copy(), of_narrow[2].copy())

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {table: g for g, group in enumerate(self.keyspace.groups) for table in group.tables}

    @cached_property
    def _parts_of(self) -> dict[int, list[HomePart]]:
        found: dict[int, list[HomePart]] = {}
        for part in self.home_parts:
            found.setdefault(part.table, []).append(part)
        return found


@lru_cache(maxsize=16)
def homes_of(keyspace: KeySpace, layout: RankLayout) -> Homes:
    """Return the homes by the rules of the table list, made once for each pair.

    Raises:
        TopologyError, ConfigError: as ``Homes``.
    """
    return Homes(keyspace, layout)


def _place_group(
    keyspace: KeySpace, group: DimGroup, layout: RankLayout, rules: Sequence[HomeRule], first: int
) -> tuple[list[HomePart], Int64Array, Int64Array]:
    """Give the tables of a dim-group places from address ``first`` on: those over all ranks first, in the order of
    their keys, then those of nodes, then those of single ranks.

    Returns:
        (their parts; int64 [ranks] first turn of each rank; the turn after the last of each).
    """
    world = layout.world_size
    ranks = np.arange(world, dtype=np.int64)
    begins = (first - ranks + world - 1) // world
    parts = []
    address = first
    narrow: list[tuple[int, int]] = []
    for table in group.tables:
        ranks_of = rules[table].ranks(layout)
        first_key, rows = int(keyspace.first_key[table]), keyspace.tables[table].rows
        if not rules[table].spread:
            narrow.append((-len(ranks_of), table))
            continue
        address += (first_key - address) % world
        parts.append(HomePart(table, 0, rows, 0, world, (address - first_key) // world))
        address += rows
    ends = np.maximum(begins, (address - ranks + world - 1) // world)
    for _, table in sorted(narrow):
        ranks_of = rules[table].ranks(layout)
        span, mine = len(ranks_of), slice(ranks_of.start, ranks_of.stop)
        first_key, rows = int(keyspace.first_key[table]), keyspace.tables[table].rows
        turns = int(ends[mine].max()) - first_key // span
        parts.append(HomePart(table, 0, rows, ranks_of.start, span, turns))
        last_turns = (first_key + rows - 1 - np.arange(span)) // span + turns
        ends[mine] = np.maximum(ends[mine], last_turns + 1)
    return parts, begins, ends
