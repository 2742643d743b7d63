"""The saved state as the newest start found and left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import Model
from flexd.api.families import gauge, gauges, with_zeros
from flexd.sketch.quarantine import REASONS
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
    """The change, or the reason why the table starts empty."""


class QuarantinedFile(Model):
    """One snapshot that was quarantined."""

    name: str
    """Name of the file in the folder ``snapshots/quarantine``."""
    reason: str
    """``damaged``, ``newer``, ``unusable``, ``emptied``, ``converted``, ``reset`` or ``replaced``."""
    bytes: int = 0
    """Its size."""
    unix_seconds: float = 0.0
    """When it was written."""


class StateStatus(Model):
    """The saved state: what the newest start kept of it, and what was quarantined."""

    restored_from: str | None = None
    """The snapshot that this start continued from; null if there was none."""
    outcomes: dict[str, int] = Field(default_factory=dict)
    """Tables of that snapshot by outcome."""
    tables: tuple[RestoredTable, ...] = ()
    """The tables that are not as they were saved; at most 100."""
    lost_accesses: int = 0
    """Accesses of tables that were emptied or removed."""
    quarantined: tuple[QuarantinedFile, ...] = ()
    """Quarantined snapshots, the newest first; they stay until `flexd state discard`."""
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
            "flexd_state_quarantined_snapshots",
            "Snapshots quarantined until an operator discards them, by reason.",
            "reason",
            with_zeros(REASONS, Counter(snapshot.reason for snapshot in self.quarantined)),
        )
        yield gauge(
            "flexd_state_quarantined_bytes",
            "Size of the quarantined snapshots.",
            sum(snapshot.bytes for snapshot in self.quarantined),
        )


def state_status(ingestor: Ingestor, snapshots: SnapshotStore) -> StateStatus:
    """Return what the ingest restored, and what is quarantined."""
    changed = [outcome for outcome in ingestor.outcomes if outcome.outcome != "kept"]
    # Those that lost counts first: the list is bounded.
    changed.sort(key=lambda outcome: -outcome.lost)
    return StateStatus(
        restored_from=None if ingestor.restored_from is None else ingestor.restored_from.name,
        outcomes=dict(Counter(outcome.outcome for outcome in ingestor.outcomes)),
        tables=tuple(RestoredTable.from_object(outcome) for outcome in changed[:MAX_TABLES]),
        lost_accesses=sum(outcome.lost for outcome in ingestor.outcomes),
        quarantined=tuple(
            QuarantinedFile.from_object(kept, name=kept.path.name) for kept in snapshots.quarantine.list()
        ),
        problems=ingestor.stats().restore_problems,
    )
