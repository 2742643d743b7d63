"""The pace of migrations in a closed loop with simulated ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from flexd.config.links import ControlConfig, ThrottleConfig
from flexd.control.daemon.throttle import Throttle, ThrottleLimits
from flexd.control.protocol.report import StepReport
from flexd.operations.pacing import MigrationPacing, PaceState, merge_limits
from tests.support.fake_channel import FakeChannel

WORLD = 4
STEP_SECONDS = 0.010
ROW_BYTES = 64


def report(seconds: float, apply_seconds: float = 0.0, steps: int = 1) -> StepReport:
    return StepReport(1, steps, 0, 0, seconds * steps, apply_seconds, (1, 0, 0), 0, 0, 0, 0, 0, 0)


@dataclass
class Job:
    """Ranks whose steps take longer for every copied byte, and an endless migration as the pusher feeds it.

    Args:
        seconds_per_byte: added step time for each byte copied in it.
    """

    seconds_per_byte: float
    settings: ThrottleConfig = field(default_factory=lambda: ThrottleConfig(adaptive=True))
    now: float = 0.0
    slower: float = 1.0
    migrating: bool = True

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        limits = ThrottleLimits(self.settings.bytes_per_step, self.settings.bytes_per_second)
        self.throttle = Throttle(limits, lambda: self.now)
        self.outstanding = 0
        self.copied: list[int] = []
        self.steps: list[float] = []
        self.pacing = MigrationPacing(
            ControlConfig(throttle=self.settings), self.throttle,
            FakeChannel(WORLD, lambda: int(self.outstanding > 0)), lambda: self.now,
        )  # fmt: skip
        self.pacing.set_generation(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            copied, self.outstanding = self.outstanding, 0
            applying = copied * self.seconds_per_byte
            seconds = self.slower * STEP_SECONDS * (1 + abs(self.rng.normal(0, 0.01))) + applying
            self.now += seconds
            self.copied.append(copied)
            self.steps.append(seconds)
            if self.migrating:
                rows = np.full(1 << 14, ROW_BYTES, dtype=np.int64)
                self.outstanding = ROW_BYTES * self.throttle.release(rows, 0)
            for _ in range(WORLD):
                self.pacing.add(report(seconds, applying))


def slowdown(job: Job, last: int) -> float:
    return float(np.median(job.steps[-last:])) / STEP_SECONDS


def test_the_pace_settles_at_the_tolerated_slowdown() -> None:
    """The tolerated slowdown is 1 ms in 10: 100,000 bytes a step where a byte takes 10 ns."""
    job = Job(seconds_per_byte=1e-8)
    job.run(1_000)
    late = np.array(job.copied[500:])
    assert slowdown(job, 500) < 1.2
    assert 40_000 < late.mean() < 160_000, "neither starved nor let loose"
    figures = job.pacing.snapshot()
    assert figures.state is PaceState.RUNNING
    assert figures.slowed > 0
    assert figures.baseline is not None
    assert figures.baseline.p50_seconds == pytest.approx(STEP_SECONDS, rel=0.05)


def test_a_permanently_slower_job_gets_a_new_baseline() -> None:
    """Steps during a pause are as slow, and become the baseline."""
    job = Job(seconds_per_byte=1e-11)
    job.run(200)
    job.slower = 2.0
    job.run(1_500)
    figures = job.pacing.snapshot()
    assert figures.pauses >= 1
    assert figures.bytes_per_step == ControlConfig().chunk_bytes
    assert figures.baseline is not None
    assert figures.baseline.p50_seconds == pytest.approx(2 * STEP_SECONDS, rel=0.05)


def test_a_migration_that_always_slows_steps_continues_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexd.operations.pacing.PAUSE_SECONDS", 1.0)
    job = Job(seconds_per_byte=1e-6, settings=ThrottleConfig(adaptive=True))
    job.run(2_500)
    figures = job.pacing.snapshot()
    assert figures.pauses >= 2
    assert "at the floor already" in figures.why or figures.state is PaceState.RUNNING
    slow = np.mean(np.array(job.steps[500:]) > 1.1 * STEP_SECONDS)
    assert 0 < slow < 0.2
    assert sum(job.copied[1_250:]) > 0


def test_nothing_is_released_before_step_times_are_known() -> None:
    job = Job(seconds_per_byte=1e-8)
    job.run(1)
    assert job.pacing.snapshot().state is PaceState.MEASURING
    assert sum(job.copied) == 0
    job.run(10)
    assert job.pacing.snapshot().state is PaceState.RUNNING
    assert sum(job.copied) > 0


def test_slow_steps_without_applied_chunks_do_not_change_the_pace() -> None:
    job = Job(seconds_per_byte=0.0)
    job.run(20)
    job.outstanding = 1
    for _ in range(500):
        job.pacing.add(report(10.0))
    assert job.pacing.snapshot().slowed == 0


def test_limits_can_change_during_a_migration() -> None:
    job = Job(seconds_per_byte=1e-6, settings=ThrottleConfig())
    job.run(5)
    assert job.copied[-1] == ROW_BYTES << 14
    job.pacing.set_limits(merge_limits(job.pacing.limits, 1_280, None), adaptive=False)
    job.run(5)
    assert set(job.copied[-4:]) == {1_280}
    job.pacing.set_limits(merge_limits(job.pacing.limits, 0, None), adaptive=True)
    assert job.throttle.pace.paused, "measured first"
    job.pacing.apply_config(ControlConfig(throttle=ThrottleConfig(bytes_per_step=640)))
    job.run(3)
    assert job.copied[-1] == 640


def test_omitted_limits_stay_and_zero_removes_a_limit() -> None:
    limits = ThrottleLimits(10, 20)
    assert merge_limits(limits, None, None) == limits
    assert merge_limits(limits, 0, 5) == ThrottleLimits(None, 5)
    assert merge_limits(limits, None, 0) == ThrottleLimits(10, None)
