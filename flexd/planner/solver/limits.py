"""Limits of a plan: replica slots of ranks, pinned rows, excluded tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Int64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import RankLayout, Tier
from flexd.core.sharding_types import ROW_WISE

FREE = 255
"""Marks a row that is not pinned: the optimiser chooses its tier."""


@dataclass(frozen=True)
class RowPin:
    """Rows of one table that keep one tier.

    Attributes:
        rows: int64[n] row ids; None: the whole table.
    """

    table: str
    tier: Tier
    rows: Int64Array | None = None


@dataclass(frozen=True)
class PlanLimits:
    """Limits that the user sets.

    Attributes:
        pins: rows whose tier is fixed, whether it pays or not. A later pin of the same row counts.
        exclude_tables: tables that stay at HOME; a pin above HOME of such a table is an error.
    """

    pins: tuple[RowPin, ...] = ()
    exclude_tables: frozenset[str] = frozenset()

    def check(self, keyspace: KeySpace) -> None:
        """Raise PlanError that names the fault: an unknown table, or a row outside."""
        named = {*self.exclude_tables, *(pin.table for pin in self.pins)}
        unknown = sorted(named - set(keyspace.index))
        if unknown:
            raise PlanError(f"tables that do not exist: {', '.join(unknown)}", remedy="name tables of the job")
        for pin in self.pins:
            if pin.table in self.exclude_tables and pin.tier != Tier.HOME:
                raise PlanError(
                    f"table {pin.table!r} is excluded and pinned to {pin.tier.name}", remedy="give one of the two"
                )
            if keyspace.tables[keyspace.index[pin.table]].sharding != ROW_WISE and pin.tier != Tier.HOME:
                raise PlanError(
                    f"table {pin.table!r} is not {ROW_WISE} and is pinned to {pin.tier.name}",
                    remedy=f"plans copy rows of {ROW_WISE} tables alone",
                )
            rows = keyspace.tables[keyspace.index[pin.table]].rows
            if pin.rows is not None and len(pin.rows) and not 0 <= int(pin.rows.min()) <= int(pin.rows.max()) < rows:
                raise PlanError(
                    f"a pinned row of table {pin.table!r} is outside it", remedy=f"rows are 0 to {rows - 1}"
                )

    def replicated_keys(self, keyspace: KeySpace) -> Int64Array:
        """Return int64[n] keys pinned above HOME, which the loads must list."""
        keys = [
            keyspace.keys(
                keyspace.index[pin.table],
                np.arange(keyspace.tables[keyspace.index[pin.table]].rows) if pin.rows is None else pin.rows,
            )
            for pin in self.pins
            if pin.tier != Tier.HOME
        ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *keys]))

    def fixed_tiers(self, keys: Int64Array, keyspace: KeySpace) -> UInt8Array:
        """Return uint8[n]: the tier that pins and excluded tables give each of the ascending keys, else FREE."""
        # Copies of rows that are not spread over all ranks have other costs than are priced here.
        stay = self.exclude_tables | {table.name for table in keyspace.tables if table.sharding != ROW_WISE}
        fixed = np.full(len(keys), FREE, np.uint8)
        for pin in (*(RowPin(name, Tier.HOME) for name in sorted(stay)), *self.pins):
            fixed[_of_rows(keys, keyspace, keyspace.index[pin.table], pin.rows)] = pin.tier
        return fixed


def _of_rows(keys: Int64Array, keyspace: KeySpace, table: int, rows: Int64Array | None) -> Int64Array:
    """int64: positions in the ascending ``keys`` of these rows (None: all) of the table."""
    first = int(keyspace.first_key[table])
    start, end = np.searchsorted(keys, [first, first + keyspace.tables[table].rows])
    of_table = np.arange(start, end)
    return of_table if rows is None else of_table[np.isin(keys[start:end], keyspace.keys(table, rows))]


@dataclass(frozen=True)
class GroupLimits:
    """Limits of one dim-group.

    Attributes:
        slots: int64[world], replica slots of each rank.
        fixed: uint8[h], tier of each listed row that is pinned, else FREE.
    """

    slots: Int64Array
    fixed: UInt8Array

    def fits(self, keys: Int64Array, tiers: UInt8Array, layout: RankLayout) -> bool:
        """Return whether these tiers keep to slots and pins."""
        within = bool((layout.replica_slots_used(keys, tiers) <= self.slots).all())
        return within and not bool(((self.fixed != FREE) & (tiers != self.fixed)).any())


def slots_used(keys: Int64Array, tiers: UInt8Array, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    """Return int64[groups, world]: replica slots that rows at these tiers use."""
    group = keyspace.group_of(keys)
    return np.stack(
        [layout.replica_slots_used(keys[group == g], tiers[group == g]) for g in range(len(keyspace.groups))]
    )
