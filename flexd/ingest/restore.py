"""Loads the state that ingest starts from: the newest usable snapshot, or empty sketches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexd.core.errors import SketchError, SnapshotError
from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import LoadedSnapshot, SnapshotStore
from flexd.sketch.types import SketchSettings

_log = logging.getLogger(__name__)

SNAPSHOT_META_FORMAT = 1
GENERATION_RESERVE = 1000
"""Added to the saved profile generation on restore, so that profiles made after the snapshot keep unique numbers."""


@dataclass
class RestoredState:
    """The sketches to continue with, and what was saved with them.

    Attributes:
        positions: of the stream, by partition; None without a snapshot.
        generation: of the last profile.
        extra: the caller's values (``Ingestor``'s ``extra_state``).
        problems: why a snapshot, or the newest one, is not used.
    """

    sketches: SketchSet
    positions: dict[str, int] | None = None
    generation: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def report(self, problem: str) -> None:
        """Log a problem and keep it for the status."""
        _log.warning("ingest: %s", problem)
        self.problems.append(problem)


def restore(snapshots: SnapshotStore | None, tables: Sequence[TableSpec], settings: SketchSettings) -> RestoredState:
    """Load the newest snapshot that fits. A damaged one, or one of other tables or settings, is reported and not used.

    Raises:
        SketchError, ConfigError: impossible sketch settings or tables.
    """
    state = RestoredState(SketchSet.of(tables, settings))
    if snapshots is None:
        return state
    try:
        loaded = snapshots.load_newest()
    except SnapshotError as error:
        state.report(str(error))
        return state
    if loaded is None:
        return state
    for problem in loaded.problems:
        state.report(problem)
    try:
        _load(state, loaded, tables, settings)
    except (SketchError, KeyError, TypeError, ValueError, AttributeError) as error:
        state.report(f"{loaded.path} is not used: {error}")
    return state


def _load(state: RestoredState, loaded: LoadedSnapshot, tables: Sequence[TableSpec], settings: SketchSettings) -> None:
    meta = loaded.meta
    if meta.get("format") != SNAPSHOT_META_FORMAT:
        raise SketchError(f"saved state of format {meta.get('format')!r}")
    positions = {str(partition): int(offset) for partition, offset in meta["positions"].items()}
    generation = int(meta["generation"])
    extra = dict(meta["saved"])
    # Everything that can fail comes before the first assignment: a snapshot is used as a whole or not at all.
    state.sketches = SketchSet.from_state(tables, settings, meta["sketches"], loaded.arrays)
    state.positions, state.generation, state.extra = positions, generation + GENERATION_RESERVE, extra
