"""Pace migrations by the ranks' step times: additive increase, multiplicative decrease of the bytes per step.

::

    MEASURING --baseline known--> RUNNING --slow at the floor-> PAUSED
        ^                          |  ^                            |
        |                          |  `------ pause is over -------'
        `--- other ranks ----------'

In RUNNING the bytes per step are halved when steps are slower than the baseline allows, and grow by a fixed amount when
they are not. In PAUSED nothing is released, so the steps of that time show whether the migration caused the slowdown:
they become the baseline. Each pause is twice as long as the last until steps are as fast as the baseline, so a
migration that always slows training slows it ever less, and still ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from flexd.config.links import ControlConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.throttle import PaceLimit, Throttle, ThrottleLimits, ThrottleSnapshot
from flexd.control.protocol.report import StepReport
from flexd.core.backoff import Backoff

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
class StepQuantiles:
    """Quantiles of the seconds of a step, over the reports of all ranks, each weighted by its steps."""

    p50_seconds: float
    p90_seconds: float
    reports: int

    @staticmethod
    def of(reports: Iterable[tuple[float, int]]) -> StepQuantiles | None:
        """Compute the quantiles of (mean seconds of a step, steps) pairs; None without any step."""
        pairs = np.array([pair for pair in reports if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
        if len(pairs) == 0:
            return None
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        share = np.cumsum(pairs[:, 1]) / pairs[:, 1].sum()
        p50, p90 = (float(pairs[min(int(np.searchsorted(share, q)), len(pairs) - 1), 0]) for q in (0.5, 0.9))
        return StepQuantiles(p50, p90, len(pairs))

    def slower_than(self, baseline: StepQuantiles, tolerance: float) -> str:
        """Describe the quantile that exceeds ``baseline`` x (1 + ``tolerance``); empty if none does."""
        for name in ("p50", "p90"):
            now, then = getattr(self, f"{name}_seconds"), getattr(baseline, f"{name}_seconds")
            if now > then * (1 + tolerance):
                return f"{name} of a step is {now * 1e3:.3g} ms, {now / then:.2f} times the {then * 1e3:.3g} ms without"
        return ""


class PaceState(Enum):
    MEASURING = "measuring"
    RUNNING = "running"
    PAUSED = "paused"


class PaceController:
    """Decides on the limit from given times, without threads or a clock.

    Args:
        floor_bytes, ceiling_bytes: bounds of the bytes per step.

    Attributes:
        bytes_per_step: the limit while ``RUNNING``.
        reason: of the newest decision, in words.
        slowed, sped, pauses: number of decisions by kind since the start.
    """

    def __init__(self, floor_bytes: int, ceiling_bytes: int) -> None:
        self.floor_bytes, self.ceiling_bytes = floor_bytes, ceiling_bytes
        self.slowed = self.sped = self.pauses = 0
        self._start()

    def _start(self) -> None:
        self.state = PaceState.MEASURING
        self.bytes_per_step = max(self.floor_bytes, self.ceiling_bytes // 4)
        self.reason = "measuring the steps without a migration"
        self._pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE * PAUSE_SECONDS)
        self._until_seconds = 0.0

    def reset(self) -> None:
        """Start over for other ranks, whose step times are not known yet."""
        self._start()

    @property
    def increase_bytes(self) -> int:
        """Bytes added each time that steps are as fast as the baseline."""
        return max(1, (self.ceiling_bytes - self.floor_bytes) // _INCREASES)

    def set_bounds(self, floor_bytes: int, ceiling_bytes: int) -> None:
        """Change the bounds; the pace continues within them."""
        self.floor_bytes, self.ceiling_bytes = floor_bytes, ceiling_bytes
        self.bytes_per_step = min(max(self.bytes_per_step, floor_bytes), ceiling_bytes)

    def judge(self, recent: StepQuantiles, baseline: StepQuantiles, now_seconds: float) -> None:
        """Compare steps that applied chunks with those that did not, while ``RUNNING``, and adjust the pace."""
        if self.state is not PaceState.RUNNING:
            return
        slower = recent.slower_than(baseline, TOLERANCE)
        if not slower:
            if self.bytes_per_step < self.ceiling_bytes:
                self.sped += 1
            self.bytes_per_step = min(self.ceiling_bytes, self.bytes_per_step + self.increase_bytes)
            self._pauses.reset()
            self.reason = "steps are as fast as without"
            return
        if self.bytes_per_step > self.floor_bytes:
            self.slowed += 1
            self.bytes_per_step = max(self.floor_bytes, self.bytes_per_step // 2)
            self.reason = f"slowed: {slower}"
            return
        self.state = PaceState.PAUSED
        self.pauses += 1
        seconds = self._pauses.seconds()
        self.reason = f"paused for {seconds:g} s, at the floor already: {slower}"
        self._until_seconds = now_seconds + seconds

    def update(self, now_seconds: float, *, measured: bool) -> None:
        """Leave ``MEASURING`` once there is a baseline, and ``PAUSED`` once the pause is over and has given one."""
        if self.state is PaceState.MEASURING and measured:
            self.state, self.reason = PaceState.RUNNING, "begins"
        elif self.state is PaceState.PAUSED and now_seconds >= self._until_seconds and measured:
            self.state, self.reason = PaceState.RUNNING, "tries again at the floor"


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
    baseline: StepQuantiles | None
    recent: StepQuantiles | None
    slowed: int
    sped: int
    pauses: int


class MigrationPacing:
    """Sets the throttle's pace from step reports. Thread-safe.

    A report belongs to the baseline if it spent no time applying chunks and no chunk is outstanding, and to the recent
    reports otherwise. A decision needs at least one report that applied chunks: without one, slow steps have another
    cause.

    Args:
        channel: the coordinator.
        clock: monotonic seconds.

    Attributes:
        adaptive: whether the pace follows step times.
    """

    def __init__(
        self,
        settings: ControlConfig,
        throttle: Throttle,
        channel: Coordinator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._throttle = throttle
        self._channel = channel
        self._clock = clock
        self._lock = threading.Lock()
        self.adaptive = settings.throttle.adaptive
        self._baseline = deque[tuple[float, int]](maxlen=BASELINE_REPORTS)
        self._recent = deque[tuple[float, int]](maxlen=BASELINE_REPORTS)
        self._recent_applied = False
        self._generation = 0
        self._judged: StepQuantiles | None = None
        self._controller = PaceController(*self._bounds())
        self._set_pace()

    def _bounds(self) -> tuple[int, int]:
        """Return floor and ceiling of the bytes per step."""
        ceiling = self._throttle.limits.bytes_per_step or self._settings.chunk_bytes
        return min(FLOOR_BYTES_PER_STEP, ceiling), ceiling

    def add(self, report: StepReport) -> None:
        """Add the report of a rank, and decide once there are enough. Called in the coordinator's thread."""
        if report.steps < 1:
            return
        with self._lock:
            moving = self._channel.outstanding_chunks > 0
            seconds = report.step_seconds / report.steps
            if report.apply_seconds > 0 or moving:
                self._recent.append((seconds, report.steps))
                self._recent_applied |= report.apply_seconds > 0
            else:
                self._baseline.append((seconds, report.steps))
            if self.adaptive:
                self._decide()

    def _decide(self) -> None:
        before, enough = self._controller.reason, max(MIN_REPORTS, 2 * self._world_size())
        if len(self._recent) >= enough and self._recent_applied:
            baseline, recent = StepQuantiles.of(self._baseline), StepQuantiles.of(self._recent)
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
        if not self.adaptive:
            self._throttle.pace = PaceLimit()
            return
        running = self._controller.state is PaceState.RUNNING
        self._throttle.pace = PaceLimit(self._controller.bytes_per_step, paused=not running)

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
            if adaptive and not self.adaptive:
                self._controller.reset()
            self.adaptive = adaptive
            self._controller.set_bounds(*self._bounds())
            self._set_pace()

    def apply_config(self, settings: ControlConfig) -> None:
        """Use another configuration. Its limits replace requested ones only if they differ from the previous file's."""
        before, self._settings = self._settings.throttle, settings
        throttle = settings.throttle
        if throttle == before:
            self.set_limits(self.limits, self.adaptive)
        else:
            self.set_limits(ThrottleLimits(throttle.bytes_per_step, throttle.bytes_per_second), throttle.adaptive)

    @property
    def limits(self) -> ThrottleLimits:
        return self._throttle.limits

    def snapshot(self) -> PacingSnapshot:
        with self._lock:
            controller = self._controller
            return PacingSnapshot(
                limits=self._throttle.limits,
                adaptive=self.adaptive,
                bytes_per_step=self._throttle.bytes_per_step,
                state=controller.state if self.adaptive else None,
                why=controller.reason if self.adaptive else "",
                throttle=self._throttle.snapshot(),
                baseline=StepQuantiles.of(self._baseline),
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
