"""Pace migrations by the ranks' step times: set the throttle so that training does not slow down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from flexd.config.links import ControlConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.pace import PaceController, PaceSettings, PaceState, StepTimes, StepWindow
from flexd.control.daemon.throttle import PaceLimit, Throttle, ThrottleLimits, ThrottleSnapshot
from flexd.control.protocol.report import StepReport

logger = logging.getLogger(__name__)

BASELINE_REPORTS = 512
"""Newest step reports without a migration that make up the baseline."""
MIN_REPORTS = 8
"""Smallest number of reports for a baseline or a decision; at least two per rank are needed as well."""
TOLERANCE = 0.1
"""Allowed slowdown of p50 and p90 of the step time, as a share."""
FLOOR_BYTES_PER_STEP = 16 * 2**10
"""Lower limit of the speed, except during pauses."""
PAUSE_SECONDS = 5.0
"""Length of the first pause when steps are too slow at the floor; each further pause is twice as long."""
LONGEST_PAUSE = 16
"""Longest pause, as a multiple of the first."""
_INCREASES = 16
"""Number of increases from floor to ceiling."""


@dataclass(frozen=True)
class PacingSnapshot:
    """The throttle and its controller at one moment.

    Attributes:
        limits: limits that were requested.
        adaptive: whether the controller may lower them.
        bytes_per_step: limit in effect; None leaves it to the ranks.
        state: state of the controller; None if it is not adaptive.
        why: reason of the controller's newest decision; empty if it is not adaptive.
        throttle: counters of the throttle.
        baseline: step times without a migration; None if not known.
        recent: step times while chunks were applied; None if not known.
        slowed: decisions to slow down since the start.
        sped: decisions to speed up since the start.
        pauses: decisions to pause since the start.
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


class MigrationChannel(Protocol):
    """The part of the coordinator that pacing observes."""

    @property
    def outstanding_chunks(self) -> int:
        """Chunks that were pushed and not yet applied by every rank."""
        ...

    def live(self) -> LiveTopology | None: ...


class MigrationPacing:
    """Sets the throttle's pace from step reports. Thread-safe.

    A report belongs to the baseline if it spent no time applying chunks and no chunk is outstanding, and to the recent
    reports otherwise. A decision needs at least one report that applied chunks: without one, slow steps have another
    cause.

    Args:
        channel: the coordinator.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: ControlConfig,
        throttle: Throttle,
        channel: MigrationChannel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._throttle = throttle
        self._channel = channel
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
        ceiling = self._throttle.limits.bytes_per_step or self._settings.chunk_bytes
        floor = min(FLOOR_BYTES_PER_STEP, ceiling)
        return PaceSettings(
            TOLERANCE, floor, ceiling, max(1, (ceiling - floor) // _INCREASES), PAUSE_SECONDS,
            LONGEST_PAUSE * PAUSE_SECONDS,
        )  # fmt: skip

    def add(self, report: StepReport) -> None:
        """Add the report of a rank, and decide once there are enough. Called in the coordinator's thread."""
        if report.steps < 1:
            return
        with self._lock:
            moving = self._channel.outstanding_chunks > 0
            seconds = report.step_seconds / report.steps
            if report.apply_seconds > 0 or moving:
                self._recent.add(seconds, report.steps)
                self._recent_applied |= report.apply_seconds > 0
            else:
                self._baseline.add(seconds, report.steps)
            if self._adaptive:
                self._decide()

    def _decide(self) -> None:
        before, enough = self._controller.reason, max(MIN_REPORTS, 2 * self._world_size())
        if len(self._recent) >= enough and self._recent_applied:
            baseline, recent = self._baseline.times(), self._recent.times()
            if baseline is not None and recent is not None and baseline.reports >= enough:
                self._controller.judge(recent, baseline, self._clock())
                if self._controller.state is PaceState.PAUSED:
                    # The steps of the pause show whether the migration was the cause.
                    self._baseline.clear()
            self._judged = recent
            self._recent.clear()
            self._recent_applied = False
        self._controller.update(self._clock(), measured=len(self._baseline) >= enough)
        self._set_pace()
        if self._controller.reason != before:
            logger.info("throttle: %s, %d bytes a step", self._controller.reason, self._controller.bytes_per_step)

    def _world_size(self) -> int:
        live = self._channel.live()
        return 1 if live is None else live.layout.world_size

    def _set_pace(self) -> None:
        if not self._adaptive:
            self._throttle.set_pace(PaceLimit())
            return
        running = self._controller.state is PaceState.RUNNING
        self._throttle.set_pace(PaceLimit(self._controller.bytes_per_step, paused=not running))

    def set_generation(self, generation: int) -> None:
        """Start over for another topology generation, whose steps take another time."""
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
        """Use other limits from the next chunk on, also of a running migration."""
        with self._lock:
            self._throttle.set_limits(limits)
            if adaptive and not self._adaptive:
                self._controller.reset()
            self._adaptive = adaptive
            self._controller.apply_settings(self._pace_settings())
            self._set_pace()

    def apply_config(self, settings: ControlConfig) -> None:
        """Use another configuration. Its limits replace requested ones only if they differ from the previous file's."""
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
    """Return ``limits`` with the given ones replaced: None keeps a limit, 0 removes it."""
    if bytes_per_step is not None:
        limits = replace(limits, bytes_per_step=bytes_per_step or None)
    if bytes_per_second is not None:
        limits = replace(limits, bytes_per_second=bytes_per_second or None)
    return limits
