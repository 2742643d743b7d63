"""How fast a migration may go without hurting training: additive increase, multiplicative decrease on step times.

::

    MEASURING --baseline known--> RUNNING --hurt at the floor--> PAUSED
        ^                          |  ^                            |
        |                          |  `------ pause is over -------'
        `--- other ranks ----------'

In RUNNING the bytes a step are halved when steps are slower than the baseline allows, and grow by a fixed amount when
they are not. In PAUSED nothing is released, so the steps of that time tell whether the migration was to blame: they
become the baseline. Each pause is twice as long as the last until a judgement finds steps as they should be, so a
migration that always hurts hurts ever less, and still ends.
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
        """Of (mean seconds of a step, steps) pairs; None without any step."""
        pairs = np.array([pair for pair in reports if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
        if len(pairs) == 0:
            return None
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        share = np.cumsum(pairs[:, 1]) / pairs[:, 1].sum()
        p50, p90 = (float(pairs[min(int(np.searchsorted(share, q)), len(pairs) - 1), 0]) for q in (0.5, 0.9))
        return StepTimes(p50, p90, len(pairs))

    def slower_than(self, baseline: StepTimes, tolerance: float) -> str:
        """Which quantile is beyond ``baseline`` x (1 + ``tolerance``), in words; empty if none is."""
        for name in ("p50", "p90"):
            now, then = getattr(self, f"{name}_seconds"), getattr(baseline, f"{name}_seconds")
            if now > then * (1 + tolerance):
                return f"{name} of a step is {now * 1e3:.3g} ms, {now / then:.2f} times the {then * 1e3:.3g} ms without"
        return ""


@dataclass(frozen=True)
class PaceSettings:
    """Of the controller.

    Attributes:
        tolerance: how much slower a step may get, as a share of the baseline.
        floor_bytes, ceiling_bytes: bounds of the bytes a step.
        increase_bytes: added by each good judgement.
        first_pause_seconds, longest_pause_seconds: of the pauses at the floor.

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
    """The decision alone: no threads, no clock.

    Attributes:
        bytes_per_step: allowed now, while ``RUNNING``.
        reason: of the newest decision, in words.
        slowed, sped, pauses: decisions by kind since the start.
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
        """Other ranks: what was learned of the old ones no longer holds."""
        self._start()

    def apply_settings(self, settings: PaceSettings) -> None:
        """Other settings; the pace goes on, within them."""
        self.settings = settings
        self.bytes_per_step = min(max(self.bytes_per_step, settings.floor_bytes), settings.ceiling_bytes)
        self._pause_seconds = min(
            max(self._pause_seconds, settings.first_pause_seconds), settings.longest_pause_seconds
        )

    def judge(self, recent: StepTimes, baseline: StepTimes, now_seconds: float) -> None:
        """While ``RUNNING``: steps during which chunks were applied, against those without."""
        if self.state is not PaceState.RUNNING:
            return
        settings = self.settings
        hurt = recent.slower_than(baseline, settings.tolerance)
        if not hurt:
            if self.bytes_per_step < settings.ceiling_bytes:
                self.sped += 1
            self.bytes_per_step = min(settings.ceiling_bytes, self.bytes_per_step + settings.increase_bytes)
            self._pause_seconds = settings.first_pause_seconds
            self.reason = "steps are as fast as without"
            return
        if self.bytes_per_step > settings.floor_bytes:
            self.slowed += 1
            self.bytes_per_step = max(settings.floor_bytes, self.bytes_per_step // 2)
            self.reason = f"slowed: {hurt}"
            return
        self.state = PaceState.PAUSED
        self.pauses += 1
        self.reason = f"paused for {self._pause_seconds:g} s, at the floor already: {hurt}"
        self._until_seconds = now_seconds + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, self.settings.longest_pause_seconds)

    def update(self, now_seconds: float, *, measured: bool) -> None:
        """Leaves ``MEASURING`` when there is a baseline, and ``PAUSED`` when the pause is over and has given one."""
        if self.state is PaceState.MEASURING and measured:
            self.state, self.reason = PaceState.RUNNING, "begins"
        elif self.state is PaceState.PAUSED and now_seconds >= self._until_seconds and measured:
            self.state, self.reason = PaceState.RUNNING, "tries again at the floor"


class StepWindow:
    """The newest step times of one kind, bounded.

    Args:
        reports: kept, the newest.
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
