"""Blocks of training steps at one placement version, from the reports of the ranks."""

from __future__ import annotations

import threading
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
