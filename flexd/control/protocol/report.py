"""The settings and tables of a trainer, and the reports of its training steps.

Every field of a report states its bounds. A rank brings what it measured inside of them (``PendingReports``); a daemon
refuses a report that is not (``wire.build``), since one value that is not finite would stay in its averages.

A digest shows that table lists differ, and not where. So a rank whose digest is not the daemon's sends its tables
before its hello. The daemon names the tables and fields that differ, or takes the tables over.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from flexd.core.bounds import Count, Longest, Name, Range, Seconds
from flexd.core.errors import ConfigError, ControlError
from flexd.core.keyspace import TableSpec, digest_of
from flexd.core.usage_warnings import UsageWarningReport

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_NAMED_TABLES = 256
"""Tables that a report names, those with the most misses: it is sent a few times a second at most."""

Part = TypeVar("Part", bound="DataclassInstance")


@dataclass(frozen=True)
class TrainerSettings:
    """Arguments that the collections of a job were constructed with; equal on all its ranks.

    Attributes:
        exchange, comm_dtype: as in ``flexd.EmbeddingCollection``. A rank of another version may have
            other values.
        pooling: a letter for each table, in order: where its look-ups are pooled, r at the requester, o at the owner,
            - if they are not; empty if those of no table are.
        read_only: a letter for each table, in order: r if it is read only, - if it is trained; empty if all are.
        unbounded: a letter for each table, in order: u if its ids are unbounded, - if they are rows; empty if all are.
    """

    exchange: str = ""
    comm_dtype: str | None = None
    pooling: str = ""
    read_only: str = ""
    unbounded: str = ""

    def fits(self, table_count: int) -> bool:
        """Return whether it can be of so many tables."""
        return all(
            len(letters) in (0, table_count) and set(letters) <= set(known)
            for letters, known in ((self.pooling, "ro-"), (self.read_only, "r-"), (self.unbounded, "u-"))
        )

    def read_only_tables(self, tables: Sequence[TableSpec]) -> frozenset[str]:
        """Return the names of the tables that are read only."""
        return _with_letter("r", self.read_only, tables)

    def unbounded_tables(self, tables: Sequence[TableSpec]) -> frozenset[str]:
        """Return the names of the tables of unbounded ids."""
        return _with_letter("u", self.unbounded, tables)

    def pooling_at_by_table(self, tables: Sequence[TableSpec]) -> dict[str, str]:
        """Return "requester" or "owner" by name of each pooled table."""
        places = {"r": "requester", "o": "owner"}
        pairs = zip(tables, self.pooling, strict=False)
        return {table.name: places[letter] for table, letter in pairs if letter in places}


def _with_letter(wanted: str, letters: str, tables: Sequence[TableSpec]) -> frozenset[str]:
    return frozenset(table.name for table, letter in zip(tables, letters, strict=False) if letter == wanted)


@dataclass(frozen=True)
class PhaseReport:
    """Time and bytes of one rank in one phase of its steps (sums).

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


PHASE_QUANTITIES = tuple(item.name for item in fields(PhaseReport) if item.name != "phase")


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
    """Work of slow memory for a rank (sums over steps).

    Attributes:
        tables: by table, those with a count only.
        bytes_read, bytes_written: moved to and from slow memory, in whole blocks where it has blocks.
        seconds: that the rank waited for it.
    """

    tables: Annotated[tuple[SlowTableReport, ...], Longest(MAX_NAMED_TABLES + 1)] = ()
    bytes_read: Count = 0
    bytes_written: Count = 0
    seconds: Seconds = 0.0


@dataclass(frozen=True)
class IdsReport:
    """Unbounded ids of one table, at the homes on a rank (sums over steps).

    Attributes:
        table: number in the list of tables.
        used_slots: rows that ids have now.
        look_ups, own, admitted, evicted, refused, pinned, sampled, in_half, in_quarter: as in
            ``flexd.embedding.ids.slot_table.COUNTS``.
    """

    table: Annotated[int, Range(0, 2**31)]
    used_slots: Count = 0
    look_ups: Count = 0
    own: Count = 0
    admitted: Count = 0
    evicted: Count = 0
    refused: Count = 0
    pinned: Count = 0
    sampled: Count = 0
    in_half: Count = 0
    in_quarter: Count = 0


MAX_NAMED_ID_TABLES = 32
IDS_QUANTITIES = tuple(item.name for item in fields(IdsReport) if item.name not in ("table", "used_slots"))


def most_used(reports: Iterable[IdsReport]) -> tuple[IdsReport, ...]:
    """Return the ``MAX_NAMED_ID_TABLES`` with the most look-ups."""
    return tuple(sorted(reports, key=lambda each: (-each.look_ups, each.table))[:MAX_NAMED_ID_TABLES])


