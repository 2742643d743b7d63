"""Steps by placement version, in blocks and by phase; the saving of migrations as the steps around them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon.migration import Migration, MigrationEvent
from flexd.control.daemon.migration_record import MigrationRecord, TransitionEvent
from flexd.control.protocol.report import PhaseReport, PhasesReport, PlacementState, StepReport
from flexd.core.placement import Placement
from flexd.operations import step_times
from flexd.operations.history import EffectRecorder, MigrationHistory
from flexd.operations.live_plan import LivePrices, priced_by
from flexd.operations.state_database import NAME, StateDatabase
from flexd.operations.step_times import StepBlocks, StepTimes, trimmed_mean
from flexd.operations.training_monitor import TrainingMonitor
from flexd.topology.cluster import Exposed
from tests.support.components import report as report_of_rank
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.planner_cases import cluster
from tests.support.planning_harness import filled_harness


def report(version: int, seconds: float, steps: int = 1, apply_seconds: float = 0.0) -> StepReport:
    return StepReport(1, steps, PlacementState(version, 0), seconds, apply_seconds, (0, 0, 0))


def test_steps_count_at_the_version_that_they_ran_at_and_without_chunks() -> None:
    times = StepTimes()
    for rank in range(4):
        times.add(rank, report(3, 0.5))  # The first report of a rank may span a change of version.
        for seconds in (0.1, 0.3):
            times.add(rank, report(3, seconds))
        times.add(rank, report(3, 5.0, steps=3, apply_seconds=0.01))
    times.add(0, report(4, 9.0))
    times.add(0, report(4, 0.05))
    at_3, at_4 = times.at_version(3), times.at_version(4)
    assert at_3 is not None
    assert at_4 is not None
    assert at_3[0] == pytest.approx(0.2)
    assert (at_4[0], math.isnan(at_4[1])) == (pytest.approx(0.05), True), "one report has no spread"
    assert times.at_version(5) is None
    times.clear()
    assert times.at_version(3) is None


def test_the_error_is_that_of_a_step_however_steps_are_reported() -> None:
    """Ranks share their steps: more of them make the mean no more certain."""
    rng = np.random.default_rng(1)
    seconds = rng.normal(0.1, 0.02, 900)
    times = StepTimes()
    for rank in range(3):
        times.add(rank, report(1, 1.0))
    start = 0
    for steps in rng.integers(1, 4, 300).tolist():
        part = seconds[start : start + steps]
        start += len(part)
        for rank in range(3):
            times.add(rank, report(1, float(part.sum()), len(part)))
    measured = times.at_version(1)
    assert measured is not None
    assert measured[0] == pytest.approx(seconds[:start].mean())
    assert measured[1] == pytest.approx(0.02 / math.sqrt(start), rel=0.15)


def test_old_steps_and_old_versions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "RECENT_STEPS", 10)
    monkeypatch.setattr(step_times, "MAX_VERSIONS", 2)
    times = StepTimes()
    for seconds in (1.0,) * 31 + (2.0,) * 40:
        times.add(0, report(1, seconds))
    measured = times.at_version(1)
    assert measured is not None
    assert measured[0] == pytest.approx(2.0, rel=0.01)
    for version in (2, 3):
        times.add(0, report(version, 1.0))
        times.add(0, report(version, 1.0))
    assert times.at_version(1) is None
    assert times.at_version(3) is not None


def block_report(version: int, seconds: float, steps: int = 2, apply_seconds: float = 0.0) -> StepReport:
    return StepReport(1, steps, PlacementState(version, 0), seconds * steps, apply_seconds, (1, 0, 0))


def test_a_block_has_clean_steps_of_every_rank_and_counts_the_busiest() -> None:
    blocks = StepBlocks()
    blocks.begin(7, 8)
    for rank in (0, 1):
        blocks.add(rank, block_report(6, 9.0))
        blocks.add(rank, block_report(7, 9.0, apply_seconds=0.5))
        blocks.add(rank, block_report(7, 9.0))
    for number in range(4):
        assert blocks.seconds(2) is None, number
        blocks.add(0, block_report(7, 1.0))
        blocks.add(1, block_report(7, 1.5))
    assert blocks.seconds(2) == pytest.approx(1.5)
    assert blocks.seconds(3) is None, "a rank has not reported"
    assert blocks.steps() == 14
    blocks.begin(7, 8)
    assert blocks.seconds(2) is None
    for _ in range(4):
        blocks.add(0, block_report(7, 2.0))
        blocks.add(1, block_report(7, 1.0))
    assert blocks.seconds(2) == pytest.approx(2.0), "a further block at the same version needs no wait"
    blocks.begin(8, 2)
    blocks.add(0, block_report(7, 1.0, steps=100))
    assert blocks.seconds(1) is None, "of another version"


def test_the_trimmed_mean_leaves_pauses_out() -> None:
    even = [(2, 2.0)] * 8
    assert trimmed_mean(even) == pytest.approx(1.0)
    assert trimmed_mean([*even, (2, 500.0), (1, 0.01)]) == pytest.approx(1.0)
    assert trimmed_mean([(1, 1.0), (3, 6.0)]) == pytest.approx((0.05 * 1.0 + 0.55 * 2.0) / 0.6)


E = TransitionEvent
FLUSH_SECONDS = 20.0


class Recorded:
    """A history with its recorder, and migrations that move from version to version."""

    def __init__(self, path: Path, keep: int = 100) -> None:
        self.file = StateDatabase(path)
        self.history = MigrationHistory(self.file, keep)
        self.history.start()
        self.times = StepTimes()
        self.recorder = EffectRecorder(self.times, self.history.record_saving)

    def steps(self, version: int, *seconds: float) -> None:
        for each in (seconds[0], *seconds):
            self.times.add(0, StepReport(1, 1, PlacementState(version, 0), each, 0.0, (1, 0, 0)))

    def start(self, name: str, base: int = 0) -> Migration:
        migration = Migration(MigrationRecord(migration_id=name, plan_id=name), Placement.empty())
        migration.observe(self._on_transition)
        migration.start_from(Placement.empty(base))
        migration.fire(E.START, "")
        return migration

    def commit(self, migration: Migration, last: int) -> None:
        migration.count(rows_pushed=3, chunks_pushed=1, last_version=last)
        migration.fire(E.EXHAUSTED, "")
        migration.fire(E.APPLIED, "")
        self.settle(migration)

    def settle(self, migration: Migration) -> None:
        migration.settle()
        self.history.record_migration(migration.record)

    def kept(self, name: str) -> MigrationRecord:
        assert self.history.flush(FLUSH_SECONDS), self.history.problem
        found = self.history.find(name)
        assert found is not None
        return found

    def stop(self) -> None:
        assert self.history.stop(FLUSH_SECONDS)
        self.file.close()

    def _on_transition(self, event: MigrationEvent) -> None:
        self.history.record_migration(event.migration.record)
        self.recorder.on_migration(event)


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path / NAME)
    yield recorded
    recorded.stop()


def test_an_effect_is_kept_when_the_next_migration_starts_and_outlives_the_daemon(tmp_path: Path) -> None:
    it = Recorded(tmp_path / NAME)
    it.steps(0, 0.1, 0.12)
    first = it.start("m1")
    it.commit(first, last=4)
    it.steps(4, 0.08, 0.06)
    it.start("m2")
    kept = it.kept("m1")
    assert kept.measured_saving_seconds == pytest.approx(0.04)
    assert kept.measured_error_seconds is not None
    assert it.kept("m2").measured_saving_seconds is None, "nothing is measured yet"
    it.settle(first)
    assert it.kept("m1") == kept, "a late event of the migration leaves it"
    it.stop()
    later = Recorded(tmp_path / NAME)
    later.recorder.store()
    assert later.kept("m1") == kept
    later.stop()


def test_steps_of_other_ranks_do_not_count(it: Recorded) -> None:
    it.steps(0, 0.1)
    it.commit(it.start("m1"), last=4)
    it.steps(4, 0.07)
    it.recorder.end_generation()
    kept = it.kept("m1")
    assert kept.measured_saving_seconds == pytest.approx(0.03)
    it.times.clear()
    it.steps(4, 0.2)
    it.start("m2")
    assert it.kept("m1") == kept


def monitor(rows: float, push: float, cover: float, *, overlapped: float = 1.0, steps: int = 10) -> TrainingMonitor:
    training = TrainingMonitor()
    add(training, rows, push, cover, overlapped=overlapped, steps=steps)
    return training


def prices_of(training: TrainingMonitor) -> LivePrices:
    return LivePrices(cluster(), training, FakeCoordinator())  # type: ignore[arg-type]


def add(
    training: TrainingMonitor, rows: float, push: float, cover: float, *, overlapped: float = 1.0, steps: int = 10
) -> None:
    phases = (
        PhaseReport("rows", inter_seconds=steps * rows, overlapped_seconds=steps * rows * overlapped),
        PhaseReport("push", inter_seconds=steps * push),
    )
    for rank in range(2):
        training.add(rank, replace(report_of_rank(1), phases=PhasesReport(phases, steps, steps * cover)))


def test_shares_and_cover_are_what_ranks_measured() -> None:
    exposed = prices_of(monitor(0.3, 0.1, 0.2, overlapped=0.75)).exposed()
    assert exposed is not None
    assert exposed.forward == pytest.approx(0.25)
    assert exposed.backward == 1.0
    assert exposed.sync == pytest.approx(1 - 0.75 * 0.3 / 0.4), "no replicas yet: as the whole"
    assert exposed.cover_seconds == pytest.approx(0.2)
    machine = cluster(exposed=Exposed(1.0, 0.5, 0.5))
    priced = priced_by(machine, exposed)
    assert priced.exposed == exposed
    assert (
        priced.name == f"{machine.name} (measured: outside compute forward 0.25, backward 1.00, sync 0.44; "
        "200 ms cover the rest)"
    )


def test_noise_does_not_change_prices() -> None:
    training = monitor(0.3, 0.1, 0.2)
    prices = prices_of(training)
    first = prices.exposed()
    add(training, 0.3, 0.1, 0.205, overlapped=0.98, steps=50)
    assert prices.exposed() is first
    add(training, 0.3, 0.1, 0.1, overlapped=1.0, steps=50)
    changed = prices.exposed()
    assert changed is not None
    assert changed.cover_seconds == pytest.approx(0.1)


def test_plans_use_the_measured_exposure(tmp_path: Path) -> None:
    """Ranks that report everything beside long compute get a plan that moves nothing."""
    harness = filled_harness(tmp_path)
    assert harness.propose("before reports").plan.promotions > 0
    names = ("ids", "rows", "push", "sync")
    phases = tuple(PhaseReport(name, inter_seconds=1.0, overlapped_seconds=1.0) for name in names)
    for rank in range(4):
        harness.training.add(
            rank, replace(report_of_rank(2, tiers=(200_000, 0, 0)), phases=PhasesReport(phases, 1, 1000.0))
        )
    plan = harness.propose("after them").plan
    assert plan.promotions == 0
    assert plan.costs.before.exposed_seconds == 0
    assert "1e+06 ms cover the rest" in plan.costs.cluster.name
    assert math.isfinite(plan.costs.cluster.exposed.cover_seconds)
