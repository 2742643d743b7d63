"""Limits of a plan: replica slots of ranks and tables, pinned rows, excluded tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.home_rules import SPREAD
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.workload import GroupLoad

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

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
        table_slots: table -> replica slots its rows may take on any one rank.
    """

    pins: tuple[RowPin, ...] = ()
    exclude_tables: frozenset[str] = frozenset()
    table_slots: Mapping[str, int] = field(default_factory=dict)

    def check(self, keyspace: KeySpace) -> None:
        """Raise PlanError that names the fault: an unknown table, a row outside, slots below 0."""
        named = {*self.exclude_tables, *self.table_slots, *(pin.table for pin in self.pins)}
        unknown = sorted(named - set(keyspace.index))
        if unknown:
            raise PlanError(f"tables that do not exist: {', '.join(unknown)}", remedy="name tables of the job")
        for name, slots in self.table_slots.items():
            if slots < 0:
                raise PlanError(f"replica slots of table {name!r}: {slots}", remedy="give at least 0")
        for pin in self.pins:
            if pin.table in self.exclude_tables and pin.tier != Tier.HOME:
                raise PlanError(
                    f"table {pin.table!r} is excluded and pinned to {pin.tier.name}", remedy="give one of the two"
                )
            if keyspace.tables[keyspace.index[pin.table]].homes != SPREAD and pin.tier != Tier.HOME:
                raise PlanError(
                    f"table {pin.table!r} has a home rule and is pinned to {pin.tier.name}",
                    remedy=f"plans copy rows of tables with the rule {SPREAD!r} alone",
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
        fixed = np.full(len(keys), FREE, np.uint8)
        for pin in self._all_pins(keyspace):
            fixed[_of_rows(keys, keyspace, keyspace.index[pin.table], pin.rows)] = pin.tier
        return fixed

    def _all_pins(self, keyspace: KeySpace) -> list[RowPin]:
        """Return the pins. Copies of rows that are not spread over all ranks have other costs than are priced here."""
        ruled = {table.name for table in keyspace.tables if table.homes != SPREAD}
        return [RowPin(name, Tier.HOME) for name in sorted(self.exclude_tables | ruled)] + list(self.pins)

    def of_group(self, load: GroupLoad, keyspace: KeySpace, slots: Int64Array) -> GroupLimits:
        """Return the limits of one dim-group. ``slots`` int64[world]."""
        first, end = self._range(keyspace, load.group)
        fixed: UInt8Array | None = None
        budget: Int64Array | None = None
        budgets: list[int] = []
        members = set(keyspace.groups[load.group].tables)
        for pin in self._all_pins(keyspace):
            table = keyspace.index[pin.table]
            if table not in members:
                continue
            fixed = np.full(len(load.keys), FREE, np.uint8) if fixed is None else fixed
            fixed[_of_rows(load.keys, keyspace, table, pin.rows)] = pin.tier
        for name in sorted(self.table_slots):
            table = keyspace.index[name]
            if table not in members:
                continue
            budget = np.full(len(load.keys), -1, np.int64) if budget is None else budget
            budget[_of_rows(load.keys, keyspace, table, None)] = len(budgets)
            budgets.append(self.table_slots[name])
        if bool((load.keys < first).any() or (load.keys >= end).any()):
            raise PlanError("a load lists keys of another dim-group", remedy="report this")
        return GroupLimits(slots, fixed, budget, np.array(budgets, dtype=np.int64))

    @staticmethod
    def _range(keyspace: KeySpace, group: int) -> tuple[int, int]:
        return keyspace.groups[group].first_key, keyspace.groups[group].end_key


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
        fixed: uint8[h], tier of each listed row that is pinned, else FREE. None: no pin.
        budget: int64[h], index into ``budgets`` of the row's table, or -1. None: no table has a budget.
        budgets: int64[b], replica slots on every rank for the rows of one table.
    """

    slots: Int64Array
    fixed: UInt8Array | None = None
    budget: Int64Array | None = None
    budgets: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    @staticmethod
    def of(slots: int | Int64Array, layout: RankLayout) -> GroupLimits:
        """Slots alone: one number for every rank, or one for each.

        Raises:
            PlanError: negative slots, or not one number per rank.
        """
        return GroupLimits(slots_of_ranks(slots, layout))

    def fits(self, keys: Int64Array, tiers: UInt8Array, layout: RankLayout) -> bool:
        """Return whether these tiers keep to slots, budgets and pins."""
        if bool((layout.replica_slots_used(keys, tiers) > self.slots).any()):
            return False
        if self.fixed is not None and bool(((self.fixed != FREE) & (tiers != self.fixed)).any()):
            return False
        if self.budget is None:
            return True
        return all(
            int(layout.replica_slots_used(keys[self.budget == i], tiers[self.budget == i]).max(initial=0)) <= slots
            for i, slots in enumerate(self.budgets.tolist())
        )


def slots_of_ranks(slots: int | Int64Array, layout: RankLayout) -> Int64Array:
    """Return int64[world] slots of the ranks; one number stands for every rank.

    Raises:
        PlanError: negative slots, or not one number per rank.
    """
    given = np.asarray(slots)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != layout.world_size):
        raise PlanError(f"replica slots of {given.shape} for {layout.world_size} ranks", remedy="one number per rank")
    if not np.issubdtype(given.dtype, np.integer) or bool((given < 0).any()):
        raise PlanError(f"replica slots: {slots}", remedy="give integers of at least 0")
    return np.broadcast_to(given.astype(np.int64), (layout.world_size,)).copy()


class SlotBudgets:
    """Replica slots by (constraint, rank): one constraint a dim-group, one a table with a budget of its own.

    Args:
        slots: of each dim-group, one number or int64[world].
        table_slots: table name -> slots on every rank.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        layout: RankLayout,
        slots: Sequence[int | Int64Array],
        table_slots: Mapping[str, int] | None = None,
    ) -> None:
        self._keyspace, self._layout = keyspace, layout
        self._tables = {keyspace.index[name]: limit for name, limit in sorted((table_slots or {}).items())}
        of_groups = [slots_of_ranks(group, layout) for group in slots]
        of_tables = [slots_of_ranks(limit, layout) for limit in self._tables.values()]
        self.limits: Int64Array = np.stack([*of_groups, *of_tables])
        """int64[constraints, world]."""

    def used(self, keys: Int64Array, tiers: UInt8Array) -> Int64Array:
        """Return int64[constraints, world]: slots that rows at these tiers use."""
        group = self._keyspace.group_of(keys)
        result = [
            self._layout.replica_slots_used(keys[group == g], tiers[group == g])
            for g in range(len(self._keyspace.groups))
        ]
        for table in self._tables:
            first = int(self._keyspace.first_key[table])
            mine = (keys >= first) & (keys < first + self._keyspace.tables[table].rows)
            result.append(self._layout.replica_slots_used(keys[mine], tiers[mine]))
        return np.stack(result)
