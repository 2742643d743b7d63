"""The history of migrations: restarts, limits and writes that fail."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from flexd.control.daemon import migration as migration_module
from flexd.control.daemon.migration import (
    Migration,
    MigrationRecord,
    MigrationState,
    TransitionEvent,
    VerificationReport,
)
from flexd.core.errors import SnapshotError
from flexd.core.placement import Placement
from flexd.operations import history as history_module
from flexd.operations.decisions import NAME, StateDatabase, Statement
from flexd.operations.history import ENDED_UNSEEN, MigrationHistory

E = TransitionEvent


class RunningHistory:
    """A running history, and migrations that it records as the coordinator reports them."""

    def __init__(self, path: Path, keep: int = 100) -> None:
        self.file = StateDatabase(path)
        self.history = MigrationHistory(self.file, keep)

    def migration(
        self, name: str, *events: TransitionEvent, requested_by: str = "ada", settle: bool = True
    ) -> Migration:
        """Record a migration of 30 rows through ``events``; 20 rows are pushed and 10 applied before the second one."""
        origin = MigrationRecord(
            migration_id=name, plan_id=f"plan-{name}", generation=3, parent_plan_id="parent", trigger="manual",
            requested_by=requested_by, reason=f"reason of {name}",
            predicted_saving_seconds=0.5,
        )  # fmt: skip
        migration = Migration(origin, Placement.empty())
        migration.observe(lambda event: self.history.record_migration(event.migration.record))
        for number, event in enumerate(events):
            if number == 1:
                migration.count(rows_pushed=20, chunks_pushed=1, pushed_bytes=100, last_version=8)
                migration.count(rows_applied=10, chunks_applied=1, copied_bytes=640)
            migration.fire(event, f"because of {event.value}")
        if settle and migration.done:
            migration.settle()
            self.history.record_migration(migration.record)
        return migration

    def action(self, reason: str) -> None:
        self.history.record_action("pause", "ann", reason, "d" * 5_000)

    @property
    def actions(self) -> list[str]:
        return [each.reason for each in self.history.newest_actions(100)]

    @property
    def ids(self) -> list[str]:
        return [record.migration_id for record in self.history.newest(100)]

    def stop(self) -> None:
        self.history.write()
        self.file.close()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., RunningHistory]]:
    made: list[RunningHistory] = []

    def make(*arguments: object, **options: object) -> RunningHistory:
        made.append(RunningHistory(tmp_path / NAME, *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for kept in made:
        kept.stop()


def test_a_migration_is_kept_over_a_restart_as_it_was(keep: Callable[..., RunningHistory]) -> None:
    kept = keep()
    migration = kept.migration("m1", E.START, E.ABORT, E.STOPPED)
    kept.migration("m2", E.ABORT, requested_by="")
    kept.stop()

    again = keep()
    assert again.ids == ["m2", "m1"]
    assert [record.migration_id for record in again.history.newest(1)] == ["m2"]
    found = again.history.find("m1")
    assert found == migration.record
    assert (found.plan_id, found.parent_plan_id, found.problem, found.settled) == (
        "plan-m1", "parent", "because of stopped", True,
    )  # fmt: skip
    assert [(each.event, each.after, each.reason, each.rows_pushed) for each in found.transitions] == [
        (None, MigrationState.PENDING, "reason of m1", 0), (E.START, MigrationState.PUSHING, "because of start", 0),
        (E.ABORT, MigrationState.ABORTING, "because of abort", 20),
        (E.STOPPED, MigrationState.ABORTED, "because of stopped", 20),
    ]  # fmt: skip
    assert again.history.find("m3") is None
    assert [record.migration_id for record in again.history.newest_moves(9)] == ["m1"]


def test_a_verification_stays_with_its_migration(keep: Callable[..., RunningHistory]) -> None:
    kept = keep()
    migration = kept.migration("a", E.START, E.EXHAUSTED, settle=False)
    found = VerificationReport(migration_id="a", state="faster", change=-0.1, pairs=4)
    kept.history.record_verification(found.model_copy(update={"state": "running"}))
    kept.history.record_verification(found)
    kept.history.record_verification(found.model_copy(update={"migration_id": "unknown"}))
    # An event of the migration itself leaves it.
    migration.fire(E.APPLIED)
    kept.migration("b", E.START, E.FAIL)
    kept.stop()
    again = keep()
    assert again.history.find("a") == migration.record.model_copy(update={"verification": found, "settled": True})
    assert (again.history.newest_verification(), again.ids) == (found, ["b", "a"])


def test_a_migration_that_a_crash_interrupted_has_failed(keep: Callable[..., RunningHistory]) -> None:
    kept = keep()
    kept.migration("done", E.START, E.FAIL, settle=False)
    kept.migration("open", E.START)
    kept.stop()
    again = keep()
    found, done = again.history.find("open"), again.history.find("done")
    assert (found.state, found.problem, found.settled) == (MigrationState.FAILED, ENDED_UNSEEN, True)
    assert found.seconds is not None
    last = found.transitions[-1]
    assert (last.number, last.event, last.before, last.after) == (2, E.FAIL, MigrationState.PUSHING, found.state)
    assert (done.problem, done.settled, len(done.transitions)) == ("because of fail", True, 3)


def test_the_oldest_are_deleted(keep: Callable[..., RunningHistory]) -> None:
    kept = keep(keep=5)
    for number in range(23):
        kept.migration(f"m{number}", E.START, E.FAIL)
        kept.action(f"r{number}")
    assert (kept.ids, kept.actions) == ([f"m{n}" for n in range(22, 17, -1)], [f"r{n}" for n in range(22, 17, -1)])
    assert {len(each.detail) for each in kept.history.newest_actions(9)} == {2_000}


def test_the_transitions_of_one_migration_are_bounded(
    keep: Callable[..., RunningHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_module, "KEPT_TRANSITIONS", 8)
    kept = keep()
    kept.migration("m", E.START, *(each for _ in range(20) for each in (E.EXHAUSTED, E.VOIDED)), E.FAIL)
    assert [each.number for each in kept.history.find("m").transitions] == [0, *range(36, 43)]


def test_entries_wait_while_nothing_can_be_written_and_keep_their_order(
    keep: Callable[..., RunningHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "RETRY_SECONDS", 0.0)
    kept = keep()

    def is_full(statements: Sequence[Statement]) -> None:
        kept.action("c")
        raise SnapshotError("the disk is full")

    kept.action("a")
    kept.action("b")
    with monkeypatch.context() as patch:
        patch.setattr(kept.file, "write", is_full)
        assert not kept.history.write()
    assert kept.history.problem == "the disk is full"
    assert kept.history.write()
    assert (kept.actions, kept.history.lost, kept.history.problem) == (["c", "b", "a"], 0, None)


def test_a_full_disk_is_left_alone_for_a_while_and_waiting_entries_are_bounded(
    keep: Callable[..., RunningHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "MAX_WAITING", 5)
    kept = keep()
    full = Mock(side_effect=SnapshotError("the disk is full"))
    monkeypatch.setattr(kept.file, "write", full)
    for number in range(9):
        kept.action(str(number))
    assert not kept.history.write()
    assert not kept.history.write()
    assert (full.call_count, kept.history.problem, kept.history.lost) == (1, "the disk is full", 4)


@pytest.mark.parametrize("read", ["newest", "newest_moves", "newest_actions"])
def test_a_reader_sees_every_entry_recorded_before(keep: Callable[..., RunningHistory], read: str) -> None:
    kept = keep()
    kept.action("a")
    getattr(kept.history, read)(1)
    assert kept.file.read("SELECT count(*) FROM actions") == [(1,)]
