"""What an ingest starts from: the newest usable snapshot, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexd.core.errors import SketchError, SnapshotError
from flexd.core.keyspace import TableSpec
from flexd.ingest import counters
from flexd.sketch.set_types import SketchSettings
from flexd.sketch.snapshot import LoadedSnapshot, SnapshotStore
from flexd.sketch.table_set import SketchSet

_log = logging.getLogger(__name__)

SNAPSHOT_META_FORMAT = 1
GENERATION_RESERVE = 1000
"""Added to the saved profile generation on restore: profiles made after the snapshot was taken keep their numbers."""


@dataclass
class Restored:
    """The counters to go on with, and what was saved with them.

    Attributes:
        positions: of the stream, by partition; None without a snapshot.
        generation: from which profiles are numbered on.
        saved: what ``save_with`` had returned.
        problems: why a snapshot is not used, or not the newest.
    """

    sketches: SketchSet
    positions: dict[str, int] | None = None
    generation: int = 0
    saved: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def report(self, problem: str) -> None:
        """Logs it and keeps it for the status."""
        _log.warning("ingest: %s", problem)
        self.problems.append(problem)


def restore(
    snapshots: SnapshotStore | None, tables: Sequence[TableSpec], settings: SketchSettings, threads: int
) -> Restored:
    """The newest snapshot that fits; one of other tables or settings, or a damaged one, is reported and not used.

    Raises:
        SketchError, ConfigError: impossible sketch settings or tables.
    """
    found = Restored(counters.empty_set(tables, settings, threads))
    if snapshots is None:
        return found
    try:
        loaded = snapshots.load_newest()
    except SnapshotError as error:
        found.report(str(error))
        return found
    if loaded is None:
        return found
    for problem in loaded.problems:
        found.report(problem)
    try:
        _take(found, loaded, tables, settings)
    except (SketchError, KeyError, TypeError, ValueError, AttributeError) as error:
        found.report(f"{loaded.path} is not used: {error}")
    return found


def _take(found: Restored, loaded: LoadedSnapshot, tables: Sequence[TableSpec], settings: SketchSettings) -> None:
    meta = loaded.meta
    if meta.get("format") != SNAPSHOT_META_FORMAT:
        raise SketchError(f"saved state of format {meta.get('format')!r}")
    positions = {str(partition): int(offset) for partition, offset in meta["positions"].items()}
    generation = int(meta["generation"])
    saved = dict(meta["saved"])
    # All of it or nothing: the counters, which may not fit, come first.
    found.sketches = counters.restored_set(tables, settings, meta["sketches"], loaded.arrays)
    found.positions, found.generation, found.saved = positions, generation + GENERATION_RESERVE, saved
