"""Control of a migration's pace by step times: additive increase, multiplicative decrease.

::

    MEASURING --baseline known--> RUNNING --slow at the floor-> PAUSED
        ^                          |  ^                            |
        |                          |  `------ pause is over -------'
        `--- other ranks ----------'

In RUNNING the bytes a step are halved when steps are slower than the baseline allows, and grow by a fixed amount when
they are not. In PAUSED nothing is released, so the steps of that time show whether the migration caused the slowdown:
they become the baseline. Each pause is twice as long as the last until steps are as fast as the baseline, so a
migration that always slows training slows it ever less, and still ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from flexd.core.errors import ControlError


@dataclass(frozen=True)
class StepTimes:
    """Quantiles of the seconds of a step, over the reports of all ranks, each weighted by its steps."""

    p50_seconds: float
    p90_seconds: float
    reports: int

    @staticmethod
    def of(reports: Iterable[tuple[float, int]]) -> StepTimes | None:
        """Compute the quantiles of (mean seconds of a step, steps) pairs; None without any step."""
        pairs = np.array([pair for pair in reports if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
        if len(pairs) == 0:
            return None
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        share = np.cumsum(pairs[:, 1]) / pairs[:, 1].sum()
        p50, p90 = (float(pairs[min(int(np.searchsorted(share, q)), len(pairs) - 1), 0]) for q in (0.5, 0.9))
        return StepTimes(p50, p90, len(pairs))

    def slower_than(self, baseline: StepTimes, tolerance: float) -> str:
        """Describe the quantile that exceeds ``baseline`` x (1 + ``tolerance``); empty if none does."""
        for name in ("p50", "p90"):
            now, then = getattr(self, f"{name}_seconds"), getattr(baseline, f"{name}_seconds")
            if now > then * (1 + tolerance):
                return f"{name} of a step is {now * 1e3:.3g} ms, {now / then:.2f} times the {then * 1e3:.3g} ms without"
        return ""


@dataclass(frozen=True)
class PaceSettings:
    """Settings of the controller.

    Attributes:
        tolerance: allowed increase of a step's time, as a share of the baseline.
        floor_bytes, ceiling_bytes: bounds of the bytes a step.
        increase_bytes: added each time that steps are as fast as the baseline.
        first_pause_seconds, longest_pause_seconds: bounds of the pauses at the floor.

    Raises:
        ControlError: the numbers contradict each other.
    """

    tolerance: float
    floor_bytes: int
    ceiling_bytes: int
    increase_bytes: int
    first_pause_seconds: float = 5.0
    longest_pause_seconds: float = 80.0

    def __post_init__(self) -> None:
        if not (1 <= self.floor_bytes <= self.ceiling_bytes and self.increase_bytes >= 1 and self.tolerance >= 0):
            raise ControlError(
                f"a pace of {self.floor_bytes} to {self.ceiling_bytes} bytes a step in steps of {self.increase_bytes}",
                remedy="the floor is at least 1 and at most the ceiling",
            )
        if not 0 < self.first_pause_seconds <= self.longest_pause_seconds:
            raise ControlError(f"pauses of {self.first_pause_seconds:g} to {self.longest_pause_seconds:g} seconds")


class PaceState(Enum):
    MEASURING = "measuring"
    RUNNING = "running"
    PAUSED = "paused"


class PaceController:
    """Decides on the limit from given times, without threads or a clock.

    Attributes:
        bytes_per_step: the limit while ``RUNNING``.
        reason: of the newest decision, in words.
        slowed, sped, pauses: number of decisions by kind since the start.
    """

    def __init__(self, settings: PaceSettings) -> None:
        self.settings = settings
        self.slowed = self.sped = self.pauses = 0
        self._start()

    def _start(self) -> None:
        settings = self.settings
        self.state = PaceState.MEASURING
        self.bytes_per_step = max(settings.floor_bytes, settings.ceiling_bytes // 4)
        self.reason = "measuring the steps without a migration"
        self._pause_seconds = settings.first_pause_seconds
        self._until_seconds = 0.0

    def reset(self) -> None:
        """Start over for other ranks, whose step times are not known yet."""
        self._start()

    def apply_settings(self, settings: PaceSettings) -> None:
        """Change the settings; the pace continues within them."""
        self.settings = settings
        self.bytes_per_step = min(max(self.bytes_per_step, settings.floor_bytes), settings.ceiling_bytes)
        self._pause_seconds = min(
            max(self._pause_seconds, settings.first_pause_seconds), settings.longest_pause_seconds
        )

    def judge(self, recent: StepTimes, baseline: StepTimes, now_seconds: float) -> None:
        """Compare steps that applied chunks with those that did not, while ``RUNNING``, and adjust the pace."""
        if self.state is not PaceState.RUNNING:
            return
        settings = self.settings
        slower = recent.slower_than(baseline, settings.tolerance)
        if not slower:
            if self.bytes_per_step < settings.ceiling_bytes:
                self.sped += 1
            self.bytes_per_step = min(settings.ceiling_bytes, self.bytes_per_step + settings.increase_bytes)
            self._pause_seconds = settings.first_pause_seconds
            self.reason = "steps are as fast as without"
            return
        if self.bytes_per_step > settings.floor_bytes:
            self.slowed += 1
            self.bytes_per_step = max(settings.floor_bytes, self.bytes_per_step // 2)
            self.reason = f"slowed: {slower}"
            return
        self.state = PaceState.PAUSED
        self.pauses += 1
        self.reason = f"paused for {self._pause_seconds:g} s, at the floor already: {slower}"
        self._until_seconds = now_seconds + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, self.settings.longest_pause_seconds)

    def update(self, now_seconds: float, *, measured: bool) -> None:
        """Leave ``MEASURING`` once there is a baseline, and ``PAUSED`` once the pause is over and has given one."""
        if self.state is PaceState.MEASURING and measured:
            self.state, self.reason = PaceState.RUNNING, "begins"
        elif self.state is PaceState.PAUSED and now_seconds >= self._until_seconds and measured:
            self.state, self.reason = PaceState.RUNNING, "tries again at the floor"


class StepWindow:
    """The newest step times of one kind.

    Args:
        reports: number of reports kept.
    """

    def __init__(self, reports: int) -> None:
        self._pairs: deque[tuple[float, int]] = deque(maxlen=reports)

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, seconds_per_step: float, steps: int) -> None:
        self._pairs.append((seconds_per_step, steps))

    def clear(self) -> None:
        self._pairs.clear()

    def times(self) -> StepTimes | None:
        return StepTimes.of(self._pairs)
