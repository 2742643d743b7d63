"""What slow memory did for the ranks, as they report it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import SLOW_TABLE_QUANTITIES, SlowTableReport, StepReport

HALF_LIFE_SECONDS = 60.0
"""Of what is recent: the share of the steps that waited."""
_MOST = 2**62
"""A sum stops there: one more count of a report does not overflow it."""


@dataclass(frozen=True)
class SlowMemoryTotals:
    """Sums over the ranks since the daemon started.

    Attributes:
        by_table: int64 [tables + 1, quantities], the quantities of ``SlowTableReport``; last the tables that reports
            did not name.
        bytes_read, bytes_written: moved to and from slow memory.
        wait_seconds: that ranks waited for it.
        wait_share: recent wait as a share of the recent steps; NaN without steps.
    """

    by_table: npt.NDArray[np.int64]
    bytes_read: int
    bytes_written: int
    wait_seconds: float
    wait_share: float


class SlowMemoryMonitor:
    """Sums the reports of the ranks. Thread-safe.

    Args:
        tables: number of the daemon's tables.
        clock: monotonic seconds.
    """

    def __init__(self, tables: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._by_table: npt.NDArray[np.int64] | None = None
        self._tables = tables
        self._bytes_read = self._bytes_written = 0
        self._wait_seconds = 0.0
        self._recent_wait = self._recent_seconds = 0.0
        self._at = clock()

    def add(self, report: StepReport) -> None:
        """Add a report of any rank. Tables that the daemon does not have count as not named."""
        slow = report.slow_memory
        if slow is None and self._by_table is None:
            return
        with self._lock:
            now = self._clock()
            decay = 0.5 ** ((now - self._at) / HALF_LIFE_SECONDS)
            self._at = now
            self._recent_seconds = self._recent_seconds * decay + report.step_seconds
            self._recent_wait *= decay
            if slow is None:
                return
            if self._by_table is None:
                self._by_table = np.zeros((self._tables + 1, len(SLOW_TABLE_QUANTITIES)), dtype=np.int64)
            for table in slow.tables:
                row = self._row(table)
                counts = [getattr(table, name) for name in SLOW_TABLE_QUANTITIES]
                self._by_table[row] = np.minimum(self._by_table[row] + counts, _MOST)
            self._bytes_read += slow.bytes_read
            self._bytes_written += slow.bytes_written
            self._wait_seconds += slow.seconds
            self._recent_wait += slow.seconds

    def totals(self) -> SlowMemoryTotals | None:
        """Return the sums; None if no rank has rows in slow memory."""
        with self._lock:
            if self._by_table is None:
                return None
            return SlowMemoryTotals(
                self._by_table.copy(), self._bytes_read, self._bytes_written, self._wait_seconds,
                self._recent_wait / self._recent_seconds if self._recent_seconds > 0 else math.nan,
            )  # fmt: skip

    def _row(self, table: SlowTableReport) -> int:
        return table.table if 0 <= table.table < self._tables else self._tables
