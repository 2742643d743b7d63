"""Step reports of the ranks, summed for metrics and averaged for the planner."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flexd.control.protocol.report import StepReport
from flexd.operations.measured_exposure import differs, exposure
from flexd.operations.mistake_totals import MistakeTotals
from flexd.operations.phase_averages import RECENT_STEPS, PhaseAverages, mean_phases
from flexd.operations.step_times import StepTimes
from flexd.operations.traffic_timeline import TrafficTimeline
from flexd.topology.cluster import Exposed

TRAFFIC_KINDS = ("all_to_all", "sync", "migration")
LINKS = ("intra", "inter")


@dataclass(frozen=True)
class RankAverages:
    """One rank as it reported; averages over about ``RECENT_STEPS`` of its newest steps.

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
        exchange, exchange_reason: used after its newest step, and why (``ExchangeReason``).
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
    exchange: str = ""
    exchange_reason: str = ""
    phases: PhaseAverages | None = None

    @staticmethod
    def of(report: StepReport, known: RankAverages | None) -> RankAverages:
        steps = max(1, report.steps)
        weight = 1.0 if known is None else min(1.0, report.steps / RECENT_STEPS)

        def average(total: float, before: float) -> float:
            return before + weight * (total / steps - before)

        intra = report.all_to_all_intra_bytes + report.sync_intra_bytes + report.migration_intra_bytes
        inter = report.all_to_all_inter_bytes + report.sync_inter_bytes + report.migration_inter_bytes
        return RankAverages(
            version=report.placement_version,
            step=report.step,
            accesses_per_step=average(sum(report.accesses_by_tier), known.accesses_per_step if known else 0.0),
            passes_per_step=average(report.passes, known.passes_per_step if known else 0.0),
            replica_accesses_per_step=average(
                sum(report.accesses_by_tier[1:]), known.replica_accesses_per_step if known else 0.0
            ),
            step_seconds=average(report.step_seconds, known.step_seconds if known else 0.0),
            intra_bytes=average(intra, known.intra_bytes if known else 0.0),
            inter_bytes=average(inter, known.inter_bytes if known else 0.0),
            heard_at=time.monotonic(),
            exchange=report.exchange,
            exchange_reason=report.exchange_reason,
            phases=PhaseAverages.of(report, known.phases if known else None),
        )

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


@dataclass(frozen=True)
class TrainingTotals:
    """Measurements of the ranks, summed over ranks since the daemon started.

    Attributes:
        accesses_by_tier: lookups answered from (HOME, NODE, DEVICE) rows.
        sent_bytes: (kind, link) -> bytes; kind of ``TRAFFIC_KINDS``, link of ``LINKS``.
        steps: steps of all ranks.
        step_seconds: their wall time.
        apply_seconds: of which spent in applying chunks.
        newest_step: the newest step that any rank reported.
        unused_prefetches: batches that were located ahead and located again.
        prefetches: batches that were given to be located ahead, those included.
    """

    accesses_by_tier: tuple[int, int, int] = (0, 0, 0)
    sent_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    steps: int = 0
    step_seconds: float = 0.0
    apply_seconds: float = 0.0
    newest_step: int = 0
    unused_prefetches: int = 0
    prefetches: int = 0


class TrainingMonitor:
    """Thread-safe. Totals run since the daemon started; the averages are of the present topology generation.

    Attributes:
        timeline: recent traffic in intervals.
        step_times: step seconds by placement version, of the present topology generation.
        mistakes: of the ranks' trainers, since the daemon started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, RankAverages] = {}
        self._exposed: Exposed | None = None
        self.timeline = TrafficTimeline()
        self.step_times = StepTimes()
        self.mistakes = MistakeTotals()
        self._totals = TrainingTotals(sent_bytes={(kind, link): 0 for kind in TRAFFIC_KINDS for link in LINKS})

    def add(self, rank: int, report: StepReport) -> None:
        """Add one report. A rank's look-ups are summed over tiers and averaged with exponential weights."""
        self.mistakes.add(rank, report.mistakes)
        if report.steps == 0:  # of a mistake alone
            return
        self.timeline.add(report)
        self.step_times.add(rank, report)
        with self._lock:
            self._ranks[rank] = RankAverages.of(report, self._ranks.get(rank))
            old = self._totals
            self._totals = TrainingTotals(
                accesses_by_tier=(
                    old.accesses_by_tier[0] + report.accesses_by_tier[0],
                    old.accesses_by_tier[1] + report.accesses_by_tier[1],
                    old.accesses_by_tier[2] + report.accesses_by_tier[2],
                ),
                sent_bytes={
                    (kind, link): sent + int(getattr(report, f"{kind}_{link}_bytes"))
                    for (kind, link), sent in old.sent_bytes.items()
                },
                steps=old.steps + report.steps,
                step_seconds=old.step_seconds + report.step_seconds,
                apply_seconds=old.apply_seconds + report.apply_seconds,
                newest_step=max(old.newest_step, report.step),
                unused_prefetches=old.unused_prefetches + report.unused_prefetches,
                prefetches=old.prefetches + report.prefetches,
            )

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

    def exposed(self) -> Exposed | None:
        """Return the measured exposure of the communication; None before any rank has reported phases.

        It stays the same until it has changed by more than noise, because plans made at prices
        that differ by noise would move rows to and fro.
        """
        with self._lock:
            phases = mean_phases(rank.phases for rank in self._ranks.values())
            if phases is not None:
                measured = exposure(phases)
                if self._exposed is None or differs(self._exposed, measured):
                    self._exposed = measured
            return self._exposed

    def versions(self) -> dict[int, int]:
        """Return the placement version that each rank reported last."""
        with self._lock:
            return {rank: known.version for rank, known in sorted(self._ranks.items())}

    def totals(self) -> TrainingTotals:
        """Return the sums since the daemon started."""
        with self._lock:
            return self._totals
