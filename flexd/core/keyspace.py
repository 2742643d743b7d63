"""Tables, the flat key space in which all parts of flexd name rows, and where home copies are.

An *address* names a place for a home row: ``turn * world_size + rank``, where turns count the slots of a rank. Rows
that are spread over all ranks are dealt out one after another, so their address *is* their key, and nothing is computed
while all tables are spread. Whatever goes by home ranks (routes, stores, directories, node owners) reads addresses: the
home rank is ``address % world_size``, the rail ``address % local_ranks``. Whatever goes by tables and rows (streams,
plans, chunks, checkpoints) reads keys. ``Homes`` is the only place that knows both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import BoolArray, Int64Array, UInt8Array
from flexd.core.errors import ConfigError
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import ROW_WISE, ShardingType

RowDType = Literal["float64", "float32", "float16", "bfloat16", "int8"]
RowOptimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"]
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
QUANTIZED = "int8"
"""Dtype of read-only rows of 8-bit numbers with one float32 scale a row, which are looked up as float32."""
SCALE_BYTES = 4
_STATE_PER_ELEMENT: dict[str, dict[str, bool]] = {
    "sgd": {},
    "rowwise_adagrad": {"sum": False},
    "adagrad": {"sum": True},
    "adam": {"exp_avg": True, "exp_avg_sq": True},
    "rowwise_adam": {"exp_avg": True, "exp_avg_sq": False},
}
OPTIMIZERS = tuple(_STATE_PER_ELEMENT)


def state_columns(optimizer: str, dim: int) -> dict[str, int]:
    """Return the optimizer state of a row of ``dim`` numbers: name in ``torch.optim`` -> how many float32 numbers
    (float64 for float64 tables), in storage order."""
    return {name: dim if per_element else 1 for name, per_element in _STATE_PER_ELEMENT[optimizer].items()}


def row_width(dtype: str, dim: int) -> int:
    """Return of how many numbers of its dtype a row is stored; the bytes of its scale are four of an int8 row."""
    return dim + SCALE_BYTES if dtype == QUANTIZED else dim


@dataclass(frozen=True)
class TableSpec:
    """Shape, dtype, optimizer and sharding type of one embedding table."""

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    optimizer: str = "sgd"
    sharding: str = ROW_WISE
    """Sharding type (``ShardingType.parse``)."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a table has no name", remedy="name every table")
        if self.rows < 1 or self.dim < 1:
            raise ConfigError(
                f"table {self.name!r}: rows={self.rows}, dim={self.dim}", remedy="both must be at least 1"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"table {self.name!r}: dtype {self.dtype!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"table {self.name!r}: optimizer {self.optimizer!r}",
                remedy=f"one of {', '.join(OPTIMIZERS)}",
            )
        ShardingType.parse(self.sharding, self.name)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's values, which an exchange of the row moves in one direction."""
        return row_width(self.dtype, self.dim) * DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's optimizer state, which migrates with the row."""
        if self.dtype == QUANTIZED:
            return 0
        return sum(state_columns(self.optimizer, self.dim).values()) * (8 if self.dtype == "float64" else 4)


def table_from_document(document: Any) -> TableSpec:
    """Return the table of a JSON object (``dataclasses.asdict``); fields that this version does not know are ignored.

    Raises:
        ValueError, TypeError: it is no such object.
        ConfigError: a value is not allowed.
    """
    if not isinstance(document, dict):
        raise ValueError("a table that is no JSON object")
    known = {each.name: document[each.name] for each in fields(TableSpec) if each.name in document}
    for name, value in known.items():
        if type(value) is not (int if name in ("rows", "dim") else str):
            raise ValueError(f"{name} of a table is {str(value)[:40]!r}")
    return TableSpec(**known)


