"""What a start made of the saved state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import Model
from flexd.api.families import gauge, gauges, with_zeros
from flexd.sketch.set_aside import REASONS
from flexd.sketch.table_outcome import OUTCOMES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.ingest import Ingestor
    from flexd.sketch.snapshot import SnapshotStore

MAX_TABLES = 100


class RestoredTable(Model):
    """One table of the restored snapshot that is not as it was saved."""

    table: str
    """Name."""
    outcome: str
    """``converted``, ``emptied``, ``new`` or ``removed``."""
    accesses: int = 0
    """Accesses counted in the snapshot."""
    detail: str = ""
    """What changed, or why the table starts empty."""


class SetAsideFile(Model):
    """One snapshot that was set aside."""

    name: str
    """Name of the file in the folder ``snapshots/aside``."""
    reason: str
    """``damaged``, ``newer``, ``unusable``, ``emptied``, ``converted``, ``reset`` or ``replaced``."""
    bytes: int = 0
    """Its size."""
    unix_seconds: float = 0.0
    """When it was written."""


class StateStatus(Model):
    """The saved state: what the newest start kept of it, and what was set aside."""

    restored_from: str | None = None
    """The snapshot that this start continued from; null if there was none."""
    outcomes: dict[str, int] = Field(default_factory=dict)
    """Tables of that snapshot by outcome."""
    tables: tuple[RestoredTable, ...] = ()
    """The tables that are not as they were saved; at most 100."""
    lost_accesses: int = 0
    """Accesses of tables that were emptied or removed."""
    aside: tuple[SetAsideFile, ...] = ()
    """Snapshots set aside, the newest first; they stay until `flexd state discard`."""
    problems: tuple[str, ...] = ()
    """Why snapshots were not used by this start."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the saved state."""
        yield gauges(
            "flexd_state_tables",
            "Tables of the snapshot that this start continued from, by outcome.",
            "outcome",
            with_zeros(OUTCOMES, self.outcomes),
        )
        yield gauge(
            "flexd_state_lost_accesses",
            "Counted accesses of the tables that this start emptied or removed.",
            self.lost_accesses,
        )
        yield gauges(
            "flexd_state_aside_snapshots",
            "Snapshots set aside until an operator discards them, by reason.",
            "reason",
            with_zeros(REASONS, Counter(snapshot.reason for snapshot in self.aside)),
        )
        yield gauge(
            "flexd_state_aside_bytes",
            "Size of the snapshots set aside.",
            sum(snapshot.bytes for snapshot in self.aside),
        )


def state_status(ingestor: Ingestor, snapshots: SnapshotStore) -> StateStatus:
    """Return what the ingest restored, and what is set aside."""
    changed = [outcome for outcome in ingestor.outcomes if outcome.outcome != "kept"]
    # Those that lost counts first: the list is bounded.
    changed.sort(key=lambda outcome: -outcome.lost)
    return StateStatus(
        restored_from=None if ingestor.restored_from is None else ingestor.restored_from.name,
        outcomes=dict(Counter(outcome.outcome for outcome in ingestor.outcomes)),
        tables=tuple(RestoredTable.from_object(outcome) for outcome in changed[:MAX_TABLES]),
        lost_accesses=sum(outcome.lost for outcome in ingestor.outcomes),
        aside=tuple(SetAsideFile.from_object(kept, name=kept.path.name) for kept in snapshots.aside.list()),
        problems=ingestor.stats().restore_problems,
    )
