"""Wall time of training steps, from the reports of the ranks: by phase, by placement version, and in blocks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.migration import Migration, MigrationEvent
from flexd.control.daemon.migration_record import MigrationRecord, TransitionEvent
from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport
from flexd.topology.cluster import Cluster, Exposed

_SHARE_CHANGE, _COVER_CHANGE = 0.05, 0.1
"""Smaller changes are noise; plans made at other prices are hard to compare."""


def exposure(phases: PhaseAverages) -> Exposed:
    """Return the share of each part of the communication that did not run beside the training thread, and the compute
    that can cover the rest. Without collectives of a part its share is that of the whole."""
    communication = phases.quantity("intra_seconds") + phases.quantity("inter_seconds")
    overlapped = phases.quantity("overlapped_seconds")

    def share(*of: StepPhase) -> float | None:
        numbers = [PHASES[phase] for phase in of]
        total = float(communication[numbers].sum())
        return None if total <= 0 else min(1.0, max(0.0, 1.0 - float(overlapped[numbers].sum()) / total))

    whole = share(StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH, StepPhase.SYNC)
    parts = (share(StepPhase.IDS, StepPhase.ROWS), share(StepPhase.PUSH), share(StepPhase.SYNC))
    forward, backward, sync = (part if part is not None else whole if whole is not None else 1.0 for part in parts)
    return Exposed(forward, backward, sync, max(0.0, phases.cover_seconds))


def min_share(exposed: Exposed) -> float:
    return min(exposed.forward, exposed.backward, exposed.sync)


def differs(known: Exposed, measured: Exposed) -> bool:
    """Return whether prices change by more than noise."""
    shares = zip(
        (known.forward, known.backward, known.sync), (measured.forward, measured.backward, measured.sync), strict=True
    )
    if any(abs(a - b) > _SHARE_CHANGE for a, b in shares):
        return True
    hidden = min_share(measured) < 1.0
    larger = max(known.cover_seconds, measured.cover_seconds)
    return hidden and (math.isinf(larger) or abs(known.cover_seconds - measured.cover_seconds) > _COVER_CHANGE * larger)


def priced_by(cluster: Cluster, measured: Exposed | None) -> Cluster:
    """Return the cluster with measured exposure instead of that of its file, named in its name."""
    if measured is None or (min_share(measured) >= 1.0 and min_share(cluster.exposed) >= 1.0):
        return cluster
    shares = (measured.forward, measured.backward, measured.sync)
    if min_share(measured) >= 1.0:
        message = "nothing runs beside compute"
    else:
        of_shares = ", ".join(
            f"{name} {share:.2f}" for name, share in zip(("forward", "backward", "sync"), shares, strict=True)
        )
        message = f"outside compute {of_shares}; {1e3 * measured.cover_seconds:.3g} ms cover the rest"
    return cluster.with_exposed(measured, f"{cluster.name} (measured: {message})")


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


MAX_VERSIONS = 256
"""Placement versions whose step times are kept: the newest."""
RECENT_STEPS = 1_000
"""Steps of a rank after which those so far weigh half, so that a version's figures follow its newest steps."""


@dataclass
class _Sums:
    ranks: set[int] = field(default_factory=set)
    reports: float = 0
    steps: float = 0
    seconds: float = 0.0
    squares: float = 0.0
    """Sum over reports of steps * (mean seconds of a step)^2."""

    @property
    def steps_of_a_rank(self) -> float:
        return self.steps / max(1, len(self.ranks))


class StepTimes:
    """Steps that applied a chunk, or that are reported together with one that did, do not count. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[int, _Sums] = OrderedDict()
        """By placement version."""
        self._reported: dict[int, int] = {}
        """Placement version that each rank reported last."""

    def add(self, rank: int, report: StepReport) -> None:
        """Add one report of a rank."""
        with self._lock:
            before = self._reported.get(rank)
            version = self._reported[rank] = report.placement.version
            if report.steps <= 0 or report.step_seconds <= 0 or report.apply_seconds > 0 or before != version:
                return
            sums = self._versions.setdefault(version, _Sums())
            if sums.steps_of_a_rank >= RECENT_STEPS:
                sums = self._versions[version] = _Sums(
                    sums.ranks, sums.reports / 2, sums.steps / 2, sums.seconds / 2, sums.squares / 2
                )
            sums.ranks.add(rank)
            sums.reports += 1
            sums.steps += report.steps
            sums.seconds += report.step_seconds
            sums.squares += report.step_seconds**2 / report.steps
            while len(self._versions) > MAX_VERSIONS:
                self._versions.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: other ranks train now, or versions count anew."""
        with self._lock:
            self._versions.clear()
            self._reported.clear()

    def at_version(self, version: int) -> tuple[float, float] | None:
        """Return mean and standard error of a step's seconds at a placement version; None if none was measured there.

        The error is NaN with fewer than two reports. All ranks take part in each step, so steps of several ranks are
        not independent measurements.
        """
        with self._lock:
            sums = self._versions.get(version)
            if sums is None:
                return None
            mean = sums.seconds / sums.steps
            deviation = max(0.0, sums.squares - sums.steps * mean * mean)
            spread = math.sqrt(deviation / (sums.reports - 1)) if sums.reports > 1 else math.nan
            return mean, spread / math.sqrt(max(1.0, sums.steps_of_a_rank))


class EffectRecorder:
    """Records the measured saving of each migration before the next one changes the placement. Thread-safe.

    A migration that pushes no chunk leaves the placement as it is, and the one before it goes on being measured.

    Args:
        times: step times of the present topology generation.
        record: receives the record of the migration; must not block.
    """

    def __init__(self, times: StepTimes, record: Callable[[MigrationRecord], None]) -> None:
        self._times = times
        self._record = record
        self._lock = threading.Lock()
        self._measured: Migration | None = None
        """The newest migration that pushed a chunk, as of the newest start."""
        self._started: Migration | None = None

    def on_migration(self, event: MigrationEvent) -> None:
        """Record the saving of the migration before one that starts."""
        if event.transition is None or event.transition.event is not TransitionEvent.START:
            return
        self.store()
        with self._lock:
            self._measured, self._started = self._newest(), event.migration

    def end_generation(self) -> None:
        """Record the saving of the newest migration: other ranks train from now on, and their steps do not count."""
        self.store()
        with self._lock:
            self._measured = self._started = None

    def store(self) -> None:
        """Record the saving of the newest migration, if it is measured."""
        with self._lock:
            migration = self._newest()
        measured = None if migration is None else self.add_to(migration.record)
        if measured is not None and measured.measured_saving_seconds is not None:
            self._record(measured)

    def add_to(self, record: MigrationRecord) -> MigrationRecord:
        """Return the record with its saving as measured by now, if it is of the newest migration that moved rows."""
        with self._lock:
            newest = self._newest()
        if newest is None or newest.migration_id != record.migration_id or not newest.done:
            return record
        before, after = (self._times.at_version(at) for at in (record.base_version, record.last_version))
        if before is None or after is None:
            return record
        error = math.hypot(before[1], after[1])
        saving = {
            "measured_saving_seconds": before[0] - after[0],
            "measured_error_seconds": error if math.isfinite(error) else None,
        }
        return record.model_copy(update=saving)

    def _newest(self) -> Migration | None:
        started = self._started
        return started if started is not None and started.record.chunks_pushed else self._measured
