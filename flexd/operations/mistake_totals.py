"""Mistakes of trainers, as the ranks report them, by kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexd.core.mistakes import MAX_TEXT, MistakeKind, MistakeReport

_KINDS = frozenset(kind.value for kind in MistakeKind)
OTHER = "other"
"""Kind of reports of a newer flexd that this one does not know."""


@dataclass(frozen=True)
class MistakeTotal:
    """One kind of mistake, over all ranks since the daemon started.

    Attributes:
        rank: the rank of the newest report.
        text: its message.
        heard_unix_seconds: when its count was received.
    """

    kind: str
    count: int
    rank: int
    text: str
    heard_unix_seconds: float


class MistakeTotals:
    """Thread-safe, and bounded: one total a kind, one number a rank and kind.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, str], MistakeReport] = {}
        self._totals: dict[str, MistakeTotal] = {}

    def add(self, rank: int, reports: Sequence[MistakeReport]) -> None:
        """Add what a rank reports, which counts from the start of its process: the same twice counts once."""
        if not reports:
            return
        with self._lock:
            for report in reports[: len(_KINDS)]:
                kind = report.kind if report.kind in _KINDS else OTHER
                before = self._seen.get((rank, kind))
                same = before is not None and before.first_unix_seconds == report.first_unix_seconds
                new = report.count - before.count if same and before is not None else report.count
                if new <= 0:
                    continue
                self._seen[rank, kind] = report
                total = self._totals.get(kind)
                self._totals[kind] = MistakeTotal(
                    kind, new + (0 if total is None else total.count), rank, report.text[:MAX_TEXT], self._clock()
                )

    def totals(self) -> tuple[MistakeTotal, ...]:
        """Return the totals of the kinds that were reported, the newest first."""
        with self._lock:
            return tuple(sorted(self._totals.values(), key=lambda total: -total.heard_unix_seconds))
