"""The tables and hot rows, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flexd.api.base import TIERS, RequestBody, RowsByTier, TierName
from flexd.api.stream import SketchKind
from flexd.core.model import DETAIL, HIDDEN, FiniteOrNone, Model

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from flexd.control.daemon.epoch_manager import LiveTopology
    from flexd.core.keyspace import KeySpace
    from flexd.core.placement import Placement
    from flexd.sketch.ingestor import Ingestor
    from flexd.sketch.profile import Profile
    from flexd.sketch.table_sketch import TableChoice

    Int64Array = npt.NDArray[np.int64]


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
