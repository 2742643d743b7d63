"""The access stream: read, rejected, behind; the counters of it, with the profile made of them; and tables and hot
rows, a page at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flexd.api.base import TIERS, RequestBody, RowsByTier, TierName
from flexd.core.model import ALWAYS, DETAIL, HIDDEN, FiniteOrNone, Model, Show, by_table, counter, gauge, with_zeros

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from flexd.config.model import Config
    from flexd.control.daemon.epoch_manager import LiveTopology
    from flexd.core.keyspace import KeySpace
    from flexd.core.placement import Placement
    from flexd.sketch.ingestor import Ingestor
    from flexd.sketch.profile import Profile, TableSources
    from flexd.sketch.table_sketch import TableChoice

    Int64Array = npt.NDArray[np.int64]


MAX_MISSING = 100


class StreamStatus(Model):
    """The access stream now; counters run since the daemon started, rates are of the last minute."""

    source: str
    """Kind of the source: ``file_log``, ``kafka``, ``synthetic`` or ``tap``."""
    lag_messages: Annotated[int, ALWAYS] = 0
    read_share: float = 1.0
    """Share of the stream's partitions that are read (``stream.source.share``). Messages and accesses here are those
    read; weights of tables and rows are scaled to the whole stream."""
    missing_partitions: tuple[str, ...] = ()
    """Partitions that another member of the consumer group reads, so that nothing of them is counted here; at most
    100."""
    missing_since_unix_seconds: Annotated[FiniteOrNone, Show("missing since")] = None
    """When the first of them went missing; null if none is."""
    messages_per_second: FiniteOrNone = None
    accesses_per_second: FiniteOrNone = None
    messages: int = 0
    accesses: int = 0
    bytes: Annotated[int, HIDDEN] = 0
    rejected_messages: dict[str, int] = Field(default_factory=dict)
    rejected_accesses: dict[str, int] = Field(default_factory=dict)
    unread_values: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Values of mapped events that were not read, by reason and path; a message without any other is rejected."""
    filtered_events: int = 0
    """Events that ``stream.mapping.where`` leaves out."""
    tombstones: int = 0
    """Messages without a value, which delete a key of a compacted topic."""
    adjusted_accesses: dict[str, int] = Field(default_factory=dict)
    """Accesses counted by rule: ``late`` (older than the newest event by 60 s, at their own time),
    ``future_clamped`` (dated too far ahead, at their arrival)."""
    messages_lost: dict[str, int] = Field(default_factory=dict)
    positions_lost: dict[str, int] = Field(default_factory=dict)
    dead_letters: int = 0
    """Samples of rejected messages kept."""
    dead_letter_failures: int = 0
    """Samples that could not be written."""
    source_failures: int = 0
    commit_failures: int = 0
    newest_event_unix_seconds: Annotated[FiniteOrNone, Show("newest access")] = None
    least_skew_seconds: FiniteOrNone = None
    """Least event time minus arrival of the accesses of the last ten seconds."""
    most_skew_seconds: FiniteOrNone = None
    """Most of the same; above ``sketch.max_future_seconds`` accesses are counted at their arrival."""
    problem: str | None = None
    """Reason why the source cannot be read now, or no snapshot can be written; null if both can."""
    connected: Annotated[bool, HIDDEN] = True

    def losses(self) -> str:
        """Return what was lost, in words; empty if nothing was."""
        parts = [
            f"{sum(lost.values())} {what} ({', '.join(f'{reason} {number}' for reason, number in shown)})"
            for what, lost in (("messages", self.messages_lost), ("positions", self.positions_lost))
            if (shown := [(reason, number) for reason, number in lost.items() if number])
        ]
        return ", ".join(parts)

    FAMILIES = (
        counter("flexd_ingest_messages", "Stream messages read and counted.", "messages"),
        counter("flexd_ingest_accesses", "Accesses counted.", "accesses"),
        counter("flexd_ingest_bytes", "Payload bytes of the messages read.", "bytes"),
        counter("flexd_ingest_rejected_messages", "Messages not counted, by reason.", "rejected_messages", ("reason",)),
        counter(
            "flexd_ingest_rejected_accesses", "Accesses not counted inside good messages, by reason.",
            "rejected_accesses", ("reason",),
        ),
        counter(
            "flexd_ingest_unread_values", "Values of mapped events that were not read, by reason and path.",
            lambda stream: {
                (reason, path): count
                for reason, paths in stream.unread_values.items()
                for path, count in paths.items()
            },
            ("reason", "path"),
        ),
        counter("flexd_ingest_filtered_events", "Events that stream.mapping.where leaves out.", "filtered_events"),
        counter("flexd_ingest_tombstones", "Messages without a value.", "tombstones"),
        counter(
            "flexd_ingest_adjusted_accesses",
            "Accesses counted by rule: late (at their own time) and future_clamped (at their arrival).",
            "adjusted_accesses", ("rule",),
        ),
        gauge("flexd_ingest_lag_messages", "Messages in the stream not read yet.", "lag_messages"),
        gauge("flexd_ingest_read_share", "Share of the stream's partitions that are read.", "read_share"),
        gauge(
            "flexd_ingest_missing_partitions", "Partitions that another member of the consumer group reads, up to 100.",
            lambda stream: len(stream.missing_partitions),
        ),
        gauge("flexd_ingest_connected", "0 while the source reports a problem.", "connected"),
        counter(
            "flexd_ingest_lost_messages", "Messages that existed and the source could not deliver, by reason.",
            "messages_lost", ("reason",),
        ),
        counter(
            "flexd_ingest_lost_positions", "Positions that the log no longer had, by reason.", "positions_lost",
            ("reason",),
        ),
        counter("flexd_ingest_source_failures", "Failed reads of the source.", "source_failures"),
        gauge(
            "flexd_ingest_newest_event_time_seconds", "Newest event time seen, Unix time; NaN before the first.",
            "newest_event_unix_seconds",
        ),
        gauge(
            "flexd_ingest_event_time_skew_seconds",
            "Event time minus arrival of the accesses of the last ten seconds: least and most; NaN without any.",
            lambda stream: {"least": stream.least_skew_seconds, "most": stream.most_skew_seconds}, ("bound",),
        ),
    )  # fmt: skip


