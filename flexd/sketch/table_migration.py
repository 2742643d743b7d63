"""Restore saved sketches into other tables or settings: table by table, what fits stays.

A table is recognised by its name. Row ids must mean what they meant: flexd cannot know whether a table that has the
same name and other rows was filled anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexd.core.keyspace import TableSpec
from flexd.sketch import budget, conversion, saved_state
from flexd.sketch.conversion import Clocks
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.saved_state import SavedState, SavedTable
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_outcome import TableOutcome
from flexd.sketch.table_sketch import Arrays
from flexd.sketch.types import SketchSettings


def outcomes_of(
    meta: Mapping[str, Any], tables: Sequence[TableSpec], settings: SketchSettings
) -> tuple[TableOutcome, ...]:
    """Return what ``restore`` would do with each table, from the description alone.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it cannot be read, or the settings are impossible.
    """
    return tuple(outcome for outcome, _, _ in _compare(saved_state.parse(meta, tables), tables, settings))


def restore(
    meta: Mapping[str, Any], arrays: Arrays, tables: Sequence[TableSpec], settings: SketchSettings
) -> tuple[SketchSet, tuple[TableOutcome, ...]]:
    """Return the sketches for these tables and settings with every count that can be continued, and what was done.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it is damaged or too old, or the settings are impossible.
    """
    saved = saved_state.parse(meta, tables)
    fresh = SketchSet.of(tables, settings)
    fresh.load_clock(saved.decay)
    old_clock = ForwardDecay(saved.settings.half_life_seconds, 0.0)
    # A clock of the same readings: another half-life only changes the weights.
    old_clock.copy_times(fresh.event_clock)
    clocks = Clocks(old_clock, fresh.event_clock)
    outcomes = []
    for outcome, index, table in _compare(saved, tables, settings):
        outcomes.append(outcome)
        if table is None or index is None or outcome.outcome == "emptied":
            continue
        if outcome.outcome == "kept":
            fresh.load_table(index, table, arrays)
        else:
            _convert(fresh, index, table, arrays, clocks)
    fresh.load_coaccess(saved, arrays)
    return fresh, tuple(outcomes)


def _convert(fresh: SketchSet, index: int, table: SavedTable, arrays: Arrays, clocks: Clocks) -> None:
    fresh.load_table(
        index, table, arrays, lambda old: conversion.convert(old, fresh.sketch(index), clocks, seed=index)
    )  # fmt: skip


def _compare(
    saved: SavedState, tables: Sequence[TableSpec], settings: SketchSettings
) -> list[tuple[TableOutcome, int | None, SavedTable | None]]:
    """Return (outcome, index of the configured table, saved table): configured tables in their order, then removed
    ones."""
    choices = budget.choose(
        tables, settings.memory_bytes, settings.max_hot_rows, logarithmic=settings.logarithmic
    )  # fmt: skip
    by_name = {table.spec.name: table for table in saved.tables}
    same_half_life = saved.settings.half_life_seconds == settings.half_life_seconds
    found: list[tuple[TableOutcome, int | None, SavedTable | None]] = []
    for index, (spec, choice) in enumerate(zip(tables, choices, strict=True)):
        table = by_name.pop(spec.name, None)
        if table is None:
            found.append((TableOutcome(spec.name, "new", 0), index, None))
            continue
        changed = conversion.changes(table.spec, table.choice, spec, choice, same_half_life)
        obstacle = conversion.obstacle(table.spec, table.choice, spec, choice)
        if saved.settings.share != settings.share:
            obstacle = f"{saved.settings.share:g} of the stream was counted, now {settings.share:g}"
        if obstacle is not None:
            outcome = TableOutcome(spec.name, "emptied", table.accesses, obstacle)
        elif changed:
            outcome = TableOutcome(spec.name, "converted", table.accesses, ", ".join(changed))
        else:
            outcome = TableOutcome(spec.name, "kept", table.accesses)
        found.append((outcome, index, table))
    for table in by_name.values():
        found.append((TableOutcome(table.spec.name, "removed", table.accesses, "not configured"), None, table))
    return found
