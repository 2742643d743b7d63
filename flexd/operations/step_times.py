"""Wall time of training steps by placement version, from the reports of the ranks: in windows, and in blocks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from flexd.control.protocol.report import StepReport

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
            if report.apply_seconds > 0 or report.placement_version != known.version:
                known.version, known.clean = report.placement_version, 0
                return
            known.clean += 1
            if known.clean > 1 and report.placement_version == self._version and report.step_seconds > 0:
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
WINDOW_STEPS = 1_000
"""Steps of a rank after which older ones are forgotten: a version's figures cover one to two windows."""


@dataclass(frozen=True)
class StepSeconds:
    """Wall time of the steps at one placement version.

    Attributes:
        mean_seconds: mean of the steps of all ranks.
        spread_seconds: standard deviation of one step, estimated from reports that cover several steps each; NaN with
            fewer than two reports.
        steps: steps of the job that were measured.
    """

    mean_seconds: float
    spread_seconds: float
    steps: int

    @property
    def error_seconds(self) -> float:
        """Standard error of the mean; NaN if the spread is not known.

        All ranks take part in each step, so steps of several ranks are not independent measurements.
        """
        return self.spread_seconds / math.sqrt(self.steps) if self.steps else math.nan


@dataclass
class _Window:
    ranks: set[int] = field(default_factory=set)
    reports: int = 0
    steps: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    """Sum over reports of steps * (mean seconds of a step)^2."""

    def add(self, rank: int, steps: int, seconds: float) -> None:
        self.ranks.add(rank)
        self.reports += 1
        self.steps += steps
        self.seconds += seconds
        self.squares += seconds * seconds / steps

    @property
    def steps_of_a_rank(self) -> int:
        return round(self.steps / max(1, len(self.ranks)))


class StepTimes:
    """Steps that applied a chunk, or that are reported together with one that did, do not count. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[int, list[_Window]] = OrderedDict()
        """By placement version: the present window, and the one before it if there is one."""
        self._reported: dict[int, int] = {}
        """Placement version that each rank reported last."""

    def add(self, rank: int, report: StepReport) -> None:
        """Add one report of a rank."""
        with self._lock:
            before = self._reported.get(rank)
            version = self._reported[rank] = report.placement_version
            if report.steps <= 0 or report.step_seconds <= 0 or report.apply_seconds > 0 or before != version:
                return
            windows = self._versions.setdefault(version, [_Window()])
            if windows[0].steps_of_a_rank >= WINDOW_STEPS:
                windows[:] = [_Window(), windows[0]]
            windows[0].add(rank, report.steps, report.step_seconds)
            while len(self._versions) > MAX_VERSIONS:
                self._versions.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: other ranks train now, or versions count anew."""
        with self._lock:
            self._versions.clear()
            self._reported.clear()

    def at_version(self, version: int) -> StepSeconds | None:
        """Return the newest step times at a placement version; None if no step was measured there."""
        with self._lock:
            windows = self._versions.get(version)
            if not windows:
                return None
            steps = sum(window.steps for window in windows)
            reports = sum(window.reports for window in windows)
            mean = sum(window.seconds for window in windows) / steps
            deviation = max(0.0, sum(window.squares for window in windows) - steps * mean * mean)
            spread = math.sqrt(deviation / (reports - 1)) if reports > 1 else math.nan
            return StepSeconds(mean, spread, max(1, sum(window.steps_of_a_rank for window in windows)))
