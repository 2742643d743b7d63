"""Reports of the ranks on their steps: summed for metrics and the page, averaged for the planner."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import (
    SLOW_TABLE_QUANTITIES,
    BatchReport,
    ExchangeReason,
    PlacementState,
    SentBytes,
    StepReport,
    UsedExchange,
)
from flexd.core.usage_warnings import MAX_TEXT, UsageWarningKind, UsageWarningReport
from flexd.operations.step_times import PHASE_STEPS, PhaseAverages, StepTimes, mean_phases

_KINDS = frozenset(kind.value for kind in UsageWarningKind)
OTHER = "other"
"""Kind of reports of a newer flexd that this one does not know."""


@dataclass(frozen=True)
class UsageWarningTotal:
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


class UsageWarningTotals:
    """Thread-safe, and bounded: one total per kind, one number per rank and kind.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, str], UsageWarningReport] = {}
        self._totals: dict[str, UsageWarningTotal] = {}

    def add(self, rank: int, reports: Sequence[UsageWarningReport]) -> None:
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
                self._totals[kind] = UsageWarningTotal(
                    kind, new + (0 if total is None else total.count), rank, report.text[:MAX_TEXT], self._clock()
                )

    def totals(self) -> tuple[UsageWarningTotal, ...]:
        """Return the totals of the kinds that were reported, the newest first."""
        with self._lock:
            return tuple(sorted(self._totals.values(), key=lambda total: -total.heard_unix_seconds))


INTERVAL_SECONDS = 5.0
MAX_SAMPLES = 360
"""Half an hour."""


NO_STEPS = StepReport(0, 0, PlacementState(0, 0), 0.0, 0.0, (0, 0, 0))


def added(sums: StepReport, report: StepReport) -> StepReport:
    """Return the sums of reports of all ranks with one more, and the newest step of any rank.

    Phases, slow memory and usage warnings are summed elsewhere.
    """
    home, node, device = (a + b for a, b in zip(sums.accesses_by_tier, report.accesses_by_tier, strict=True))
    return StepReport(
        max(sums.step, report.step), sums.steps + report.steps, report.placement,
        sums.step_seconds + report.step_seconds, sums.apply_seconds + report.apply_seconds, (home, node, device),
        SentBytes(*map(operator.add, vars(sums.sent).values(), vars(report.sent).values())),
        BatchReport(*map(operator.add, vars(sums.batches).values(), vars(report.batches).values())),
    )  # fmt: skip


@dataclass(frozen=True)
class TrafficInterval:
    """The step reports received in one interval.

    Attributes:
        index: number of the interval since the Unix epoch, in ``INTERVAL_SECONDS``.
        sums: of the reports.
    """

    index: int
    sums: StepReport


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
                self._intervals[-1] = TrafficInterval(newest.index, added(newest.sums, report))
            else:
                self._intervals.append(TrafficInterval(now, added(NO_STEPS, report)))

    def intervals(self) -> tuple[TrafficInterval, ...]:
        """Return the intervals, oldest first; the newest may still grow."""
        with self._lock:
            return tuple(self._intervals)


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
                row = table.table if 0 <= table.table < self._tables else self._tables
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


TRAFFIC_KINDS = ("all_to_all", "sync", "migration")
LINKS = ("intra", "inter")


