"""The identity of a rank, and the reports of its training steps."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, fields, replace

from flexd.core.keyspace import TableSpec


@dataclass(frozen=True)
class RankIdentity:
    """The identity of one training process, fixed for its life.

    Attributes:
        job: name, equal on daemon and ranks.
        attempt: the job attempt (unique per launch, equal on all its ranks).
        rank, world_size, nodes, local_ranks: see ``RankLayout``.
        replica_slots: replica slots of this rank for each dim-group of the key space.
        table_digest: ``KeySpace.digest`` of the trainer's tables.
        tables: the tables; sent to a daemon whose digest differs.
    """

    job: str
    attempt: str
    rank: int
    world_size: int
    nodes: int
    local_ranks: int
    replica_slots: tuple[int, ...]
    table_digest: str
    tables: tuple[TableSpec, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """One rank's training steps since its previous report (sums, unless stated otherwise).

    Attributes:
        step: the newest step (absolute).
        steps: steps summed here.
        placement_version, placement_digest: after the newest step.
        step_seconds: wall time of the steps.
        apply_seconds: part of ``step_seconds`` spent in applying chunks.
        accesses_by_tier: lookups served from (HOME, NODE, DEVICE) rows.
        all_to_all_intra_bytes, all_to_all_inter_bytes: sent by this rank in the exchange (ids and rows).
        sync_intra_bytes, sync_inter_bytes: sent by this rank in replica synchronisation.
        migration_intra_bytes, migration_inter_bytes: sent by this rank in applying chunks.
        unused_prefetches: batches that were located ahead and located again, because the loop copied their ids.
        exchange: used after the newest step.
    """

    step: int
    steps: int
    placement_version: int
    placement_digest: int
    step_seconds: float
    apply_seconds: float
    accesses_by_tier: tuple[int, int, int]
    all_to_all_intra_bytes: int = 0
    all_to_all_inter_bytes: int = 0
    sync_intra_bytes: int = 0
    sync_inter_bytes: int = 0
    migration_intra_bytes: int = 0
    migration_inter_bytes: int = 0
    unused_prefetches: int = 0
    exchange: str = ""


def merge_reports(older: StepReport | None, newer: StepReport) -> StepReport:
    """Merge two reports: sums, and the newer's step and placement. Non-finite seconds count as 0."""
    newer = replace(newer, step_seconds=_finite(newer.step_seconds), apply_seconds=_finite(newer.apply_seconds))
    if older is None:
        return newer
    latest = {"step", "placement_version", "placement_digest", "accesses_by_tier", "exchange"}
    sums = {
        item.name: getattr(older, item.name) + getattr(newer, item.name)
        for item in fields(StepReport)
        if item.name not in latest
    }
    home, node, device = (a + b for a, b in zip(older.accesses_by_tier, newer.accesses_by_tier, strict=True))
    return replace(newer, accesses_by_tier=(home, node, device), **sums)


def _finite(seconds: float) -> float:
    return float(seconds) if math.isfinite(seconds) else 0.0


class PendingReports:
    """Steps not reported yet, merged into one report. ``add``, from the training thread, waits for a swap at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: StepReport | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def add(self, report: StepReport) -> bool:
        """Add a report; True if none was waiting."""
        with self._lock:
            first = self._pending is None
            self._pending = merge_reports(self._pending, report)
            return first

    def drain(self) -> StepReport | None:
        with self._lock:
            pending, self._pending = self._pending, None
        return pending

    def restore(self, report: StepReport) -> None:
        """Restore a report that could not be sent; it is older than any added meanwhile."""
        with self._lock:
            self._pending = report if self._pending is None else merge_reports(report, self._pending)
