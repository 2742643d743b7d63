"""Recent traffic of the ranks in intervals, for the status page."""

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
    """Sums over the step reports received in one interval.

    Attributes:
        index: number of the interval since the Unix epoch, in ``INTERVAL_SECONDS``.
        steps: steps of all ranks.
        step_seconds: wall time of these steps.
        accesses_by_tier: look-ups served by HOME, NODE and DEVICE rows.
        intra_bytes: sent inside nodes for rows and their synchronisation.
        all_to_all_inter_bytes: sent between nodes for ids, rows and gradients.
        sync_inter_bytes: sent between nodes to synchronise replicas.
        migration_bytes: sent to migrate rows.
    """

    index: int
    steps: int = 0
    step_seconds: float = 0.0
    accesses_by_tier: tuple[int, int, int] = (0, 0, 0)
    intra_bytes: int = 0
    all_to_all_inter_bytes: int = 0
    sync_inter_bytes: int = 0
    migration_bytes: int = 0

    def with_report(self, report: StepReport) -> TrafficInterval:
        home, node, device = (a + b for a, b in zip(self.accesses_by_tier, report.accesses_by_tier, strict=True))
        return replace(
            self,
            steps=self.steps + report.steps,
            step_seconds=self.step_seconds + report.step_seconds,
            accesses_by_tier=(home, node, device),
            intra_bytes=self.intra_bytes + report.all_to_all_intra_bytes + report.sync_intra_bytes,
            all_to_all_inter_bytes=self.all_to_all_inter_bytes + report.all_to_all_inter_bytes,
            sync_inter_bytes=self.sync_inter_bytes + report.sync_inter_bytes,
            migration_bytes=self.migration_bytes + report.migration_intra_bytes + report.migration_inter_bytes,
        )


class TrafficTimeline:
    """The newest ``MAX_SAMPLES`` intervals. A report counts in the interval that it arrives in. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._intervals: deque[TrafficInterval] = deque(maxlen=MAX_SAMPLES)

    def add(self, report: StepReport) -> None:
        now = int(self._clock() // INTERVAL_SECONDS)
        with self._lock:
            newest = self._intervals[-1] if self._intervals else None
            # A clock that was set back must not add intervals before existing ones.
            if newest is not None and now <= newest.index:
                self._intervals[-1] = newest.with_report(report)
            else:
                self._intervals.append(TrafficInterval(now).with_report(report))

    def intervals(self) -> tuple[TrafficInterval, ...]:
        """Return the intervals, oldest first; the newest may still grow."""
        with self._lock:
            return tuple(self._intervals)