def stream_status(config: Config, ingestor: Ingestor) -> StreamStatus:
    """Return the stream as the ingest has counted it."""
    from flexd.sketch.ingestor import MESSAGE_REASONS, ROW_REASONS
    from flexd.stream.types import LOSS_REASONS, POSITION_REASONS

    counter, problems, losses = ingestor.counter, ingestor.problems(), ingestor.source.losses()
    accesses, missing = counter.accesses, ingestor.source.missing_partitions
    return StreamStatus(
        source=config.stream.source.kind,
        lag_messages=ingestor.lag_messages,
        read_share=ingestor.source.read_share,
        missing_partitions=tuple(missing)[:MAX_MISSING],
        missing_since_unix_seconds=min(missing.values(), default=None),
        messages_per_second=ingestor.rates.messages_per_second,
        accesses_per_second=ingestor.rates.accesses_per_second,
        messages=counter.messages,
        accesses=accesses.accepted,
        bytes=counter.bytes,
        rejected_messages=with_zeros(MESSAGE_REASONS, counter.rejected),
        rejected_accesses={reason: getattr(accesses, reason) for reason in ROW_REASONS},
        unread_values=_by_reason(() if counter.decoder is None else counter.decoder.unread.items()),
        filtered_events=0 if counter.decoder is None else counter.decoder.filtered,
        tombstones=counter.tombstones,
        adjusted_accesses={"future_clamped": accesses.future_clamped, "late": accesses.late},
        messages_lost=with_zeros(LOSS_REASONS, losses.messages),
        positions_lost=with_zeros(POSITION_REASONS, losses.positions),
        dead_letters=ingestor.dead_letters.written,
        dead_letter_failures=ingestor.dead_letters.failures,
        source_failures=ingestor.failures["stream"],
        commit_failures=ingestor.snapshots.commit_failures,
        newest_event_unix_seconds=ingestor.sketches.newest_event_seconds,
        least_skew_seconds=counter.skew_seconds[0],
        most_skew_seconds=counter.skew_seconds[1],
        problem="; ".join(text for _, text in problems) or None,
        connected=all(part != "stream" for part, _ in problems),
    )


