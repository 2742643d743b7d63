"""Rows in two memories, for ``flexd status``."""

from __future__ import annotations

from flexd.api.slow_memory import SlowMemoryStatus
from flexd.cli.blocks import Block, Facts, Table
from flexd.core import units

MAX_TABLES = 8
"""Tables to list, those with the most misses (``-o json`` has all)."""


def slow_memory_blocks(shown: SlowMemoryStatus) -> list[Block]:
    """Return how often look-ups needed slow memory, what it moved and how long the ranks waited, and the tables."""
    facts = Facts(
        "slow memory",
        (
            ("missed", f"{_share(shown.missed, shown.used)} of {units.count(shown.used)} distinct rows"),
            (
                "wait",
                f"{units.share(shown.wait_share)} of the step, {units.seconds(shown.wait_seconds)} over all ranks",
            ),
            ("read", units.size(shown.bytes_read)),
            ("written", f"{units.size(shown.bytes_written)}, {units.count(shown.written)} changed rows"),
        ),
    )
    ordered = sorted(shown.tables, key=lambda table: -table.missed)
    columns = ("table", "used", "missed", "share", "evicted", "written")
    rows = tuple(
        (
            table.table, units.count(table.used), units.count(table.missed), _share(table.missed, table.used),
            units.count(table.evicted), units.count(table.written),
        )
        for table in ordered[:MAX_TABLES]
    )  # fmt: skip
    left = len(ordered) - MAX_TABLES
    title = "rows in slow memory" + (f", {left} more tables" if left > 0 else "")
    return [facts, Table(title, columns, rows, frozenset(columns[1:]), ("written", "evicted"))]


def _share(missed: int, used: int) -> str:
    return units.share(missed / used if used else None)
