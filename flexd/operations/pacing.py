"""Migrations no faster than training bears: listens to the ranks' step times and sets the throttle's pace."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from flexd.config.links import ControlConfig
from flexd.control.daemon.pace import PaceController, PaceSettings, PaceState, StepTimes, StepWindow
from flexd.control.daemon.throttle import PaceLimit, Throttle, ThrottleLimits, ThrottleSnapshot
from flexd.control.protocol.report import StepReport

logger = logging.getLogger(__name__)

BASELINE_REPORTS = 512
"""Step reports without a migration that the baseline is made of, the newest."""
LEAST_REPORTS = 8
"""Of which a baseline or a judgement is made, and two of each rank."""
LONGEST_PAUSE = 16
"""In first pauses."""
_INCREASES = 16
"""From floor to ceiling."""


@dataclass(frozen=True)
class PacingSnapshot:
    """The throttle and its controller at one moment.

    Attributes:
        limits: as asked for.
        adaptive: whether the controller has a say.
        bytes_per_step: in effect now; None: as much as the ranks apply.
        state, why: of the controller, None and empty if it has no say.
        baseline, recent: step times without a migration, and while chunks were applied last; None if not known.
        slowed, sped, pauses: its decisions since the start.
    """

    limits: ThrottleLimits
    adaptive: bool
    bytes_per_step: int | None
    state: PaceState | None
    why: str
    throttle: ThrottleSnapshot
    baseline: StepTimes | None
    recent: StepTimes | None
    slowed: int
    sped: int
    pauses: int


class MigrationPacing:
    """Thread-safe.

    A report is of the baseline if it spent no time in applying chunks and none is on its way. It is judged if chunks
    are on their way; a judgement needs at least one report that applied some, else the slowness is not theirs.

    Args:
        outstanding: chunks on their way to the ranks, now.
        world_size: of the live ranks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: ControlConfig,
        throttle: Throttle,
        outstanding: Callable[[], int],
        world_size: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._throttle = throttle
        self._outstanding = outstanding
        self._world_size = world_size
        self._clock = clock
        self._lock = threading.Lock()
        self._adaptive = settings.throttle.adaptive
        self._baseline = StepWindow(BASELINE_REPORTS)
        self._recent = StepWindow(BASELINE_REPORTS)
        self._recent_applied = False
        self._generation = 0
        self._judged: StepTimes | None = None
        self._controller = PaceController(self._pace_settings())
        self._set_pace()

    def _pace_settings(self) -> PaceSettings:
        throttle = self._settings.throttle
        ceiling = self._throttle.limits.bytes_per_step or self._settings.chunk_bytes
        floor = min(throttle.floor_bytes_per_step, ceiling)
        return PaceSettings(
            throttle.tolerance, floor, ceiling, max(1, (ceiling - floor) // _INCREASES), throttle.pause_seconds,
            LONGEST_PAUSE * throttle.pause_seconds,
        )  # fmt: skip

    def add(self, report: StepReport) -> None:
        """Takes the report of a rank in, and decides when there are enough of them. In the coordinator's thread."""
        if report.steps < 1:
            return
        with self._lock:
            moving = self._outstanding() > 0
            seconds = report.step_seconds / report.steps
            if report.apply_seconds > 0 or moving:
                self._recent.add(seconds, report.steps)
                self._recent_applied |= report.apply_seconds > 0
            else:
                self._baseline.add(seconds, report.steps)
            if self._adaptive:
                self._decide()

    def _decide(self) -> None:
        before, enough = self._controller.reason, max(LEAST_REPORTS, 2 * self._world_size())
        if len(self._recent) >= enough and self._recent_applied:
            baseline, recent = self._baseline.times(), self._recent.times()
            if baseline is not None and recent is not None and baseline.reports >= enough:
                self._controller.judge(recent, baseline, self._clock())
                if self._controller.state is PaceState.PAUSED:
                    # What is measured while nothing moves tells whether the migration was to blame.
                    self._baseline.clear()
            self._judged = recent
            self._recent.clear()
            self._recent_applied = False
        self._controller.update(self._clock(), measured=len(self._baseline) >= enough)
        self._set_pace()
        if self._controller.reason != before:
            logger.info("throttle: %s, %d bytes a step", self._controller.reason, self._controller.bytes_per_step)

    def _set_pace(self) -> None:
        if not self._adaptive:
            self._throttle.set_pace(PaceLimit())
            return
        running = self._controller.state is PaceState.RUNNING
        self._throttle.set_pace(PaceLimit(self._controller.bytes_per_step, paused=not running))

    def set_generation(self, generation: int) -> None:
        """Which topology generation is live. Steps of other ranks take another time."""
        with self._lock:
            if generation == self._generation:
                return
            self._generation = generation
            self._baseline.clear()
            self._recent.clear()
            self._recent_applied = False
            self._judged = None
            self._controller.reset()
            self._set_pace()

    def set_limits(self, limits: ThrottleLimits, adaptive: bool) -> None:
        """Other limits from the next chunk on, whether a migration runs or not."""
        with self._lock:
            self._throttle.set_limits(limits)
            if adaptive and not self._adaptive:
                self._controller.reset()
            self._adaptive = adaptive
            self._controller.apply_settings(self._pace_settings())
            self._set_pace()

    def apply_config(self, settings: ControlConfig) -> None:
        """Another configuration: its limits, if they are other ones than before, replace what was asked for since."""
        before, self._settings = self._settings.throttle, settings
        throttle = settings.throttle
        if throttle == before:
            self.set_limits(self.limits, self._adaptive)
        else:
            self.set_limits(ThrottleLimits(throttle.bytes_per_step, throttle.bytes_per_second), throttle.adaptive)

    @property
    def limits(self) -> ThrottleLimits:
        return self._throttle.limits

    @property
    def adaptive(self) -> bool:
        return self._adaptive

    def snapshot(self) -> PacingSnapshot:
        with self._lock:
            controller = self._controller
            return PacingSnapshot(
                limits=self._throttle.limits,
                adaptive=self._adaptive,
                bytes_per_step=self._throttle.bytes_per_step,
                state=controller.state if self._adaptive else None,
                why=controller.reason if self._adaptive else "",
                throttle=self._throttle.snapshot(),
                baseline=self._baseline.times(),
                recent=self._judged,
                slowed=controller.slowed,
                sped=controller.sped,
                pauses=controller.pauses,
            )


def merge_limits(limits: ThrottleLimits, bytes_per_step: int | None, bytes_per_second: int | None) -> ThrottleLimits:
    """``limits`` with the given ones replaced: None keeps one, 0 lifts it."""
    if bytes_per_step is not None:
        limits = replace(limits, bytes_per_step=bytes_per_step or None)
    if bytes_per_second is not None:
        limits = replace(limits, bytes_per_second=bytes_per_second or None)
    return limits
