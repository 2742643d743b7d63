"""Restore saved sketches into the configured tables and settings: a table whose counters changed starts empty, alone.

A table is recognised by its name. Row ids must mean what they meant: flexd cannot know whether a table that has the
same name and as many rows was filled anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexd.core.keyspace import TableSpec
from flexd.sketch import budget, saved_state
from flexd.sketch.budget import TableChoice
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
    return tuple(outcome for outcome, _, _ in _compare(saved_state.parse(meta), tables, settings))


def restore(
    meta: Mapping[str, Any], arrays: Arrays, tables: Sequence[TableSpec], settings: SketchSettings
) -> tuple[SketchSet, tuple[TableOutcome, ...]]:
    """Return the sketches for these tables and settings with every count that can be continued, and what was done.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it is damaged or of an older format, or the settings are impossible.
    """
    saved = saved_state.parse(meta)
    fresh = SketchSet.of(tables, settings)
    fresh.load_clock(saved.decay)
    outcomes = []
    for outcome, index, table in _compare(saved, tables, settings):
        outcomes.append(outcome)
        if outcome.outcome == "kept" and table is not None and index is not None:
            fresh.load_table(index, table, arrays)
    fresh.load_coaccess(saved, arrays)
    return fresh, tuple(outcomes)


def _compare(
    saved: SavedState, tables: Sequence[TableSpec], settings: SketchSettings
) -> list[tuple[TableOutcome, int | None, SavedTable | None]]:
    """Return (outcome, index of the configured table, saved table): configured tables in their order, then removed
    ones."""
    choices = budget.choose(
        tables, settings.memory_bytes, settings.max_hot_rows, logarithmic=settings.logarithmic
    )  # fmt: skip
    by_name = {table.spec.name: table for table in saved.tables}
    found: list[tuple[TableOutcome, int | None, SavedTable | None]] = []
    for index, (spec, choice) in enumerate(zip(tables, choices, strict=True)):
        table = by_name.pop(spec.name, None)
        if table is None:
            found.append((TableOutcome(spec.name, "new", 0), index, None))
            continue
        changed = _changes(table, spec, choice)
        if saved.settings.half_life_seconds != settings.half_life_seconds:
            changed.append("half-life")
        if saved.settings.share != settings.share:
            changed.append(f"{saved.settings.share:g} of the stream was counted, now {settings.share:g}")
        outcome = TableOutcome(spec.name, "emptied" if changed else "kept", table.accesses, ", ".join(changed))
        found.append((outcome, index, table))
    for table in by_name.values():
        found.append((TableOutcome(table.spec.name, "removed", table.accesses, "not configured"), None, table))
    return found


def _changes(saved: SavedTable, spec: TableSpec, choice: TableChoice) -> list[str]:
    """Return in words why the saved counters of a table cannot be loaded; empty if they can."""
    changed = []
    if saved.spec.rows != spec.rows:
        changed.append(f"{saved.spec.rows} rows to {spec.rows}")
    old, new = _words(saved.choice), _words(choice)
    if old != new:
        changed.append(f"{old} to {new}")
    return changed


def _words(choice: TableChoice) -> str:
    if choice.kind == "logarithmic":
        return f"logarithmic ({choice.counter_bits} bits)"
    return "dense" if choice.kind == "dense" else f"count-min (2^{choice.log2_width}, {choice.hot_rows} hot rows)"
