"""Restore saved sketches into the configured tables and settings: a table whose counters changed starts empty, alone.

A table is recognised by its name. Row ids must mean what they meant: flexd cannot know whether a table that has the
same name and as many rows was filled anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flexd.core.errors import SketchError, StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.sketch import budget
from flexd.sketch.sketch_set import STATE_FORMAT, SketchSet
from flexd.sketch.table_sketch import Arrays
from flexd.sketch.types import SketchSettings, TableChoice

Outcome = Literal["kept", "emptied", "new", "removed"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "emptied", "new", "removed")


@dataclass(frozen=True)
class TableOutcome:
    """The fate of one table when saved sketches are restored.

    Attributes:
        table: name.
        outcome: ``kept`` as it was, ``emptied`` because its counters are others now, ``new`` (not in the saved state)
            or ``removed`` (not configured any more).
        accesses: accesses counted in the saved state.
        detail: what changed, or why the table starts empty; "" if nothing did.
    """

    table: str
    outcome: Outcome
    accesses: int
    detail: str = ""

    @property
    def lost(self) -> int:
        """Accesses whose counts are not continued."""
        return self.accesses if self.outcome in ("emptied", "removed") else 0


def _outcomes(
    state: Mapping[str, Any], tables: Sequence[TableSpec], settings: SketchSettings
) -> tuple[TableOutcome, ...]:
    """Return the fate of each table: the configured ones in their order, then the removed ones."""
    _check_format(state.get("format"))
    choices = budget.choose(tables, settings.memory_bytes, settings.max_hot_rows, logarithmic=settings.logarithmic)
    with _damaged():
        was_half_life, was_share = state["settings"]["half_life_seconds"], state["settings"]["share"]
        saved = {
            spec["name"]: (TableSpec(**spec), TableChoice(**sketch["choice"]), int(sketch["samples"]))
            for spec, sketch in zip(state["table_list"], state["sketches"], strict=True)
        }
    found = []
    for spec, choice in zip(tables, choices, strict=True):
        if spec.name not in saved:
            found.append(TableOutcome(spec.name, "new", 0))
            continue
        old_spec, old_choice, accesses = saved.pop(spec.name)
        changed = []
        if old_spec.rows != spec.rows:
            changed.append(f"{old_spec.rows} rows to {spec.rows}")
        old, new = _words(old_choice), _words(choice)
        if old != new:
            changed.append(f"{old} to {new}")
        if was_half_life != settings.half_life_seconds:
            changed.append("half-life")
        if was_share != settings.share:
            changed.append(f"{was_share:g} of the stream was counted, now {settings.share:g}")
        found.append(TableOutcome(spec.name, "emptied" if changed else "kept", accesses, ", ".join(changed)))
    removed = [TableOutcome(name, "removed", accesses, "not configured") for name, (_, _, accesses) in saved.items()]
    return (*found, *removed)


def restore(
    state: Mapping[str, Any], arrays: Arrays, tables: Sequence[TableSpec], settings: SketchSettings
) -> tuple[SketchSet, tuple[TableOutcome, ...]]:
    """Return the sketches for these tables and settings with every count that can be continued, and what was done.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it is damaged or of an older format, or the settings are impossible.
    """
    outcomes = _outcomes(state, tables, settings)
    fresh = SketchSet(tables, settings)
    with _damaged():
        index = {spec["name"]: at for at, spec in enumerate(state["table_list"])}
        kept = {outcome.table: index[outcome.table] for outcome in outcomes if outcome.outcome == "kept"}
        same_decay = state["settings"]["half_life_seconds"] == settings.half_life_seconds
        fresh.load(state, arrays, kept, coaccess=same_decay)
    return fresh, outcomes


def _check_format(number: object) -> None:
    if isinstance(number, int) and number > STATE_FORMAT:
        raise StateVersionError(
            f"sketch state of format {number} is of a newer flexd; this one reads {STATE_FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )
    if number != STATE_FORMAT:
        raise SketchError(
            f"sketch state of format {str(number)[:40]!r}, this flexd reads {STATE_FORMAT}", remedy="start without it"
        )


@contextlib.contextmanager
def _damaged() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SketchError(f"sketch state is damaged: {error!r}", remedy="use an earlier snapshot") from error


def _words(choice: TableChoice) -> str:
    if choice.kind == "logarithmic":
        return f"logarithmic ({choice.counter_bits} bits)"
    return "dense" if choice.kind == "dense" else f"count-min (2^{choice.log2_width}, {choice.hot_rows} hot rows)"