@dataclass(frozen=True)
class PlacementState:
    """The version of a placement, and its digest."""

    version: Count
    digest: Annotated[int, Range(0, 2**64 - 1)]


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sent, inside its node and to other nodes.

    Attributes:
        all_to_all_intra_bytes, all_to_all_inter_bytes: in the exchange (ids and rows).
        sync_intra_bytes, sync_inter_bytes: in replica synchronisation.
        migration_intra_bytes, migration_inter_bytes: in applying chunks.
    """

    all_to_all_intra_bytes: Count = 0
    all_to_all_inter_bytes: Count = 0
    sync_intra_bytes: Count = 0
    sync_inter_bytes: Count = 0
    migration_intra_bytes: Count = 0
    migration_inter_bytes: Count = 0


@dataclass(frozen=True)
class BatchReport:
    """The batches of some steps.

    Attributes:
        unused_prefetches: batches that were located ahead and located again, because the loop changed their ids.
        prefetches: batches that were given to be located ahead, those included.
        passes: forward passes whose gradients the steps have applied.
    """

    unused_prefetches: Count = 0
    prefetches: Count = 0
    passes: Count = 0


@dataclass(frozen=True)
class ArmReport:
    """A typical step with one arm, in the newest measurement of the rank that decides."""

    arm: Name
    seconds: Seconds = 0.0


@dataclass(frozen=True)
class UsedExchange:
    """The arm that a rank uses.

    Attributes:
        name: its exchange.
        reason: value of ``ExchangeReason``; empty on ranks that follow the one which decides.
        arm: with the prefetch pipeline, as in ``ArmReport``.
        arms: what was measured; empty on other ranks, and before.
        measured_at_step: step of the measurement.
    """

    name: Name = ""
    reason: Name = ""
    arm: Name = ""
    arms: Annotated[tuple[ArmReport, ...], Longest(32)] = ()
    measured_at_step: Count = 0


@dataclass(frozen=True)
class PhasesReport:
    """Steps by phase (sums). They are other steps than those of the report, because phases are measured with a delay.

    Attributes:
        steps: steps summed here.
        cover_seconds: compute that could cover collectives beside the training thread, in these steps.
    """

    by_phase: Annotated[tuple[PhaseReport, ...], Longest(16)] = ()
    steps: Count = 0
    cover_seconds: Seconds = 0.0


@dataclass(frozen=True)
class StepReport:
    """One rank's training steps since its previous report (sums, unless stated otherwise).

    Attributes:
        step: the newest step (absolute).
        steps: steps summed here.
        placement: after the newest step.
        step_seconds: wall time of the steps.
        apply_seconds: part of ``step_seconds`` spent in applying chunks.
        accesses_by_tier: lookups served from (HOME, NODE, DEVICE) rows.
        exchange: used after the newest step.
        slow_memory: what slow memory did; None where all rows are in fast memory, and in most reports.
        ids: of tables of unbounded ids, in some reports.
        usage_warnings: those that the process has noted since it began, by kind.
    """

    step: Count
    steps: Count
    placement: PlacementState
    step_seconds: Seconds
    apply_seconds: Seconds
    accesses_by_tier: tuple[Count, Count, Count]
    sent: SentBytes = SentBytes()
    batches: BatchReport = BatchReport()
    exchange: UsedExchange = UsedExchange()
    phases: PhasesReport = PhasesReport()
    slow_memory: SlowMemoryReport | None = None
    ids: Annotated[tuple[IdsReport, ...], Longest(MAX_NAMED_ID_TABLES)] = ()
    usage_warnings: Annotated[tuple[UsageWarningReport, ...], Longest(32)] = ()


_SENT, _BATCHES = (tuple(item.name for item in fields(part)) for part in (SentBytes, BatchReport))


@dataclass(frozen=True, slots=True)
class TrainingTotals:
    """Totals of a rank since it connected, after one of its steps. The training thread takes them in each step; the
    report of the steps between two of them is made when it is sent, a few times per second.

    Attributes:
        step, placement, exchange, usage_warnings: as in ``StepReport``.
        seconds: monotonic time.
        totals: by name: "steps", "home_accesses", "node_accesses" and "device_accesses", "apply_seconds", and the
            fields of ``SentBytes`` and ``BatchReport``.
    """

    step: int
    seconds: float
    placement: PlacementState
    exchange: UsedExchange
    totals: Mapping[str, float]
    usage_warnings: tuple[UsageWarningReport, ...] = ()

    def report(self, before: TrainingTotals) -> StepReport:
        """Return the report of the steps since ``before``."""
        since: dict[str, Any] = {name: value - before.totals[name] for name, value in self.totals.items()}
        return StepReport(
            self.step, since["steps"], self.placement, self.seconds - before.seconds, since["apply_seconds"],
            (since["home_accesses"], since["node_accesses"], since["device_accesses"]),
            SentBytes(*(since[name] for name in _SENT)), BatchReport(*(since[name] for name in _BATCHES)),
            self.exchange, usage_warnings=self.usage_warnings,
        )  # fmt: skip


def merge_reports(older: StepReport | None, newer: StepReport) -> StepReport:
    """Merge two reports: sums, and the newer's step, placement, exchange and usage warnings."""
    if older is None:
        return newer
    home, node, device = (a + b for a, b in zip(older.accesses_by_tier, newer.accesses_by_tier, strict=True))
    by_phase = _joined("phase", older.phases.by_phase, newer.phases.by_phase)
    slow_memory = newer.slow_memory or older.slow_memory
    if older.slow_memory is not None and newer.slow_memory is not None:
        tables = named_tables(_joined("table", older.slow_memory.tables, newer.slow_memory.tables))
        slow_memory = _sum(older.slow_memory, newer.slow_memory, tables=tables)
    used_slots = {of_table.table: of_table.used_slots for of_table in (*older.ids, *newer.ids)}
    ids = (replace(each, used_slots=used_slots[each.table]) for each in _joined("table", older.ids, newer.ids))
    return _sum(
        older,
        newer,
        step=newer.step,
        placement=newer.placement,
        accesses_by_tier=(home, node, device),
        sent=_sum(older.sent, newer.sent),
        batches=_sum(older.batches, newer.batches),
        exchange=newer.exchange,
        phases=_sum(older.phases, newer.phases, by_phase=by_phase),
        slow_memory=slow_memory,
        ids=most_used(ids),
        usage_warnings=newer.usage_warnings,
    )