def _by_reason(unread: Iterable[tuple[tuple[str, str], int]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (reason, path), count in unread:
        found.setdefault(reason, {})[path] = count
    return found


SketchKind = Literal["dense", "logarithmic", "count_min"]


class TableSketchStatus(Model):
    """The counter of one table."""

    table: str
    kind: SketchKind
    """``dense`` counts every row exactly, ``logarithmic`` every row in a few bits, ``count_min`` is bounded."""
    bytes: int
    error_bound: FiniteOrNone = None
    """Largest over-estimate of a count-min, as a share of the table's accesses; 0 for the other kinds."""
    error_probability: Annotated[FiniteOrNone, DETAIL] = None
    """Probability that one row's estimate exceeds the bound; 0 for the other kinds."""
    relative_error: FiniteOrNone = None
    """Relative standard error of one row's estimate by logarithmic counters; 0 for the other kinds."""
    counter_bits: Annotated[int, DETAIL] = 0
    """Bits of each row's logarithmic counter; 0 for the other kinds."""
    width: Annotated[int, DETAIL] = 0
    """Counters in each of a count-min's rows of counters; 0 for the other kinds."""
    hot_rows: Annotated[int, DETAIL] = 0
    """Rows that can be listed one by one."""
    sampled_accesses: Annotated[int, DETAIL] = 0
    """Accesses kept to tell where they come from."""
    affinity: FiniteOrNone = None
    """Excess over chance of two accesses of a row coming from one node: 0 none, 1 if every row belongs to one node. An
    unbiased estimate: sampling noise can make it negative. Null before a profile, or if no row was sampled twice."""


class ProfileStatus(Model):
    """The newest profile."""

    generation: int = 0
    """Counts the profiles made; goes on over restarts."""
    samples: int = 0
    """Accesses behind it, undecayed."""
    coverage: FiniteOrNone = None
    """Smallest share of a table's accesses that listed rows and bins explain, 0-1."""
    listed: FiniteOrNone = None
    """Share of all accesses that the listed rows explain for certain: the sum of the lower bounds of their estimates,
    0-1. Low where accesses are spread evenly, or where the counters' noise hides what is popular."""
    age_seconds: FiniteOrNone = None

    FAMILIES = (
        gauge("flexd_profile_age_seconds", "Since the newest profile.", "age_seconds"),
        gauge("flexd_profile_coverage_ratio", "Accesses the newest profile explains, 0-1.", "coverage"),
        gauge(
            "flexd_profile_listed_ratio",
            "Accesses that the listed rows of the newest profile explain for certain (lower bounds), 0-1.",
            "listed",
        ),
    )


class SketchStatus(Model):
    """All counters."""

    bytes: int = 0
    tables: tuple[TableSketchStatus, ...] = ()
    profile: ProfileStatus = ProfileStatus()

    FAMILIES = (
        gauge("flexd_sketch_bytes", "Memory of the counter of each table.", by_table("bytes"), ("table",)),
        gauge(
            "flexd_sketch_error_bound_ratio",
            "Largest over-estimate as a share of the table's accesses; 0 for other kinds.",
            by_table("error_bound"), ("table",),
        ),
        gauge(
            "flexd_sketch_relative_error_ratio",
            "Relative standard error of one row's estimate by logarithmic counters; 0 for other kinds.",
            by_table("relative_error"), ("table",),
        ),
        gauge(
            "flexd_table_affinity",
            "Excess over chance of two accesses of a row coming from one node: 0 none, 1 always; an unbiased "
            "estimate, so noise can make it negative; NaN if unknown.",
            by_table("affinity"), ("table",),
        ),
    )  # fmt: skip


def sketch_status(choices: Iterable[TableChoice], profile: Profile | None, profile_age_seconds: float) -> SketchStatus:
    """Return the counters in memory and the newest profile.

    Args:
        choices: how each table is counted.
        profile: the newest; None before the first.
    """
    tables = () if profile is None else profile.tables
    sources = {table.table: table.sources for table in tables if table.sources is not None}
    counters = tuple(_table(choice, sources.get(choice.table)) for choice in choices)
    shown = ProfileStatus()
    if profile is not None:
        accessed = [table for table in tables if table.weight > 0]
        certain = sum(table.weight * float(table.hot_lower.sum()) for table in accessed)
        shown = ProfileStatus.from_object(
            profile,
            # The table that is known least decides.
            coverage=min((table.coverage for table in accessed), default=None),
            listed=certain / sum(table.weight for table in accessed) if accessed else None,
            age_seconds=profile_age_seconds,
        )
    return SketchStatus(bytes=sum(table.bytes for table in counters), tables=counters, profile=shown)


def _table(choice: TableChoice, sources: TableSources | None) -> TableSketchStatus:
    return TableSketchStatus.from_object(
        choice,
        error_bound=choice.error_share,
        error_probability=choice.failure_probability,
        width=1 << choice.log2_width if choice.kind == "count_min" else 0,
        affinity=None if sources is None else sources.affinity,
    )


MAX_PAGE_ENTRIES = 1000

TableOrder = Literal["accesses", "replicas", "memory", "name", "configured"]
"""Order of a page of tables: numbers descending, names ascending, or as configured."""


class TableReport(Model):
    """One table."""

    table: str
    rows: int
    accesses: int = 0
    """Accesses counted, undecayed."""
    share: FiniteOrNone = None
    """Share of all accesses counted, 0-1; null before the first."""
    placed_rows: RowsByTier = Field(default_factory=dict)
    counter: SketchKind
    drift_ratio: FiniteOrNone = None
    """Exposed seconds of its bytes, at the live placement / with a plan made now."""
    dim: int
    dtype: str
    optimizer: Annotated[str, DETAIL]
    group: Annotated[int, DETAIL]
    counter_bytes: int
    distinct_rows: FiniteOrNone = None
    """Rows seen, by the newest profile; null before the first."""
    coverage: Annotated[FiniteOrNone, DETAIL] = None
    """Share of its accesses that listed rows and bins of the newest profile explain."""


class TablePage(Model):
    """Some of the tables."""

    total: int
    offset: Annotated[int, HIDDEN]
    tables: tuple[TableReport, ...] = ()


class PageRequest(RequestBody):
    """A page of a list."""

    offset: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Entries before it."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ENTRIES)] = 100
    """Entries of it, at most."""


class TablesRequest(PageRequest):
    """A page of tables."""

    order: TableOrder = "accesses"


class RowsRequest(PageRequest):
    """A page of the hot rows of a table."""

    table: Annotated[str, Field(max_length=256)]


class HotRow(Model):
    """One row that the counters list."""

    place: int
    """1 is the most accessed row of the table."""
    row: int
    key: Annotated[int, DETAIL]
    share: FiniteOrNone = None
    """Estimated share of the table's accesses, decayed."""
    share_lower: FiniteOrNone = None
    share_upper: FiniteOrNone = None
    tier: TierName
    home_rank: int | None = None
    """Rank of its home copy; null before ranks are known."""


class HotRowPage(Model):
    """Some of the hot rows of one table, the most accessed first."""

    table: str
    rows: int
    total: int
    """Rows that the counters list."""
    offset: Annotated[int, HIDDEN]
    weight: FiniteOrNone = None
    """Decayed accesses of the table."""
    placed_rows: RowsByTier = Field(default_factory=dict)
    hottest: tuple[HotRow, ...] = ()


def table_page(
    keyspace: KeySpace,
    ingestor: Ingestor,
    placement: Placement,
    profile: Profile | None,
    drift_ratios: Mapping[str, float],
    offset: int,
    limit: int,
    order: TableOrder,
) -> TablePage:
    """Return at most ``limit`` tables from ``offset`` on.

    Args:
        profile: the newest; None before the first.
        drift_ratios: by table, as far as known.
    """
    import numpy as np

    choices: Sequence[TableChoice] = ingestor.sketches.choices()
    accesses = np.array(ingestor.sketches.samples_by_table(), dtype=np.int64)
    placed = _placed_rows(keyspace, placement)
    keys: dict[TableOrder, Any] = {
        "accesses": -accesses,
        "replicas": -placed.sum(axis=1),
        "memory": -np.array([choice.bytes for choice in choices], dtype=np.int64),
        "name": np.array([table.name for table in keyspace.tables]),
        "configured": np.arange(len(choices)),
    }
    chosen = np.argsort(keys[order], kind="stable")[offset : offset + limit]
    total = int(accesses.sum())
    groups = {index: number for number, group in enumerate(keyspace.groups) for index in group.tables}

    def report(index: int) -> TableReport:
        table, choice = keyspace.tables[index], choices[index]
        known = None if profile is None else profile.tables[index]
        return TableReport.from_object(
            table,
            table=table.name,
            group=groups[index],
            accesses=int(accesses[index]),
            share=float(accesses[index] / total) if total else None,
            placed_rows=_by_tier(table.rows, placed[index]),
            counter=choice.kind,
            counter_bytes=choice.bytes,
            distinct_rows=None if known is None else known.distinct_rows,
            coverage=None if known is None or known.weight <= 0 else known.coverage,
            drift_ratio=drift_ratios.get(table.name),
        )

    return TablePage(total=len(choices), offset=offset, tables=tuple(report(int(index)) for index in chosen))


def hot_row_page(
    keyspace: KeySpace,
    ingestor: Ingestor,
    placement: Placement,
    live: LiveTopology | None,
    table: str,
    offset: int,
    limit: int,
) -> HotRowPage:
    """Return at most ``limit`` hot rows of a table from ``offset`` on. Raises ApiError (404) if it is not known."""
    from flexd.core.errors import ApiError
    from flexd.core.keyspace import homes_of

    index = keyspace.index.get(table)
    if index is None:
        raise ApiError(f"no table {table!r}"[:300], status=404, remedy="flexd get tables lists them")
    spec, profile = keyspace.tables[index], ingestor.table_profile(table)
    rows = profile.hot_rows[offset : offset + limit]
    keys = keyspace.keys(index, rows)
    tiers = placement.copies.tiers_of(keys)
    ranks = None if live is None else homes_of(keyspace, live.layout).home_rank(keys)
    shown = tuple(
        HotRow(
            place=offset + i + 1,
            row=int(rows[i]),
            key=int(keys[i]),
            share=float(profile.hot_share[offset + i]),
            share_lower=float(profile.hot_lower[offset + i]),
            share_upper=float(profile.hot_upper[offset + i]),
            tier=TIERS[int(tiers[i])],
            home_rank=None if ranks is None else int(ranks[i]),
        )
        for i in range(len(rows))  # a page, not a table
    )
    return HotRowPage(
        table=table,
        rows=spec.rows,
        total=len(profile.hot_rows),
        offset=offset,
        weight=profile.weight,
        placed_rows=_by_tier(spec.rows, _placed_rows(keyspace, placement)[index]),
        hottest=shown,
    )


def _placed_rows(keyspace: KeySpace, placement: Placement) -> Int64Array:
    """Return int64[tables, 2]: rows at NODE and at DEVICE."""
    import numpy as np

    from flexd.core.placement import Tier

    tables, placement = len(keyspace.tables), placement.copies
    cells = keyspace.table_of(placement.keys) * 2 + (placement.tiers.astype(np.int64) - int(Tier.NODE))
    return np.bincount(cells, minlength=2 * tables).astype(np.int64).reshape(tables, 2)


def _by_tier(rows: int, placed: Int64Array) -> RowsByTier:
    node, device = int(placed[0]), int(placed[1])
    return {"HOME": rows - node - device, "NODE": node, "DEVICE": device}
