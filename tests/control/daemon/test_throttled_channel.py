"""The throttle with real connections and agents: bytes that each rank applies at each step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from flexd.config.links import ControlConfig, ThrottleConfig
from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.daemon.throttle import Throttle, ThrottleLimits
from flexd.control.protocol.report import StepReport
from flexd.core.placement import Placement
from flexd.operations.pacing import MigrationPacing
from flexd.planner.delta import moved_bytes
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks, step_report, target
from tests.support.until import until


class MeasuredRanks(Ranks):
    """Apply all agreed chunks at every step, and record the copied bytes and the time of each step."""

    def __init__(self, port: int, seconds_per_byte: float = 0.0) -> None:
        self.copied: list[list[int]] = []
        """Copied bytes of each rank, by step."""
        self._seconds_per_byte = seconds_per_byte
        super().__init__(port)

    def _train(self) -> None:
        while not self._stop.is_set():
            announced = [rank.inbox.begin_exchange() for rank in self.ranks]
            for rank in self.ranks:
                rank.inbox.end_exchange(min(announced))
            copied = []
            for rank in self.ranks:
                chunks = rank.inbox.poll_agreed(1 << 40, lambda delta: 8 * len(delta))
                for version, delta in chunks:
                    rank.placement = rank.placement.apply(delta)
                    rank.inbox.applied(version)
                copied.append(sum(int(moved_bytes(delta, TABLES, self.layout).sum()) for _, delta in chunks))
            self.copied.append(copied)
            self.steps += 1
            for rank, size in zip(self.ranks, copied, strict=True):
                rank.agent.report(self._report(rank.placement, size))
            time.sleep(0.002)

    def _report(self, placement: Placement, copied: int) -> StepReport:
        applying = copied * self._seconds_per_byte
        base = step_report(self.steps, placement)
        return StepReport(**{**vars(base), "step_seconds": 0.002 + applying, "apply_seconds": applying})


class Throttled:
    """A coordinator with a throttle and the pacing that reads the ranks' step reports."""

    def __init__(self, directory: Path, settings: ThrottleConfig) -> None:
        self.throttle = Throttle(ThrottleLimits(settings.bytes_per_step, settings.bytes_per_second))
        self.journal = PlacementJournal(directory)
        self.coordinator = Coordinator(
            ControlOptions("job", listen_port=0, timeout_seconds=4.0, tick_seconds=0.005, secret=SECRET),
            TABLES, self.journal, on_report=lambda rank, report: self.pacing.add(report), throttle=self.throttle,
        )  # fmt: skip
        self.pacing = MigrationPacing(
            ControlConfig(throttle=settings, chunk_bytes=4_096), self.throttle, self.coordinator,
        )  # fmt: skip

    def __enter__(self) -> Throttled:
        self.coordinator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.stop(15)
        self.journal.close()

    def migrate(self, planned: Placement) -> Any:
        return self.coordinator.migrate("p", lambda p: p.delta_to(planned).chunks(500))


def test_slower_steps_slow_the_migration_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied kilobyte doubles the time of a step, so the controller halves the limit repeatedly."""
    monkeypatch.setattr("flexd.operations.pacing.FLOOR_BYTES_PER_STEP", 64)
    monkeypatch.setattr("flexd.operations.pacing.TOLERANCE", 0.05)
    settings = ThrottleConfig(adaptive=True)
    planned = target(2, 20_000)
    with Throttled(tmp_path, settings) as harness, MeasuredRanks(harness.coordinator.port, 2e-6) as ranks:
        migration = harness.migrate(planned)
        until(lambda: harness.pacing.snapshot().slowed >= 2, what=ranks.state())
        snapshot = harness.pacing.snapshot()
        assert migration.state is MigrationState.PUSHING
        until(lambda: migration.record.chunks_applied > 0)
        early = max(step[0] for step in ranks.copied)
        halved = len(ranks.copied)
        until(lambda: sum(step[0] > 0 for step in ranks.copied[halved + 50 :]) >= 3, what=str(snapshot))
        late = max(step[0] for step in ranks.copied[halved + 50 :])
        assert late < early, (late, early, harness.pacing.snapshot())
        assert "times the" in snapshot.why
        harness.pacing.set_limits(ThrottleLimits(), adaptive=False)
        assert migration.wait(30) is MigrationState.COMMITTED, (migration.record, ranks.state())
        until(lambda: ranks.all_at(planned))
    assert all(len(set(step)) == 1 for step in ranks.copied)