@dataclass(frozen=True)
class DimGroup:
    """Tables of equal dim, dtype and optimizer, all trained or all read only: one contiguous key range
    ``[first_key, first_key + rows)``."""

    dim: int
    dtype: str
    optimizer: str
    first_key: int
    rows: int
    tables: tuple[int, ...]
    """Indices into ``KeySpace.tables``, in key order."""
    trained: bool = True

    @property
    def state_columns(self) -> dict[str, int]:
        """The optimizer state of a row, as ``state_columns`` returns it; rows of read-only tables have none."""
        return state_columns(self.optimizer, self.dim) if self.trained else {}

    @property
    def width(self) -> int:
        """Numbers of ``dtype`` that a row is stored as."""
        return row_width(self.dtype, self.dim)

    @property
    def end_key(self) -> int:
        return self.first_key + self.rows


class KeySpace:
    """Maps (table, row) to one int64 key and back.

    Tables of equal dim, dtype and optimizer follow one another, in the order of the first of them. A key therefore
    depends on the table list alone, neither on the number of ranks nor on the tables that are read only, so plans and
    placements keep their meaning when these change. Home rank and node owner are arithmetic on the key (``Homes``).

    Args:
        read_only: names of the tables that are not trained. Those that follow one another are a dim-group.

    Raises:
        ConfigError: no tables, or two of the same name.
    """

    def __init__(self, tables: Sequence[TableSpec], read_only: Iterable[str] = ()) -> None:
        self.tables, self.read_only = tuple(tables), frozenset(read_only)
        if not self.tables:
            raise ConfigError("no tables", remedy="list at least one under `tables`")
        self.index = {table.name: i for i, table in enumerate(self.tables)}
        if len(self.index) != len(self.tables):
            names = [table.name for table in self.tables]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"tables named twice: {', '.join(twice)}", remedy="give each table its own name")
        members: dict[tuple[int, str, str], list[int]] = {}
        for i, table in enumerate(self.tables):
            members.setdefault((table.dim, table.dtype, table.optimizer), []).append(i)
        # int64[tables]: the key of each table's row 0.
        self.first_key: Int64Array = np.zeros(len(self.tables), dtype=np.int64)
        groups: list[DimGroup] = []
        key = 0
        for (dim, dtype, optimizer), indices in members.items():
            for trained, run in groupby(indices, key=lambda i: self.tables[i].name not in self.read_only):
                first, of_run = key, tuple(run)
                for i in of_run:
                    self.first_key[i] = key
                    key += self.tables[i].rows
                groups.append(DimGroup(dim, dtype, optimizer, first, key - first, of_run, trained))
        self.groups = tuple(groups)
        self.total_rows = key

    def keys(self, table: int, rows: npt.NDArray[np.integer]) -> Int64Array:
        """Map row ids of one table to int64[n] keys. The range of the rows is not checked."""
        keys: Int64Array = rows.astype(np.int64, copy=False) + self.first_key[table]
        return keys

    @cached_property
    def _order(self) -> Int64Array:
        return np.argsort(self.first_key, kind="stable").astype(np.int64)

    def table_of(self, keys: Int64Array) -> Int64Array:
        """Map int64[n] keys to int64[n] table indices."""
        order = self._order
        tables: Int64Array = order[np.searchsorted(self.first_key[order], keys, side="right") - 1]
        return tables

    def table_rows(self, keys: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Map int64[n] keys to (int64[n] table indices, int64[n] rows in those tables)."""
        table = self.table_of(keys)
        return table, keys - self.first_key[table]

    def group_of(self, keys: Int64Array) -> Int64Array:
        """Map int64[n] keys to int64[n] dim-group indices."""
        starts = np.array([group.first_key for group in self.groups], dtype=np.int64)
        return (np.searchsorted(starts, keys, side="right") - 1).astype(np.int64)

    @cached_property
    def sharding_types(self) -> tuple[ShardingType, ...]:
        """The sharding type of each table."""
        return tuple(ShardingType.parse(table.sharding, table.name) for table in self.tables)

    @property
    def whole(self) -> KeySpace:
        """The same tables in dim-groups as if none were read only: those that the daemon knows."""
        return self._whole if self.read_only else self

    @cached_property
    def _whole(self) -> KeySpace:
        return KeySpace(self.tables)

    def with_read_only(self, names: Iterable[str]) -> KeySpace:
        """Return the same tables and keys where those of ``names`` are read only."""
        return self if frozenset(names) == self.read_only else KeySpace(self.tables, names)

    @cached_property
    def group_of_table(self) -> Int64Array:
        """int64 [tables]: the dim-group of each."""
        return self.group_of(self.first_key)

    @cached_property
    def copy_bytes(self) -> tuple[int, ...]:
        """Bytes of one copy of a row of each dim-group: values, and optimizer state where it is trained."""
        specs = [(group, self.tables[group.tables[0]]) for group in self.groups]
        return tuple(spec.row_bytes + spec.state_bytes * group.trained for group, spec in specs)

    def room_for_copies(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the replica slots of each dim-group of a rank: there is room for any rows that a plan may copy,
        whichever tables are read only.

        Args:
            slots: of each dim-group of ``whole``, which is what a rank registers with.
        """
        of_whole = self.whole.group_of(np.array([group.first_key for group in self.groups]))
        return tuple(min(slots[at], group.rows) for at, group in zip(of_whole.tolist(), self.groups, strict=True))

    @cached_property
    def digest(self) -> str:
        """Hex digest of the table list, which must be equal on ranks and daemon."""
        return digest_of(self.tables)


def digest_of(tables: Iterable[TableSpec]) -> str:
    """Return ``KeySpace.digest`` of these tables."""
    # Spread tables have the digest of releases that knew no other rule.
    text = json.dumps(
        [
            [t.name, t.rows, t.dim, t.dtype, t.optimizer, *([t.sharding] if t.sharding != ROW_WISE else [])]
            for t in tables
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# In place of a key, for an address that no row has.
NO_KEY = -1
# A rank's turn in one number: ``(rank << TURN_BITS) + turn``.
TURN_BITS = 44


@dataclass(frozen=True)
class HomePart:
    """The places of a table's rows.

    The row of key k has its home on rank ``first_rank + k % span``, in turn ``k // span + turns``.

    Attributes:
        first_rank, span: the ranks that share the rows.
    """

    table: int
    first_rank: int
    span: int
    turns: int


@dataclass(frozen=True)
class HomeRun:
    """Rows of a table on one rank, perhaps none: every ``rows.step``-th row, in consecutive slots from ``first_slot``
    on."""

    rows: range
    first_slot: int

    @property
    def slots(self) -> slice:
        return slice(self.first_slot, self.first_slot + len(self.rows))


@dataclass(frozen=True)
class AddressFinder:
    """Finds the table of an address. Tables over all ranks hold ranges of addresses, the others turns of single ranks.

    Attributes:
        wide_starts: int64 [w] first address of each table over all ranks, ascending, after a first one below all.
        wide_parts: int64 [w] their numbers in ``Homes.home_parts``.
        narrow_codes: int64 [2, n] first turn, and the turn after the last, of each rank of each other table:
            ``(rank << TURN_BITS) + turn``, ascending, after a first one below all.
        narrow_parts: int64 [n] their numbers in ``Homes.home_parts``.
    """

    wide_starts: Int64Array
    wide_parts: Int64Array
    narrow_codes: Int64Array
    narrow_parts: Int64Array


class Homes:
    """The homes of all rows of a job, by the rules of the table list. Immutable.

    Raises:
        TopologyError: a rule names a node or rank that the job does not have.
        ConfigError: more rows on a rank than addresses have room for.
    """

    def __init__(self, keyspace: KeySpace, layout: RankLayout) -> None:
        self.keyspace, self.layout = keyspace, layout
        # Of each table.
        self.rules = keyspace.sharding_types
        # True if addresses are keys.
        self.linear = all(rule.spread for rule in self.rules)
        world = layout.world_size
        parts: list[HomePart] = []
        groups: list[DimGroup] = []
        turns: list[tuple[Int64Array, Int64Array]] = []
        end = 0
        for group in keyspace.groups:
            first = end + (group.first_key - end) % world
            of_group, begins, ends = _place_group(keyspace, group, layout, first)
            used = ends > begins
            end = int(((ends - 1) * world + np.arange(world) + 1)[used].max())
            parts += of_group
            groups.append(replace(group, first_key=first, rows=end - first))
            turns.append((begins, ends))
        # Requests carry addresses in 44 bits (``COUNT_SHIFT`` of ``flexd.embedding.exchange.route``).
        if end > (2**44):
            raise ConfigError(
                f"{end // world} rows on one of {world} ranks are more than addresses of 44 bits have room for",
                remedy="spread the largest tables over more ranks",
            )
        # Of each table, in the order of their keys.
        self.home_parts = tuple(sorted(parts, key=lambda part: int(keyspace.first_key[part.table])))
        # The dim-groups, with ranges of addresses in place of ranges of keys.
        self.groups = tuple(groups)
        self._turns = turns

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

    @cached_property
    def part_of(self) -> dict[int, HomePart]:
        """The places of each table's rows."""
        return {part.table: part for part in self.home_parts}

    # ---- slots of a rank ----

    def home_rows(self, group: int) -> Int64Array:
        """Return int64 [ranks]: slots for home rows of a dim-group on each rank. A few may have no row."""
        begins, ends = self._turns[group]
        return ends - begins

    def run(self, table: int, rank: int, rows: range | None = None) -> HomeRun:
        """Return the rows of a table with their home on ``rank``, in ascending order.

        Args:
            rows: of a contiguous range alone.
        """
        part, first_key = self.part_of[table], int(self.keyspace.first_key[table])
        wanted = range(self.keyspace.tables[table].rows) if rows is None else rows
        first = wanted.start + (rank - part.first_rank - first_key - wanted.start) % part.span
        if not part.first_rank <= rank < part.first_rank + part.span or first >= wanted.stop:
            return HomeRun(range(0), 0)
        turn = (first_key + first) // part.span + part.turns
        begins, _ = self._turns[self._group_of[table]]
        return HomeRun(range(first, wanted.stop, part.span), turn - int(begins[rank]))

    # ---- numbers of the tables, also for copies of this map on a device ----

    @cached_property
    def first_keys(self) -> Int64Array:
        """int64 [tables], ascending: the first key of each of ``home_parts``."""
        return np.array([int(self.keyspace.first_key[part.table]) for part in self.home_parts], dtype=np.int64)

    @cached_property
    def end_keys(self) -> Int64Array:
        """int64 [tables]: the key after the last of each of ``home_parts``."""
        rows = [self.keyspace.tables[part.table].rows for part in self.home_parts]
        return self.first_keys + np.array(rows, dtype=np.int64)

    @cached_property
    def factors(self) -> Int64Array:
        """int64 [2, tables]: shift and span of ``address = key + shift + key // span * (world_size - span)``."""
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


@lru_cache(maxsize=16)
def homes_of(keyspace: KeySpace, layout: RankLayout) -> Homes:
    """Return the homes by the rules of the table list, made once for each pair.

    Raises:
        TopologyError, ConfigError: as ``Homes``.
    """
    return Homes(keyspace, layout)


def _place_group(
    keyspace: KeySpace, group: DimGroup, layout: RankLayout, first: int
) -> tuple[list[HomePart], Int64Array, Int64Array]:
    """Give the tables of a dim-group places from address ``first`` on: those over all ranks first, in the order of
    their keys, then those of nodes, then those of single ranks.

    Returns:
        (their parts; int64 [ranks] first turn of each rank; the turn after the last of each).
    """
    world, rules = layout.world_size, keyspace.sharding_types
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
        parts.append(HomePart(table, 0, world, (address - first_key) // world))
        address += rows
    ends = np.maximum(begins, (address - ranks + world - 1) // world)
    for _, table in sorted(narrow):
        ranks_of = rules[table].ranks(layout)
        span, mine = len(ranks_of), slice(ranks_of.start, ranks_of.stop)
        first_key, rows = int(keyspace.first_key[table]), keyspace.tables[table].rows
        turns = int(ends[mine].max()) - first_key // span
        parts.append(HomePart(table, ranks_of.start, span, turns))
        last_turns = (first_key + rows - 1 - np.arange(span)) // span + turns
        ends[mine] = np.maximum(ends[mine], last_turns + 1)
    return parts, begins, ends
