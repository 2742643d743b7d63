"""The identity of a rank, and the reports of its training steps.

Every field of a report states its bounds. A rank brings what it measured inside of them (``PendingReports``); a daemon
refuses a report that is not (``wire_json.build``), since one value that is not finite would stay in its averages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from flexd.control.protocol.trainer_settings import TrainerSettings
from flexd.control.protocol.wire_json import clamp
from flexd.core.bounds import Count, Longest, Name, Range, Seconds
from flexd.core.keyspace import TableSpec
from flexd.core.usage_warnings import UsageWarningReport

MAX_NAMED_TABLES = 256
"""Tables that a report names, those with the most misses: it is sent a few times a second at most."""

Digest = Annotated[int, Range(0, 2**64 - 1)]


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
        trainer: how its collections were constructed; None: the daemon goes by its configuration.
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
    trainer: TrainerSettings | None = None


class ExchangeReason(StrEnum):
    """Why a rank uses its exchange."""

    CONFIGURED = "configured"
    """The trainer names it."""
    START = "start"
    """``auto``, before prices or measurements."""
    PRICED = "priced"
    """``auto``: the daemon prices it lower."""
    MEASURED = "measured"
    """``auto``: its steps took less time."""
    TRIAL = "trial"
    """``auto``: its steps are being measured."""


class StepPhase(StrEnum):
    """The parts of a training step, in the order in which a report lists them."""

    IDS = "ids"
    """Finding where the rows of a look-up are: ids to the ranks that hold them."""
    ROWS = "rows"
    """Row values on their way back."""
    DENSE = "dense"
    """Everything outside flexd: forward and backward pass of the dense model, loading batches."""
    PUSH = "push"
    """Gradients on their way to the rows."""
    SYNC = "sync"
    """Agreement on touched replicas, and the sums of their gradients."""
    UPDATE = "update"
    """The optimizer's update of the rows."""
    APPLY = "apply"
    """Applying chunks of migrations."""


@dataclass(frozen=True)
class PhaseReport:
    """What one rank did in one phase of its steps (sums).

    Attributes:
        phase: value of ``StepPhase``; a rank of another version may have others.
        computed_seconds: time of the training thread, or of its stream on an accelerator, outside collectives.
        exposed_seconds: time that it waited for collectives: what compute did not cover.
        intra_seconds, inter_seconds: length of the collectives inside nodes and of those that leave them, from the
            arrival of this rank to their end, whether a step waited for them or not.
        overlapped_seconds: part of both that ran beside the training thread.
        intra_bytes, inter_bytes: sent by this rank, as in ``StepReport``.
        intra_collectives, inter_collectives: number of collectives.
    """

    phase: Name
    computed_seconds: Seconds = 0.0
    exposed_seconds: Seconds = 0.0
    intra_seconds: Seconds = 0.0
    inter_seconds: Seconds = 0.0
    overlapped_seconds: Seconds = 0.0
    intra_bytes: Count = 0
    inter_bytes: Count = 0
    intra_collectives: Count = 0
    inter_collectives: Count = 0

    def plus(self, other: PhaseReport) -> PhaseReport:
        """Return the sum with a report of the same phase."""
        return PhaseReport(self.phase, *(getattr(self, name) + getattr(other, name) for name in PHASE_QUANTITIES))


PHASE_QUANTITIES = tuple(item.name for item in fields(PhaseReport) if item.name != "phase")


def merge_phases(older: Iterable[PhaseReport], newer: Iterable[PhaseReport]) -> tuple[PhaseReport, ...]:
    """Sum reports by phase."""
    merged = {report.phase: report for report in older}
    for report in newer:
        before = merged.get(report.phase)
        merged[report.phase] = report if before is None else before.plus(report)
    return tuple(merged.values())


@dataclass(frozen=True)
class SlowTableReport:
    """Home rows of one table on a rank with tiered storage (sums over steps).

    Attributes:
        table: number in the list of tables, or ``OTHERS``: those that the report does not name.
        used: distinct rows that look-ups needed.
        missed: of those, the ones that were not in fast memory.
        evicted: rows that left fast memory.
        written: of those, the ones that had changed and were written to slow memory.
    """

    OTHERS: ClassVar[int] = -1

    table: Annotated[int, Range(-1, 2**31)]
    used: Count = 0
    missed: Count = 0
    evicted: Count = 0
    written: Count = 0

    def plus(self, other: SlowTableReport) -> SlowTableReport:
        """Return the sum with a report of the same table."""
        return SlowTableReport(
            self.table, *(getattr(self, name) + getattr(other, name) for name in SLOW_TABLE_QUANTITIES)
        )


SLOW_TABLE_QUANTITIES = tuple(item.name for item in fields(SlowTableReport) if item.name != "table")


