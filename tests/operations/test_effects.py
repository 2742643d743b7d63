"""Effects of migrations are kept: across restarts, later events, and migrations that move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flexd.control.daemon.migration import Migration, MigrationEvent
from flexd.control.daemon.migration_record import MigrationRecord, TransitionEvent
from flexd.control.protocol.report import PlacementState, StepReport
from flexd.core.placement import Placement
from flexd.operations.history import MigrationHistory
from flexd.operations.state_database import NAME, StateDatabase
from flexd.operations.step_times import EffectRecorder, StepTimes

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
        self.history.record_migration(MigrationEvent(migration, None))

    def kept(self, name: str) -> MigrationRecord:
        assert self.history.flush(FLUSH_SECONDS), self.history.problem
        found = self.history.find(name)
        assert found is not None
        return found

    def stop(self) -> None:
        assert self.history.stop(FLUSH_SECONDS)
        self.file.close()

    def _on_transition(self, event: MigrationEvent) -> None:
        self.history.record_migration(event)
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
