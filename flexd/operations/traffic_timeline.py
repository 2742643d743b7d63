"""What the ranks sent and looked up lately, in intervals: the picture that the status page draws."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from flexd.control.protocol.report import StepReport

INTERVAL_SECONDS = 5.0
MAX_SAMPLES = 360
"""Half an hour."""


@dataclass(frozen=True)
class TrafficInterval:
    """Sums over the reports that came in one interval.

    Attributes:
        index: of the interval since the Unix epoch, in ``INTERVAL_SECONDS``.
        steps: of all ranks. step_seconds: their wall time.
        accesses_by_tier: look-ups that (HOME, NODE, DEVICE) rows answered.
        intra_bytes, inter_bytes: sent for rows and their synchronisation. migration_bytes: sent to migrate rows.
    """

    index: int
    steps: int = 0
    step_seconds: float = 0.0
    accesses_by_tier: tuple[int, int, int] = (0, 0, 0)
    intra_bytes: int = 0
    inter_bytes: int = 0
    migration_bytes: int = 0

    def plus(self, report: StepReport) -> TrafficInterval:
        home, node, device = (a + b for a, b in zip(self.accesses_by_tier, report.accesses_by_tier, strict=True))
        return replace(
            self,
            steps=self.steps + report.steps,
            step_seconds=self.step_seconds + report.step_seconds,
            accesses_by_tier=(home, node, device),
            intra_bytes=self.intra_bytes + report.all_to_all_intra_bytes + report.sync_intra_bytes,
            inter_bytes=self.inter_bytes + report.all_to_all_inter_bytes + report.sync_inter_bytes,
            migration_bytes=self.migration_bytes + report.migration_intra_bytes + report.migration_inter_bytes,
        )


class TrafficTimeline:
    """Thread-safe; keeps ``MAX_SAMPLES`` intervals. A report counts in the interval it arrives in."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._intervals: deque[TrafficInterval] = deque(maxlen=MAX_SAMPLES)

    def add(self, report: StepReport) -> None:
        now = int(self._clock() // INTERVAL_SECONDS)
        with self._lock:
            newest = self._intervals[-1] if self._intervals else None
            # A clock that was set back must not open intervals in front of those that are there.
            if newest is not None and now <= newest.index:
                self._intervals[-1] = newest.plus(report)
            else:
                self._intervals.append(TrafficInterval(now).plus(report))

    def intervals(self) -> tuple[TrafficInterval, ...]:
        """Oldest first; the newest may still grow."""
        with self._lock:
            return tuple(self._intervals)