@dataclass(frozen=True)
class RankAverages:
    """One rank as it reported; averages over about ``PHASE_STEPS`` of its newest steps.

    Attributes:
        version: version of its placement.
        step: its newest step.
        accesses_per_step: look-ups per step.
        passes_per_step: forward passes per step of the optimizer.
        replica_accesses_per_step: look-ups per step served by rows above HOME.
        step_seconds: wall time of a step.
        intra_bytes: bytes of all kinds sent inside its node per step.
        inter_bytes: bytes of all kinds sent to other nodes per step.
        heard_at: time of its newest report, in monotonic seconds.
        used: its arm after its newest step.
        phases: its steps by phase; None before it has reported any.
    """

    version: int
    step: int
    accesses_per_step: float
    passes_per_step: float
    replica_accesses_per_step: float
    step_seconds: float
    intra_bytes: float
    inter_bytes: float
    heard_at: float
    used: UsedExchange
    phases: PhaseAverages | None = None

    @staticmethod
    def of(report: StepReport, known: RankAverages | None) -> RankAverages:
        steps = max(1, report.steps)
        weight = 1.0 if known is None else min(1.0, report.steps / PHASE_STEPS)

        def average(total: float, before: float) -> float:
            return before + weight * (total / steps - before)

        sent = report.sent
        intra = sent.all_to_all_intra_bytes + sent.sync_intra_bytes + sent.migration_intra_bytes
        inter = sent.all_to_all_inter_bytes + sent.sync_inter_bytes + sent.migration_inter_bytes
        return RankAverages(
            version=report.placement.version,
            step=report.step,
            accesses_per_step=average(sum(report.accesses_by_tier), known.accesses_per_step if known else 0.0),
            passes_per_step=average(report.batches.passes, known.passes_per_step if known else 0.0),
            replica_accesses_per_step=average(
                sum(report.accesses_by_tier[1:]), known.replica_accesses_per_step if known else 0.0
            ),
            step_seconds=average(report.step_seconds, known.step_seconds if known else 0.0),
            intra_bytes=average(intra, known.intra_bytes if known else 0.0),
            inter_bytes=average(inter, known.inter_bytes if known else 0.0),
            heard_at=time.monotonic(),
            used=report.exchange,
            phases=PhaseAverages.of(report, known.phases if known else None),
        )

    @property
    def exchange(self) -> str:
        return self.used.name

    @property
    def computed_seconds(self) -> float | None:
        return None if self.phases is None else float(self.phases.quantity("computed_seconds").sum())

    @property
    def exposed_seconds(self) -> float | None:
        return None if self.phases is None else float(self.phases.quantity("exposed_seconds").sum())

    @property
    def replica_share(self) -> float:
        """Share of the look-ups that rows above HOME answered; NaN without look-ups."""
        accesses = self.accesses_per_step
        return self.replica_accesses_per_step / accesses if accesses > 0 else math.nan


class TrainingMonitor:
    """Thread-safe. Totals run since the daemon started; the averages are of the present topology generation.

    Args:
        tables: number of the daemon's tables.

    Attributes:
        slow_memory: sums of rows in tiered storage.
        timeline: recent traffic in intervals.
        step_times: step seconds by placement version, of the present topology generation.
        usage_warnings: of the ranks' trainers, since the daemon started.
    """

    def __init__(self, tables: int = 0) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, RankAverages] = {}
        self.slow_memory = SlowMemoryMonitor(tables)
        self.timeline = TrafficTimeline()
        self.step_times = StepTimes()
        self.usage_warnings = UsageWarningTotals()
        self._totals = NO_STEPS

    def add(self, rank: int, report: StepReport) -> None:
        """Add one report. A rank's look-ups are summed over tiers and averaged with exponential weights."""
        self.usage_warnings.add(rank, report.usage_warnings)
        if report.steps == 0:  # of a mistake alone
            return
        self.timeline.add(report)
        self.step_times.add(rank, report)
        self.slow_memory.add(report)
        with self._lock:
            self._ranks[rank] = RankAverages.of(report, self._ranks.get(rank))
            self._totals = added(self._totals, report)

    def new_generation(self) -> None:
        """Forget the averages and step times of the ranks of the previous topology generation."""
        self.step_times.clear()
        with self._lock:
            self._ranks.clear()

    def accesses_per_step(self, world_size: int) -> float | None:
        """Return the look-ups of the whole job per step; None until a rank has reported.

        Ranks that have not reported are assumed to look up as much as the others.
        """
        with self._lock:
            if not self._ranks:
                return None
            return world_size * sum(rank.accesses_per_step for rank in self._ranks.values()) / len(self._ranks)

    def passes_per_step(self) -> int:
        """Return the forward passes for each step of the optimizer; 1 until a rank has reported."""
        with self._lock:
            passes = [rank.passes_per_step for rank in self._ranks.values()]
        return max(1, round(sum(passes) / len(passes))) if passes else 1

    def measured_exchange(self) -> str:
        """Return the exchange that a trainer has measured and chosen; empty before, and while it measures."""
        with self._lock:
            used = [rank.used for rank in self._ranks.values()]
        return next((one.name for one in used if one.reason == ExchangeReason.MEASURED), "")

    def step_seconds(self) -> float | None:
        """Return the mean wall time of a step over the reporting ranks; None until a rank has reported a step."""
        with self._lock:
            seconds = [rank.step_seconds for rank in self._ranks.values() if rank.step_seconds > 0]
        return sum(seconds) / len(seconds) if seconds else None

    def ranks(self) -> dict[int, RankAverages]:
        """Return the reporting ranks of the current topology generation, in order."""
        with self._lock:
            return dict(sorted(self._ranks.items()))

    def phases(self) -> PhaseAverages | None:
        """Return the mean over the ranks of their steps by phase; None before any has reported phases."""
        with self._lock:
            return mean_phases(rank.phases for rank in self._ranks.values())

    def totals(self) -> StepReport:
        """Return the sums over all ranks since the daemon started, and the newest step of any."""
        with self._lock:
            return self._totals