def named_tables(reports: Sequence[SlowTableReport]) -> tuple[SlowTableReport, ...]:
    """Return the ``MAX_NAMED_TABLES`` with the most misses, and the sum of the others without a name."""
    ordered = sorted(reports, key=lambda each: (each.table == SlowTableReport.OTHERS, -each.missed, each.table))
    named, rest = ordered[:MAX_NAMED_TABLES], ordered[MAX_NAMED_TABLES:]
    if not rest:
        return tuple(named)
    sums = (sum(getattr(each, name) for each in rest) for name in SLOW_TABLE_QUANTITIES)
    return (*named, SlowTableReport(SlowTableReport.OTHERS, *sums))


@dataclass(frozen=True)
class SlowMemoryReport:
    """What slow memory did for a rank (sums over steps).

    Attributes:
        tables: by table, those with a count only.
        bytes_read, bytes_written: moved to and from slow memory, in whole blocks where it has blocks.
        seconds: that the rank waited for it.
    """

    tables: Annotated[tuple[SlowTableReport, ...], Longest(MAX_NAMED_TABLES + 1)] = ()
    bytes_read: Count = 0
    bytes_written: Count = 0
    seconds: Seconds = 0.0

    def plus(self, newer: SlowMemoryReport) -> SlowMemoryReport:
        """Return the sum with a newer report of the same rank."""
        merged = {report.table: report for report in self.tables}
        for report in newer.tables:
            before = merged.get(report.table)
            merged[report.table] = report if before is None else before.plus(report)
        return SlowMemoryReport(
            named_tables(tuple(merged.values())), self.bytes_read + newer.bytes_read,
            self.bytes_written + newer.bytes_written, self.seconds + newer.seconds,
        )  # fmt: skip


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
        unused_prefetches: batches that were located ahead and located again, because the loop changed their ids.
        prefetches: batches that were given to be located ahead, those included.
        passes: forward passes whose gradients these steps have applied.
        exchange: used after the newest step.
        exchange_reason: value of ``ExchangeReason``; empty on ranks that follow the one which decides.
        phases: the step by phase.
        phase_steps: steps summed in ``phases``; other ones than ``steps``, because phases are measured with a delay.
        cover_seconds: compute that could cover collectives beside the training thread, in these steps.
        slow_memory: what slow memory did; None where all rows are in fast memory, and in most reports.
        usage_warnings: those that the process has noted since it began, by kind.
    """

    step: Count
    steps: Count
    placement_version: Count
    placement_digest: Digest
    step_seconds: Seconds
    apply_seconds: Seconds
    accesses_by_tier: tuple[Count, Count, Count]
    all_to_all_intra_bytes: Count = 0
    all_to_all_inter_bytes: Count = 0
    sync_intra_bytes: Count = 0
    sync_inter_bytes: Count = 0
    migration_intra_bytes: Count = 0
    migration_inter_bytes: Count = 0
    unused_prefetches: Count = 0
    exchange: Name = ""
    exchange_reason: Name = ""
    phases: Annotated[tuple[PhaseReport, ...], Longest(16)] = ()
    phase_steps: Count = 0
    cover_seconds: Seconds = 0.0
    slow_memory: SlowMemoryReport | None = None
    usage_warnings: Annotated[tuple[UsageWarningReport, ...], Longest(16)] = ()
    prefetches: Count = 0
    passes: Count = 0


def merge_reports(older: StepReport | None, newer: StepReport) -> StepReport:
    """Merge two reports within their bounds: sums, and the newer's step and placement."""
    if older is None:
        return newer
    latest = {
        "step",
        "placement_version",
        "placement_digest",
        "accesses_by_tier",
        "exchange",
        "exchange_reason",
        "phases",
        "slow_memory",
        "usage_warnings",
    }
    sums = {
        item.name: getattr(older, item.name) + getattr(newer, item.name)
        for item in fields(StepReport)
        if item.name not in latest
    }
    home, node, device = (a + b for a, b in zip(older.accesses_by_tier, newer.accesses_by_tier, strict=True))
    phases = merge_phases(older.phases, newer.phases)
    slow_memory = _merged(older.slow_memory, newer.slow_memory)
    return replace(newer, accesses_by_tier=(home, node, device), phases=phases, slow_memory=slow_memory, **sums)


def _merged(older: SlowMemoryReport | None, newer: SlowMemoryReport | None) -> SlowMemoryReport | None:
    return older.plus(newer) if older is not None and newer is not None else newer or older


class PendingReports:
    """Steps not reported yet, merged into one report. ``add``, from the training thread, waits for a swap at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: StepReport | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def add(self, report: StepReport) -> bool:
        """Add a report; True if none was waiting. What it has outside its bounds is clamped: a sum would keep it."""
        report = clamp(report)
        with self._lock:
            first = self._pending is None
            self._pending = merge_reports(self._pending, report)
            return first

    def drain(self) -> StepReport | None:
        with self._lock:
            pending, self._pending = self._pending, None
        return None if pending is None else clamp(pending)

    def restore(self, report: StepReport) -> None:
        """Restore a report that could not be sent; it is older than any added meanwhile."""
        with self._lock:
            self._pending = report if self._pending is None else merge_reports(report, self._pending)
