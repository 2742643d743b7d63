"""Tables, and the flat key space in which all parts of flexd name rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Int64Array
from flexd.core.errors import ConfigError
from flexd.core.sharding_types import ROW_WISE, ShardingType

RowDType = Literal["float64", "float32", "float16", "bfloat16"]
RowOptimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"]
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
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
        return self.dim * DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's optimizer state, which migrates with the row."""
        return sum(state_columns(self.optimizer, self.dim).values()) * (8 if self.dtype == "float64" else 4)


_WHOLE_NUMBERS = frozenset({"rows", "dim"})
_TABLE_FIELDS = frozenset(field.name for field in fields(TableSpec))


def table_from_document(document: Any) -> TableSpec:
    """Return the table of a JSON object (``dataclasses.asdict``); fields that this version does not know are ignored.

    Raises:
        ValueError, TypeError: it is no such object.
        ConfigError: a value is not allowed.
    """
    if not isinstance(document, dict):
        raise ValueError("a table that is no JSON object")
    known = {name: value for name, value in document.items() if name in _TABLE_FIELDS}
    for name, value in known.items():
        if type(value) is not (int if name in _WHOLE_NUMBERS else str):
            raise ValueError(f"{name} of a table is {str(value)[:40]!r}")
    return TableSpec(**known)


@dataclass(frozen=True)
class DimGroup:
    """Tables of equal dim, dtype and optimizer: one contiguous key range ``[first_key, first_key + rows)``."""

    dim: int
    dtype: str
    optimizer: str
    first_key: int
    rows: int
    tables: tuple[int, ...]
    """Indices into ``KeySpace.tables``, in key order."""

    @property
    def end_key(self) -> int:
        return self.first_key + self.rows


class KeySpace:
    """Maps (table, row) to one int64 key and back.

    Groups follow one another in the order of their first table; within a group the tables keep their order. A key
    therefore depends on the table list alone, not on the number of ranks, so plans and placements keep their meaning
    when the world size changes. Home rank and node owner are arithmetic on the key (``flexd.core.homes``).

    Raises:
        ConfigError: no tables, or two of the same name.
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.tables = tuple(tables)
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
        self.first_key: Int64Array = np.zeros(len(self.tables), dtype=np.int64)
        """int64[tables]: the key of each table's row 0."""
        groups: list[DimGroup] = []
        key = 0
        for (dim, dtype, optimizer), indices in members.items():
            first = key
            for i in indices:
                self.first_key[i] = key
                key += self.tables[i].rows
            groups.append(DimGroup(dim, dtype, optimizer, first, key - first, tuple(indices)))
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
