"""The tables and their hot rows, a page at a time, as the admin API tells them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model, RowsByTier, TierName
from flexd.api.sketch import SketchKind

MAX_PAGE_ENTRIES = 1000
"""Entries of one page, at most."""

TableOrder = Literal["accesses", "replicas", "memory", "name", "configured"]
"""What a page of tables is ordered by: figures descending, names ascending, or as the configuration has them."""


class TableReport(Model):
    """One table."""

    table: str
    """Name of the table."""
    rows: int
    """Of the table."""
    dim: int
    """Numbers in a row."""
    dtype: str
    """Of a row's numbers."""
    optimizer: str
    """Whose state migrates with a row."""
    group: int
    """Index of its dim-group."""
    accesses: int = 0
    """Counted, undecayed."""
    share: FiniteOrNone = None
    """Of all accesses counted, 0-1; null before the first."""
    placed_rows: RowsByTier = Field(default_factory=dict)
    """Rows in each tier."""
    counter: SketchKind
    """How its rows are counted."""
    counter_bytes: int
    """Memory of the counter."""
    distinct_rows: FiniteOrNone = None
    """Rows seen, by the newest profile; null before the first."""
    coverage: FiniteOrNone = None
    """Of its accesses, by the newest profile, that listed rows and bins explain."""
    drift_ratio: FiniteOrNone = None
    """Exposed seconds of its bytes, now / when the live placement was planned."""


class TablePage(Model):
    """Some of the tables."""

    total: int
    """Tables that there are."""
    offset: int
    """Of the first entry in the order asked for."""
    tables: tuple[TableReport, ...] = ()
    """The entries."""


class HotRow(Model):
    """One row that the counters list."""

    place: int
    """1 is the most accessed row of the table."""
    row: int
    """Id in the table."""
    key: int
    """In the job's key space."""
    share: FiniteOrNone = None
    """Of the table's accesses, decayed."""
    share_lower: FiniteOrNone = None
    """Lower bound of the share."""
    share_upper: FiniteOrNone = None
    """Upper bound of the share."""
    tier: TierName
    """Where its copies are now."""
    home_rank: int | None = None
    """That holds its home copy; null before ranks are known."""


class HotRowPage(Model):
    """Some of the hot rows of one table, the most accessed first."""

    table: str
    """Name of the table."""
    rows: int
    """Of the table."""
    total: int
    """Rows that the counters list."""
    offset: int
    """Places before the first entry."""
    weight: FiniteOrNone = None
    """Decayed accesses of the table."""
    placed_rows: RowsByTier = Field(default_factory=dict)
    """Rows of the table in each tier."""
    hottest: tuple[HotRow, ...] = ()
    """The entries."""
