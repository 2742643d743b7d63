"""The use of unbounded ids as the ranks report it: totals, and what is recent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import IDS_QUANTITIES, IdsReport

HALF_LIFE_SECONDS = 600.0
"""Of what is recent."""
# A sum stops there: one more count of a report does not overflow it.
_MOST = 2**62


@dataclass(frozen=True)
class IdsTotals:
    """Unbounded ids of one table over all ranks.

    Attributes:
        used_slots: rows that ids have now.
        counts: int64 [quantities], of ``IDS_QUANTITIES``, since the daemon started.
        recent: float64 [quantities], decayed.
    """

    used_slots: int
    counts: npt.NDArray[np.int64]
    recent: npt.NDArray[np.float64]


class IdsMonitor:
    """Not thread-safe.

    Args:
        tables: number of the daemon's tables.
    """

    def __init__(self, tables: int) -> None:
        self._tables = tables
        # By table: totals, and what is recent with its time; by table and rank: slots in use.
        self._counts: dict[int, npt.NDArray[np.int64]] = {}
        self._recent: dict[int, tuple[npt.NDArray[np.float64], float]] = {}
        self._used_slots: dict[tuple[int, int], int] = {}

    def add(self, rank: int, reports: Sequence[IdsReport]) -> None:
        """Add what a rank reports; tables that the daemon does not have are left out."""
        now = time.monotonic()
        for report in reports:
            if report.table >= self._tables:
                continue
            counts = np.array([getattr(report, name) for name in IDS_QUANTITIES], dtype=np.int64)
            known = self._counts.get(report.table, np.zeros_like(counts))
            self._counts[report.table] = np.minimum(known + np.minimum(counts, _MOST), _MOST)
            recent, since = self._recent.get(report.table, (np.zeros(len(counts)), now))
            self._recent[report.table] = recent * 0.5 ** ((now - since) / HALF_LIFE_SECONDS) + counts, now
            self._used_slots[report.table, rank] = report.used_slots

    def totals(self) -> dict[int, IdsTotals]:
        """Return the totals by number of the table."""
        return {
            table: IdsTotals(
                min(_MOST, sum(used for (of, _), used in self._used_slots.items() if of == table)), counts.copy(),
                self._recent[table][0].copy(),
            )
            for table, counts in sorted(self._counts.items())
        }  # fmt: skip

    def forget_ranks(self) -> None:
        """Forget the slots of the ranks of the previous topology generation."""
        self._used_slots.clear()
