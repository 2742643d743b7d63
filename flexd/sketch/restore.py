"""Loads the state that ingest starts from: the newest usable snapshot, table by table, or empty sketches.

A table is recognised by its name. Row ids must mean what they meant: flexd cannot know whether a table that has the
same name and as many rows was filled anew.

Stream positions stay with the counts. A table that starts empty, because it is new or its counters are others now,
counts from the restored positions on: the accesses before them are in the counters of the other tables already, and one
position serves all tables, so they are not read again for one. Where no saved table is configured any more the daemon
does not start, unless it may start empty: then it has no positions either, and counts what the stream still holds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flexd.core.arrays import Arrays
from flexd.core.errors import ConfigError, SketchError, SnapshotError, StateVersionError, UnusableStateError
from flexd.core.keyspace import TableSpec
from flexd.sketch import snapshot
from flexd.sketch.sketch_set import STATE_FORMAT, SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings, TableChoice

_log = logging.getLogger(__name__)

# Added to the saved profile generation on restore, so that profiles made after the snapshot keep unique numbers.
GENERATION_RESERVE = 1000
UNUSABLE_REMEDY = (
    "run the flexd and the configuration that wrote it (`flexd state show -c FILE` compares), or start without it: "
    "`flexd state reset -c FILE`, in a pod once with FLEXD__STATE__ON_UNUSABLE=reset"
)
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


@dataclass(frozen=True)
class SnapshotMeta:
    """Content of a snapshot beside the arrays of its sketches.

    Attributes:
        sketches: description of the sketches (``SketchSet.state``).
        positions: of the stream, by partition.
        generation: of the last profile.
    """

    sketches: dict[str, Any]
    positions: dict[str, int]
    generation: int

    @staticmethod
    def of(meta: Mapping[str, Any]) -> SnapshotMeta:
        """Return the values of a snapshot. Raises SketchError if it is malformed."""
        with _damaged():
            positions = {str(partition): int(offset) for partition, offset in meta["positions"].items()}
            return SnapshotMeta(dict(meta["sketches"]), positions, int(meta["generation"]))


@dataclass
class RestoredState:
    """The sketches to continue with, and what was saved with them.

    Attributes:
        positions: of the stream, by partition; None without a snapshot.
        generation: of the last profile.
        path, bytes: the restored snapshot and its size; None without one.
        outcomes: the fate of each table; empty without a snapshot.
        refused: newer snapshots that are not used, newest first.
        problems: why they are not.
        starts: False if only a start that may be empty goes on from here.
    """

    sketches: SketchSet
    positions: dict[str, int] | None = None
    generation: int = 0
    path: Path | None = None
    bytes: int = 0
    outcomes: tuple[TableOutcome, ...] = ()
    refused: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: bool = True

    def report(self, problem: str) -> None:
        """Log a problem and keep it for the status."""
        _log.warning("ingest: %s", problem)
        self.problems.append(problem)


def restore(
    snapshots: SnapshotStore | None, tables: Sequence[TableSpec], settings: SketchSettings, *, start_empty: bool = False
) -> RestoredState:
    """Load the newest usable snapshot, table by table, into the configured tables and settings.

    A damaged snapshot is set aside, and the one before it is used.

    Args:
        start_empty: set unusable state aside and start without it.

    Raises:
        UnusableStateError: there are snapshots, and none can be used; nothing has changed.
        SketchError, ConfigError: impossible sketch settings or tables.
    """
    if snapshots is None:
        return RestoredState(SketchSet(tables, settings))
    state = find_newest(snapshots, tables, settings, past_unusable=start_empty)
    if not state.starts and not start_empty:
        raise UnusableStateError(
            f"{snapshots.directory}: the saved counters cannot be continued: " + "; ".join(state.problems)[:2_000],
            remedy=UNUSABLE_REMEDY,
        )
    refused, state.problems = list(zip(state.refused, state.problems, strict=True)), []
    # The newest last: it is the one that stays.
    for path, problem in reversed(refused):
        state.report(problem)
        try:
            _log.warning("ingest: %s is now %s", path.name, snapshots.mark_unusable(path).name)
        except SnapshotError as error:
            state.report(str(error))
    if refused and state.path is None:
        state.report("the sketches start empty, and the stream at its earliest message")
    for outcome in state.outcomes:
        if outcome.outcome == "removed":
            _log.warning("ingest: table %s is removed: %d accesses are not continued", outcome.table, outcome.lost)
        elif outcome.outcome == "emptied":
            _log.warning(
                "ingest: table %s starts empty: its counters changed (%s), %d accesses are not continued",
                outcome.table, outcome.detail, outcome.lost,
            )  # fmt: skip
        elif outcome.outcome == "new":
            _log.info("ingest: table %s is new", outcome.table)
    return state


def find_newest(
    snapshots: SnapshotStore, tables: Sequence[TableSpec], settings: SketchSettings, *, past_unusable: bool = False
) -> RestoredState:
    """Load the newest usable snapshot, beside a daemon that may be running; change nothing.

    Args:
        past_unusable: go on to older snapshots behind one that is intact and cannot be used.

    Raises:
        SnapshotError: the directory cannot be listed.
        SketchError, ConfigError: impossible sketch settings or tables.
    """
    state = RestoredState(SketchSet(tables, settings))
    for path in snapshots.paths():
        try:
            _load(state, path, tables, settings)
            break
        except (SnapshotError, SketchError) as error:
            state.refused.append(path)
            state.problems.append(f"{path} is not used: {error.message}")
            if isinstance(error, StateVersionError | UnusableStateError):
                # An older snapshot would do, but nobody has said that what this one counted may go.
                state.starts = False
                if not past_unusable:
                    break
    state.starts = state.starts and (state.path is not None or not state.refused)
    return state


def _load(state: RestoredState, path: Path, tables: Sequence[TableSpec], settings: SketchSettings) -> None:
    meta, arrays = snapshot.read(path)
    saved = SnapshotMeta.of(meta)
    sketches, outcomes = restore_tables(saved.sketches, arrays, tables, settings)
    removed = [outcome.table for outcome in outcomes if outcome.outcome == "removed"]
    if removed and {outcome.outcome for outcome in outcomes} <= {"removed", "new"}:
        # It is of another job, or the configuration is wrong.
        raise UnusableStateError(
            f"none of its tables is configured ({', '.join(removed)[:500]})", remedy=UNUSABLE_REMEDY
        )
    state.sketches, state.outcomes = sketches, outcomes
    state.path, state.positions = path, saved.positions
    with contextlib.suppress(OSError):
        state.bytes = path.stat().st_size
    state.generation = saved.generation + GENERATION_RESERVE


def restore_tables(
    state: Mapping[str, Any], arrays: Arrays, tables: Sequence[TableSpec], settings: SketchSettings
) -> tuple[SketchSet, tuple[TableOutcome, ...]]:
    """Return the sketches for these tables and settings with every count that can be continued, and what was done: the
    configured tables in their order, then the removed ones.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it is damaged or of an older format, or the settings are impossible.
    """
    number = state.get("format")
    if isinstance(number, int) and number > STATE_FORMAT:
        raise StateVersionError(
            f"sketch state of format {number} is of a newer flexd; this one reads {STATE_FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )
    if number != STATE_FORMAT:
        raise SketchError(
            f"sketch state of format {str(number)[:40]!r}, this flexd reads {STATE_FORMAT}", remedy="start without it"
        )
    fresh = SketchSet(tables, settings)
    outcomes, kept = [], {}
    with _damaged():
        was_half_life, was_share = state["settings"]["half_life_seconds"], state["settings"]["share"]
        saved = {
            spec["name"]: (index, TableSpec(**spec), TableChoice(**sketch["choice"]), int(sketch["samples"]))
            for index, (spec, sketch) in enumerate(zip(state["table_list"], state["sketches"], strict=True))
        }
        for spec, choice in zip(tables, fresh.choices(), strict=True):
            if spec.name not in saved:
                outcomes.append(TableOutcome(spec.name, "new", 0))
                continue
            index, old_spec, old_choice, accesses = saved.pop(spec.name)
            changed = []
            if old_spec.rows != spec.rows:
                changed.append(f"{old_spec.rows} rows to {spec.rows}")
            if old_choice.words() != choice.words():
                changed.append(f"{old_choice.words()} to {choice.words()}")
            if was_half_life != settings.half_life_seconds:
                changed.append("half-life")
            if was_share != settings.share:
                changed.append(f"{was_share:g} of the stream was counted, now {settings.share:g}")
            outcomes.append(TableOutcome(spec.name, "emptied" if changed else "kept", accesses, ", ".join(changed)))
            if not changed:
                kept[spec.name] = index
        outcomes += [TableOutcome(name, "removed", gone[3], "not configured") for name, gone in saved.items()]
        fresh.load(state, arrays, kept, coaccess=was_half_life == settings.half_life_seconds)
    return fresh, tuple(outcomes)


@contextlib.contextmanager
def _damaged() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise SketchError(f"saved state is damaged: {error!r}", remedy="use an earlier snapshot") from error