def _sum(older: Part, newer: Part, **given: Any) -> Part:
    """Return the sum of two reports, number by number, but for the fields that are ``given``."""
    names = {item.name for item in fields(newer)} - given.keys()
    return replace(newer, **given, **{name: getattr(older, name) + getattr(newer, name) for name in names})


def _joined(key: str, older: Sequence[Part], newer: Sequence[Part]) -> tuple[Part, ...]:
    """Sum the reports that are of the same ``key``."""
    found = {getattr(report, key): report for report in older}
    for report in newer:
        of = getattr(report, key)
        found[of] = _sum(found[of], report, **{key: of}) if of in found else report
    return tuple(found.values())


MAX_TABLES_BYTES = 2**25
"""Bytes of a list of tables as JSON."""
MAX_DIFFERENCES = 8
"""Named in one refusal."""
_FIELDS = tuple(field.name for field in fields(TableSpec))


def tables_body(tables: Sequence[TableSpec]) -> bytes:
    """Encode all tables of a job for a ``TableList``: compressed JSON, some 20 bytes per table."""
    values = [[getattr(table, name) for name in _FIELDS] for table in tables]
    return zlib.compress(json.dumps({"fields": _FIELDS, "tables": values}, separators=(",", ":")).encode())


def tables_of_body(body: bytes | memoryview, digest: str) -> tuple[TableSpec, ...]:
    """Decode ``tables_body``. Fields that this version does not know are ignored.

    Raises:
        ControlError: it cannot be read, is longer than ``MAX_TABLES_BYTES``, or the tables have another digest.
    """
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(bytes(body), MAX_TABLES_BYTES)
        if unpack.unconsumed_tail or not unpack.eof:
            raise ValueError(f"more than {MAX_TABLES_BYTES} bytes, or cut")
        document = json.loads(data)
        names = document["fields"]
        tables = tuple(
            TableSpec(**{name: value for name, value in zip(names, values, strict=True) if name in _FIELDS})
            for values in document["tables"]
        )
        found = digest_of(tables)
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        raise ControlError(f"a list of tables that cannot be read: {error}") from error
    if not tables or found != digest:
        raise ControlError(f"{len(tables)} tables of digest {found}, announced as {digest}")
    return tables


def table_differences(trainer: Sequence[TableSpec], daemon: Sequence[TableSpec]) -> str:
    """Name the differences between a trainer's tables and those of the daemon's configuration; "" if there is none."""
    ours, theirs = ({table.name: table for table in tables} for tables in (trainer, daemon))
    found = [
        f"table {_short(name)} is in the trainer, not in the daemon's configuration"
        for name in ours
        if name not in theirs
    ]
    found += [
        f"{_short(name)}.{field}: {_short(getattr(table, field))} in the trainer, "
        f"{_short(getattr(theirs[name], field))} in the daemon's configuration"
        for name, table in ours.items()
        if name in theirs
        for field in _FIELDS
        if getattr(table, field) != getattr(theirs[name], field)
    ]
    found += [
        f"table {_short(name)} is in the daemon's configuration, not in the trainer"
        for name in theirs
        if name not in ours
    ]
    found = (
        found
        or [
            f"table number {number}: {_short(here.name)} in the trainer, "
            f"{_short(there.name)} in the daemon's configuration"
            for number, (here, there) in enumerate(zip(trainer, daemon, strict=False), start=1)
            if here.name != there.name
        ][:1]
    )
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _short(value: str | int) -> str:
    text = str(value)[:200]
    return text if text.isprintable() else repr(text)
