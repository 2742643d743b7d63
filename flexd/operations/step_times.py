"""Wall time of training steps, from the reports of the ranks: by phase, by placement version, and in blocks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport

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
