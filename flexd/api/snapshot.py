"""The durable snapshots of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import counter, gauge
from flexd.core.errors import SnapshotError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.ingest.stats import IngestStats
    from flexd.sketch.snapshot import SnapshotStore


class SnapshotStatus(Model):
    """The newest durable snapshot: what came after it is read again after a crash."""

    age_seconds: FiniteOrNone = None
    """Since the newest durable snapshot; null before the first."""
    written: int = 0
    """Snapshots written since the daemon started."""
    failures: int = 0
    """Snapshots that could not be written since the daemon started."""
    bytes: int = 0
    """Size of the newest snapshot."""
    pause_seconds: FiniteOrNone = None
    """Time in which counting stood still for the newest snapshot."""
    problem: str | None = None
    """Reason why the newest attempt failed; null if it did not."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the snapshots."""
        yield gauge("flexd_snapshot_age_seconds", "Since the newest durable snapshot.", self.age_seconds)
        yield gauge("flexd_snapshot_bytes", "Size of the newest snapshot.", self.bytes)
        yield counter("flexd_snapshots", "Snapshots written.", self.written)
        yield counter("flexd_snapshot_failures", "Snapshots that could not be written.", self.failures)


def snapshot_status(stats: IngestStats, snapshots: SnapshotStore) -> SnapshotStatus:
    """Return the state of the snapshots in the rotation."""
    return SnapshotStatus(
        age_seconds=stats.snapshot_age_seconds,
        written=stats.snapshots,
        failures=stats.snapshot_failures,
        bytes=_newest_bytes(snapshots),
        pause_seconds=stats.snapshot_pause_seconds,
        problem=stats.problem if stats.snapshot_failures else None,
    )


def _newest_bytes(snapshots: SnapshotStore) -> int:
    try:
        return snapshots.paths()[0].stat().st_size
    except (OSError, SnapshotError, IndexError):
        return 0
