"""The counters of the stream, the profile made of them, and the tables and hot rows a page at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flexd.api.base import TIERS, RequestBody, RowsByTier, TierName
from flexd.core.model import DETAIL, HIDDEN, FiniteOrNone, Model, by_table, gauge

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from flexd.control.daemon.coordinator_types import LiveTopology
    from flexd.core.keyspace import KeySpace
    from flexd.core.placement import Placement
    from flexd.sketch.ingestor import Ingestor
    from flexd.sketch.node_sources import TableSources
    from flexd.sketch.profile import Profile, TableProfile
    from flexd.sketch.types import TableChoice

    Int64Array = npt.NDArray[np.int64]


SketchKind = Literal["dense", "logarithmic", "count_min"]


class TableSketchStatus(Model):
    """The counter of one table."""

    table: str
    """Name of the table."""
    kind: SketchKind
    """``dense`` counts every row exactly, ``logarithmic`` every row in a few bits, ``count_min`` is bounded."""
    bytes: int
    """Memory of the counter."""
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
    """Since it was made."""

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
    """Memory of all counters."""
    tables: tuple[TableSketchStatus, ...] = ()
    """One entry per table, in the configured order."""
    profile: ProfileStatus = ProfileStatus()
    """The newest profile."""

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
        # The table that is known least decides; NaN if none was accessed.
        coverage = min((table.coverage for table in profile.tables if table.weight > 0), default=None)
        shown = ProfileStatus.from_object(
            profile, coverage=coverage, listed=_listed(profile.tables), age_seconds=profile_age_seconds
        )
    return SketchStatus(bytes=sum(table.bytes for table in counters), tables=counters, profile=shown)


def _listed(tables: Iterable[TableProfile]) -> float | None:
    accessed = [table for table in tables if table.weight > 0]
    if not accessed:
        return None
    weight = sum(table.weight for table in accessed)
    return sum(table.weight * float(table.hot_lower.sum()) for table in accessed) / weight


def _table(choice: TableChoice, sources: TableSources | None) -> TableSketchStatus:
    return TableSketchStatus.from_object(
        choice,
        error_bound=choice.error_share,
        error_probability=choice.failure_probability,
        width=1 << choice.log2_width if choice.kind == "count_min" else 0,
        affinity=None if sources is None else sources.affinity,
    )


MAX_PAGE_ENTRIES = 1000
"""Entries of one page, at most."""

TableOrder = Literal["accesses", "replicas", "memory", "name", "configured"]
"""Order of a page of tables: numbers descending, names ascending, or as configured."""


class TableReport(Model):
    """One table."""

    table: str
    """Name of the table."""
    rows: int
    """Rows of the table."""
    accesses: int = 0
    """Accesses counted, undecayed."""
    share: FiniteOrNone = None
    """Share of all accesses counted, 0-1; null before the first."""
    placed_rows: RowsByTier = Field(default_factory=dict)
    """Rows in each tier."""
    counter: SketchKind
    """Kind of counter."""
    drift_ratio: FiniteOrNone = None
    """Exposed seconds of its bytes, at the live placement / with a plan made now."""
    dim: int
    """Numbers in a row."""
    dtype: str
    """Type of these numbers."""
    optimizer: Annotated[str, DETAIL]
    """The optimizer, whose state migrates with a row."""
    group: Annotated[int, DETAIL]
    """Index of its dim-group."""
    counter_bytes: int
    """Memory of the counter."""
    distinct_rows: FiniteOrNone = None
    """Rows seen, by the newest profile; null before the first."""
    coverage: Annotated[FiniteOrNone, DETAIL] = None
    """Share of its accesses that listed rows and bins of the newest profile explain."""


class TablePage(Model):
    """Some of the tables."""

    total: int
    """Number of all tables."""
    offset: Annotated[int, HIDDEN]
    """Position of the first entry in the requested order."""
    tables: tuple[TableReport, ...] = ()
    """The entries of the page."""


class PageRequest(RequestBody):
    """A page of a list."""

    offset: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Entries before it."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ENTRIES)] = 100
    """Entries of it, at most."""


class TablesRequest(PageRequest):
    """A page of tables."""

    order: TableOrder = "accesses"
    """Order of the list."""


class RowsRequest(PageRequest):
    """A page of the hot rows of a table."""

    table: Annotated[str, Field(max_length=256)]
    """Name of the table."""


class HotRow(Model):
    """One row that the counters list."""

    place: int
    """1 is the most accessed row of the table."""
    row: int
    """Id of the row in the table."""
    key: Annotated[int, DETAIL]
    """Its key in the job's key space."""
    share: FiniteOrNone = None
    """Estimated share of the table's accesses, decayed."""
    share_lower: FiniteOrNone = None
    """Lower bound of the share."""
    share_upper: FiniteOrNone = None
    """Upper bound of the share."""
    tier: TierName
    """Its tier in the live placement."""
    home_rank: int | None = None
    """Rank of its home copy; null before ranks are known."""


class HotRowPage(Model):
    """Some of the hot rows of one table, the most accessed first."""

    table: str
    """Name of the table."""
    rows: int
    """Rows of the table."""
    total: int
    """Rows that the counters list."""
    offset: Annotated[int, HIDDEN]
    """Places before the first entry."""
    weight: FiniteOrNone = None
    """Decayed accesses of the table."""
    placed_rows: RowsByTier = Field(default_factory=dict)
    """Rows of the table in each tier."""
    hottest: tuple[HotRow, ...] = ()
    """The entries of the page."""


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
    from flexd.core.homes import homes_of

    index = keyspace.index.get(table)
    if index is None:
        raise ApiError(f"no table {table!r}"[:300], status=404, remedy="flexd get tables lists them")
    spec, profile = keyspace.tables[index], ingestor.table_profile(table)
    rows = profile.hot_rows[offset : offset + limit]
    keys = keyspace.keys(index, rows)
    tiers = _tiers_of(placement.copies, keys)
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

    from flexd.core.layout import Tier

    tables, placement = len(keyspace.tables), placement.copies
    cells = keyspace.table_of(placement.keys) * 2 + (placement.tiers.astype(np.int64) - int(Tier.NODE))
    return np.bincount(cells, minlength=2 * tables).astype(np.int64).reshape(tables, 2)


def _by_tier(rows: int, placed: Int64Array) -> RowsByTier:
    node, device = int(placed[0]), int(placed[1])
    return {"HOME": rows - node - device, "NODE": node, "DEVICE": device}


def _tiers_of(placement: Placement, keys: Int64Array) -> npt.NDArray[np.uint8]:
    """Return uint8[n], the tiers of int64[n] keys."""
    import numpy as np

    from flexd.core.layout import Tier

    tiers = np.full(len(keys), int(Tier.HOME), dtype=np.uint8)
    if len(placement):
        at = np.minimum(np.searchsorted(placement.keys, keys), len(placement) - 1)
        listed = placement.keys[at] == keys
        tiers[listed] = placement.tiers[at[listed]]
    return tiers
