"""Reports of the ranks on their steps: summed for metrics and the page, averaged by phase for the planner, and in
blocks for the verification of plans."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import (
    PHASE_QUANTITIES,
    SLOW_TABLE_QUANTITIES,
    BatchReport,
    PlacementState,
    SentBytes,
    SlowMemoryReport,
    StepReport,
    UsedExchange,
)
from flexd.core.step_phases import ExchangeReason, StepPhase
from flexd.core.usage_warnings import MAX_TEXT, UsageWarningKind, UsageWarningReport
from flexd.operations.ids_monitor import IdsMonitor, IdsTotals

Float64Array = npt.NDArray[np.float64]

PHASE_STEPS = 50
"""Averages of a rank cover about this number of its newest steps."""
PHASES = {phase.value: number for number, phase in enumerate(StepPhase)}


def phase_values(report: StepReport) -> Float64Array:
    """Return float64[phase, quantity] sums of a report, phases as in ``StepPhase``, quantities as in
    ``PHASE_QUANTITIES``; unknown phases are left out."""
    values = np.zeros((len(PHASES), len(PHASE_QUANTITIES)))
    for phase in report.phases.by_phase:
        if phase.phase in PHASES:
            values[PHASES[phase.phase]] = [getattr(phase, name) for name in PHASE_QUANTITIES]
    return values


@dataclass(frozen=True)
class PhaseAverages:
    """Per step, over about ``PHASE_STEPS`` of the newest steps.

    Attributes:
        values: float64[phase, quantity], phases as in ``StepPhase``, quantities as in ``PHASE_QUANTITIES``.
        cover_seconds: compute that could cover collectives beside the training thread.
    """

    values: Float64Array
    cover_seconds: float

    @staticmethod
    def of(report: StepReport, known: PhaseAverages | None) -> PhaseAverages | None:
        """Return the averages with a report; a report without phases changes nothing."""
        if report.phases.steps < 1:
            return known
        values = phase_values(report) / report.phases.steps
        cover = report.phases.cover_seconds / report.phases.steps
        if known is None:
            return PhaseAverages(values, cover)
        weight = min(1.0, report.phases.steps / PHASE_STEPS)
        return PhaseAverages(
            known.values + weight * (values - known.values),
            known.cover_seconds + weight * (cover - known.cover_seconds),
        )

    def quantity(self, name: str) -> Float64Array:
        """Return float64[phase]."""
        column: Float64Array = self.values[:, PHASE_QUANTITIES.index(name)]
        return column


def mean_phases(ranks: Iterable[PhaseAverages | None]) -> PhaseAverages | None:
    """Return the mean over the ranks that have reported phases; None without any."""
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return None
    return PhaseAverages(
        np.mean([rank.values for rank in known], axis=0), float(np.mean([rank.cover_seconds for rank in known]))
    )


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


HALF_LIFE_SECONDS = 60.0
"""Of what is recent: the share of the steps that waited."""
# A sum stops there: one more count of a report does not overflow it.
_MOST = 2**62


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
        clock: Unix seconds.
    """

    def __init__(self, tables: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ranks: dict[int, RankAverages] = {}
        self._totals = NO_STEPS
        self._intervals: deque[TrafficInterval] = deque(maxlen=MAX_SAMPLES)
        self._warned: dict[tuple[int, str], UsageWarningReport] = {}
        self._warnings: dict[str, UsageWarningTotal] = {}
        self._slow_by_table = np.zeros((tables + 1, len(SLOW_TABLE_QUANTITIES)), dtype=np.int64)
        # Sums over all tables; None until a rank has reported slow memory.
        self._slow: SlowMemoryReport | None = None
        # Seconds of slow memory and of all steps, decayed.
        self._recent = np.zeros(2)
        self._recent_at = time.monotonic()
        self._ids = IdsMonitor(tables)

    def add(self, rank: int, report: StepReport) -> None:
        """Add one report. A rank's look-ups are summed over tiers and averaged with exponential weights."""
        with self._lock:
            self._add_warnings(rank, report.usage_warnings)
            if report.steps == 0:  # of a mistake alone
                return
            self._add_to_interval(report)
            self._add_slow_memory(report)
            self._ids.add(rank, report.ids)
            self._ranks[rank] = RankAverages.of(report, self._ranks.get(rank))
            self._totals = added(self._totals, report)

    def _add_warnings(self, rank: int, reports: Sequence[UsageWarningReport]) -> None:
        """Add what a rank reports, which counts from the start of its process: the same twice counts once."""
        for report in reports[: len(_KINDS)]:
            kind = report.kind if report.kind in _KINDS else OTHER
            before = self._warned.get((rank, kind))
            same = before is not None and before.first_unix_seconds == report.first_unix_seconds
            new = report.count - before.count if same and before is not None else report.count
            if new <= 0:
                continue
            self._warned[rank, kind] = report
            count = new + (self._warnings[kind].count if kind in self._warnings else 0)
            self._warnings[kind] = UsageWarningTotal(kind, count, rank, report.text[:MAX_TEXT], self._clock())

    def _add_to_interval(self, report: StepReport) -> None:
        """Count a report in the interval that it arrives in."""
        now = int(self._clock() // INTERVAL_SECONDS)
        # A clock that was set back must not add intervals before existing ones.
        if not self._intervals or now > self._intervals[-1].index:
            self._intervals.append(TrafficInterval(now, NO_STEPS))
        newest = self._intervals.pop()
        self._intervals.append(TrafficInterval(newest.index, added(newest.sums, report)))

    def _add_slow_memory(self, report: StepReport) -> None:
        """Add what slow memory did. Tables that the daemon does not have count as not named."""
        slow, now, last = report.slow_memory, time.monotonic(), len(self._slow_by_table) - 1
        if slow is None and self._slow is None:
            return
        self._recent *= 0.5 ** ((now - self._recent_at) / HALF_LIFE_SECONDS)
        self._recent += (0.0 if slow is None else slow.seconds, report.step_seconds)
        self._recent_at = now
        if slow is None:
            return
        for table in slow.tables:
            counts = [getattr(table, name) for name in SLOW_TABLE_QUANTITIES]
            row = self._slow_by_table[table.table if 0 <= table.table < last else last]
            np.minimum(row + counts, _MOST, out=row)
        self._slow = slow if self._slow is None else SlowMemoryReport(
            (), self._slow.bytes_read + slow.bytes_read, self._slow.bytes_written + slow.bytes_written,
            self._slow.seconds + slow.seconds,
        )  # fmt: skip

    def ids(self) -> dict[int, IdsTotals]:
        """Return the totals of tables of unbounded ids, by number of the table."""
        with self._lock:
            return self._ids.totals()

    def usage_warnings(self) -> tuple[UsageWarningTotal, ...]:
        """Return the totals of the kinds of usage warnings that were reported, the newest first."""
        with self._lock:
            return tuple(sorted(self._warnings.values(), key=lambda total: -total.heard_unix_seconds))

    def intervals(self) -> tuple[TrafficInterval, ...]:
        """Return the newest ``MAX_SAMPLES`` intervals, oldest first; the newest may still grow."""
        with self._lock:
            return tuple(self._intervals)

    def slow_memory(self) -> SlowMemoryTotals | None:
        """Return the sums over tiered storage; None if no rank has rows in slow memory."""
        with self._lock:
            if self._slow is None:
                return None
            wait, seconds = self._recent
            return SlowMemoryTotals(
                self._slow_by_table.copy(), self._slow.bytes_read, self._slow.bytes_written, self._slow.seconds,
                float(wait / seconds) if seconds > 0 else math.nan,
            )  # fmt: skip

    def new_generation(self) -> None:
        """Forget the averages of the ranks of the previous topology generation."""
        with self._lock:
            self._ranks.clear()
            self._ids.forget_ranks()

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


MIN_REPORTS = 3
"""Reports of every rank in a block."""
TRIMMED = 0.2
"""Share of a block's steps that is left out at each end: a checkpoint or an evaluation must not decide a block."""


@dataclass
class _Rank:
    version: int = -1
    clean: int = 0
    """Newest reports in a row at this version, without chunks."""
    steps: int = 0
    """Steps reported in all."""
    block: list[tuple[int, float]] = field(default_factory=list)
    """(steps, seconds) of each report in the block."""


class StepBlocks:
    """Collects one block after the other. Thread-safe.

    The first two reports at a placement version are in no block: they contain the steps that applied its chunks, and
    those that follow immediately.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._version = -1
        self._steps = 0

    def begin(self, version: int, steps: int) -> None:
        """Begin a block of at least ``steps`` steps of every rank at a placement version."""
        with self._lock:
            self._version, self._steps = version, steps
            for rank in self._ranks.values():
                rank.block.clear()

    def add(self, rank: int, report: StepReport) -> None:
        """Add the report of a rank."""
        if report.steps < 1:
            return
        with self._lock:
            known = self._ranks.setdefault(rank, _Rank())
            known.steps += report.steps
            if report.apply_seconds > 0 or report.placement.version != known.version:
                known.version, known.clean = report.placement.version, 0
                return
            known.clean += 1
            if known.clean > 1 and report.placement.version == self._version and report.step_seconds > 0:
                known.block.append((report.steps, report.step_seconds))

    def seconds(self, world_size: int) -> float | None:
        """Return the trimmed mean step of the busiest rank in the block; None while it is not complete."""
        with self._lock:
            blocks = [rank.block for rank in self._ranks.values()]
            complete = len(blocks) >= world_size and all(
                len(block) >= MIN_REPORTS and sum(steps for steps, _ in block) >= self._steps for block in blocks
            )
            return max(trimmed_mean(block) for block in blocks) if complete else None

    def steps(self) -> int:
        """Return the steps of the job that were reported since ``clear``."""
        with self._lock:
            return max((rank.steps for rank in self._ranks.values()), default=0)

    def clear(self) -> None:
        """Forget all ranks."""
        with self._lock:
            self._ranks.clear()
            self._version = -1


def trimmed_mean(reports: list[tuple[int, float]]) -> float:
    """Return the mean seconds of a step without the slowest and the fastest ``TRIMMED`` of the steps.

    Args:
        reports: (steps, their seconds).
    """
    steps, seconds = np.array(reports, dtype=np.float64).T
    order = np.argsort(seconds / steps, kind="stable")
    mean, ends = (seconds / steps)[order], np.cumsum(steps[order]) / steps.sum()
    starts = np.concatenate([[0.0], ends[:-1]])
    inside = np.clip(ends, TRIMMED, 1 - TRIMMED) - np.clip(starts, TRIMMED, 1 - TRIMMED)
    return float(np.average(mean, weights=inside))
