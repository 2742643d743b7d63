"""Home rows in two memories, as the ranks report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import MAX_LABEL_VALUES, counter, counters, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.core.keyspace import TableSpec
    from flexd.operations.training_monitor import SlowMemoryTotals

OTHERS = "other"
"""Stands for the tables that the ranks did not name, each of few misses."""


class SlowTableStatus(Model):
    """Home rows of one table, over all ranks since the daemon started."""

    table: str
    """Its name; ``other`` for tables that the ranks' reports did not name."""
    used: int
    """Distinct rows that look-ups needed, summed over passes."""
    missed: int
    """Of those, rows that were in slow memory."""
    evicted: int
    """Rows that left fast memory."""
    written: int
    """Of those, rows that had changed and were written to slow memory."""


class SlowMemoryStatus(Model):
    """Rows in two memories, over all ranks since the daemon started."""

    used: int = 0
    """Distinct home rows that look-ups needed, summed over passes."""
    missed: int = 0
    """Of those, rows that were in slow memory."""
    evicted: int = 0
    """Rows that left fast memory."""
    written: int = 0
    """Of those, rows that had changed and were written to slow memory."""
    bytes_read: int = 0
    """Read from slow memory, in whole blocks where it has blocks."""
    bytes_written: int = 0
    """Written to slow memory."""
    wait_seconds: float = 0.0
    """Waited for slow memory by the ranks."""
    wait_share: FiniteOrNone = None
    """Recent wait as a share of the recent steps."""
    tables: tuple[SlowTableStatus, ...] = ()
    """Those with rows in slow memory; last those that the ranks' reports did not name."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of slow memory."""
        text = {
            "used": "Distinct home rows that look-ups needed, by table, of ranks with rows in two memories.",
            "missed": "Of those, rows that were in slow memory.",
        }
        for name, words in text.items():
            by_table = {each.table: getattr(each, name) for each in self.tables}
            yield counters(f"flexd_slow_memory_rows_{name}", words, "table", by_table, MAX_LABEL_VALUES - 1)
        yield counter("flexd_slow_memory_read_bytes", "Read from slow memory by all ranks.", self.bytes_read)
        yield counter("flexd_slow_memory_written_bytes", "Written to slow memory by all ranks.", self.bytes_written)
        yield gauge(
            "flexd_slow_memory_wait_ratio", "Recent wait for slow memory as a share of the steps.", self.wait_share
        )


def slow_memory_status(totals: SlowMemoryTotals | None, tables: Sequence[TableSpec]) -> SlowMemoryStatus | None:
    """Return the sums of all ranks; None if no rank has rows in slow memory."""
    from flexd.control.protocol.report import SLOW_TABLE_QUANTITIES

    if totals is None:
        return None
    names = (*(table.name for table in tables), OTHERS)
    shown = tuple(
        SlowTableStatus(table=name, **dict(zip(SLOW_TABLE_QUANTITIES, counts, strict=True)))
        for name, counts in zip(names, totals.by_table.tolist(), strict=True)
        if any(counts)
    )
    sums = dict(zip(SLOW_TABLE_QUANTITIES, totals.by_table.sum(axis=0).tolist(), strict=True))
    return SlowMemoryStatus.from_object(totals, **sums, tables=shown)
