"""Loads the state that ingest starts from: the newest usable snapshot, or empty sketches.

Stream positions stay with the counts. A table that starts empty, because it is new or its counters are others now,
counts from the restored positions on: the accesses before them are in the counters of the other tables already, and one
position serves all tables, so they are not read again for one. Where no saved table is configured any more the daemon
does not start, unless it may start empty: then it has no positions either, and counts what the stream still holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexd.core.errors import SketchError, SnapshotError, StateVersionError, UnusableStateError
from flexd.core.keyspace import TableSpec
from flexd.sketch import snapshot, table_restore
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_restore import TableOutcome
from flexd.sketch.types import SketchSettings

_log = logging.getLogger(__name__)

GENERATION_RESERVE = 1000
"""Added to the saved profile generation on restore, so that profiles made after the snapshot keep unique numbers."""
UNUSABLE_REMEDY = (
    "run the flexd and the configuration that wrote it (`flexd state show -c FILE` compares), or start without it: "
    "`flexd state reset -c FILE`, in a pod once with FLEXD__STATE__ON_UNUSABLE=reset"
)


@dataclass
class RestoredState:
    """The sketches to continue with, and what was saved with them.

    Attributes:
        positions: of the stream, by partition; None without a snapshot.
        generation: of the last profile.
        extra: the caller's values (``Ingestor``'s ``extra_state``).
        path: the restored snapshot; None without one.
        outcomes: the fate of each table; empty without a snapshot.
        refused: newer snapshots that are not used, newest first.
        problems: why they are not.
        starts: False if only a start that may be empty goes on from here.
    """

    sketches: SketchSet
    positions: dict[str, int] | None = None
    generation: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    outcomes: tuple[TableOutcome, ...] = ()
    refused: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: bool = True

    def report(self, problem: str) -> None:
        """Log a problem and keep it for the status."""
        _log.warning("ingest: %s", problem)
        self.problems.append(problem)


@dataclass(frozen=True)
class SnapshotMeta:
    """Content of a snapshot beside the arrays of its sketches.

    Attributes:
        sketches: description of the sketches (``SketchSet.state``).
    """

    sketches: dict[str, Any]
    positions: dict[str, int]
    generation: int
    extra: dict[str, Any]

    @staticmethod
    def of(meta: Mapping[str, Any]) -> SnapshotMeta:
        """Return the values of a snapshot.

        Raises: SketchError: it is malformed.
        """
        try:
            positions = {str(partition): int(offset) for partition, offset in meta["positions"].items()}
            return SnapshotMeta(dict(meta["sketches"]), positions, int(meta["generation"]), dict(meta["saved"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SketchError(f"saved state is damaged: {error!r}", remedy="use an earlier snapshot") from error


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
    _report_outcomes(state.outcomes)
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
    """Load one snapshot into ``state``: as a whole or not at all."""
    meta, arrays = snapshot.read(path)
    saved = SnapshotMeta.of(meta)
    sketches, outcomes = table_restore.restore(saved.sketches, arrays, tables, settings)
    removed = [outcome.table for outcome in outcomes if outcome.outcome == "removed"]
    if removed and {outcome.outcome for outcome in outcomes} <= {"removed", "new"}:
        # It is of another job, or the configuration is wrong.
        raise UnusableStateError(
            f"none of its tables is configured ({', '.join(removed)[:500]})", remedy=UNUSABLE_REMEDY
        )
    state.sketches, state.outcomes = sketches, outcomes
    state.path, state.positions, state.extra = path, saved.positions, saved.extra
    state.generation = saved.generation + GENERATION_RESERVE


def _report_outcomes(outcomes: Sequence[TableOutcome]) -> None:
    for outcome in outcomes:
        if outcome.outcome == "removed":
            _log.warning("ingest: table %s is removed: %d accesses are not continued", outcome.table, outcome.lost)
        elif outcome.outcome == "emptied":
            _log.warning(
                "ingest: table %s starts empty: its counters changed (%s), %d accesses are not continued",
                outcome.table, outcome.detail, outcome.lost,
            )  # fmt: skip
        elif outcome.outcome == "new":
            _log.info("ingest: table %s is new", outcome.table)
