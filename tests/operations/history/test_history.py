"""The history of migrations: restarts, limits, and files and disks that fail."""

from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_events import MigrationEvent
from flexd.control.daemon.migration_states import MigrationState, Transition, TransitionEvent
from flexd.core.errors import SnapshotError
from flexd.core.placement import Delta
from flexd.operations.history import store as store_module
from flexd.operations.history.history import MigrationHistory
from flexd.operations.history.records import ActionRecord
from flexd.operations.history.store import ENDED_UNSEEN

E = TransitionEvent
FLUSH_SECONDS = 20.0


class RunningHistory:
    """A running history, and migrations that it records as the coordinator reports them."""

    def __init__(self, path: Path, keep: int = 100, retry_seconds: float = 0.01) -> None:
        self.events: list[tuple[str, object]] = []
        self.history = MigrationHistory(
            path, keep, lambda name, fields: self.events.append((name, fields)), retry_seconds
        )
        self.history.start()

    def migration(self, name: str, *events: TransitionEvent, who: str = "ada", settle: bool = True) -> Migration:
        """Record a migration of 30 rows through ``events``; 20 rows are pushed and 10 applied before the second one."""
        chunks = [Delta(np.arange(30), np.zeros(30, np.uint8), np.ones(30, np.uint8))]
        migration = Migration(
            f"plan-{name}", chunks, metadata=MigrationMetadata(name, "parent", "manual", who, f"reason of {name}")
        )
        migration.observe(self._on_transition)
        for number, event in enumerate(events):
            if number == 1:
                migration.count(rows_pushed=20, chunks_pushed=1, bytes_pushed=100, last_version=8)
                migration.count(rows_applied=10, chunks_applied=1, copied_bytes=640)
            migration.fire(event, f"because of {event.value}")
        if settle and migration.done:
            self.history.record_migration(MigrationEvent(migration, None))
        return migration

    def _on_transition(self, migration: Migration, transition: Transition) -> None:
        self.history.record_migration(MigrationEvent(migration, transition))

    def wait_until_written(self) -> None:
        assert self.history.flush(FLUSH_SECONDS), self.history.snapshot

    def stop(self) -> None:
        assert self.history.stop(FLUSH_SECONDS)


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., RunningHistory]]:
    made: list[RunningHistory] = []

    def make(*arguments: object, **options: object) -> RunningHistory:
        made.append(RunningHistory(tmp_path / "migrations.sqlite", *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for kept in made:
        kept.history.stop(FLUSH_SECONDS)


def test_every_transition_is_kept_over_a_restart(keep: Callable[..., RunningHistory], tmp_path: Path) -> None:
    kept = keep()
    migration = kept.migration("m1", E.START, E.ABORT, E.STOPPED)
    kept.migration("m2", E.ABORT, who="")
    kept.stop()

    again = keep()
    again.wait_until_written()
    newest = again.history.newest(10)
    assert [(record.migration_id, record.state) for record in newest] == [("m2", "ABORTED"), ("m1", "ABORTED")]
    assert [record.migration_id for record in again.history.newest(1)] == ["m2"]
    found = again.history.find("m1")
    assert found is not None
    record, transitions = found
    assert (record.plan_id, record.parent_plan_id, record.trigger, record.who, record.reason) == (
        "plan-m1", "parent", "manual", "ada", "reason of m1",
    )  # fmt: skip
    assert (record.rows_pushed, record.rows_applied, record.copied_bytes, record.pushed_bytes, record.last_version) == (
        20, 10, 640, 100, 8,
    )  # fmt: skip
    assert (record.settled, record.problem) == (True, "because of stopped")
    assert record.seconds == pytest.approx(migration.progress.ended_unix_seconds - record.created_unix_seconds)
    assert [(each.event, each.before, each.after, each.reason) for each in transitions] == [
        ("", "", "PENDING", "reason of m1"),
        ("start", "PENDING", "PUSHING", "because of start"),
        ("abort", "PUSHING", "ABORTING", "because of abort"),
        ("stopped", "ABORTING", "ABORTED", "because of stopped"),
    ]
    assert [(each.rows_pushed, each.rows_applied, each.version) for each in transitions] == [
        (0, 0, 0), (0, 0, 0), (20, 10, 8), (20, 10, 8),
    ]  # fmt: skip
    assert [each.unix_seconds for each in transitions] == sorted(each.unix_seconds for each in transitions)
    assert again.history.find("m3") is None
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_migrations_are_filtered_by_state(keep: Callable[..., RunningHistory]) -> None:
    kept = keep()
    kept.migration("a", E.START, E.EXHAUSTED, E.APPLIED)
    kept.migration("b", E.START, E.FAIL)
    kept.migration("c", E.START, E.EXHAUSTED)
    kept.wait_until_written()

    def ids(state: MigrationState) -> list[str]:
        return [record.migration_id for record in kept.history.newest(10, state)]

    assert ids(MigrationState.COMMITTED) == ["a"]
    assert ids(MigrationState.FAILED) == ["b"]
    assert ids(MigrationState.APPLYING) == ["c"]
    assert kept.history.newest(1, MigrationState.APPLYING)[0].seconds is None


def test_a_migration_that_a_crash_interrupted_has_failed(keep: Callable[..., RunningHistory]) -> None:
    kept = keep()
    kept.migration("done", E.START, E.FAIL, settle=False)
    kept.migration("open", E.START)
    kept.stop()
    again = keep()
    again.wait_until_written()
    found = again.history.find("open")
    assert found is not None
    assert (found[0].state, found[0].problem, found[0].settled) == ("FAILED", ENDED_UNSEEN, True)
    assert found[0].seconds is not None
    assert [(each.number, each.event, each.before, each.after) for each in found[1]][-1] == (
        2, "fail", "PUSHING", "FAILED",
    )  # fmt: skip
    done = again.history.find("done")
    assert done is not None
    assert (done[0].problem, done[0].settled, len(done[1])) == ("because of fail", True, 3)


def test_the_oldest_migrations_are_deleted(keep: Callable[..., RunningHistory], tmp_path: Path) -> None:
    kept = keep(keep=5)
    for number in range(23):
        kept.migration(f"m{number}", E.START, E.FAIL)
    kept.wait_until_written()
    assert [record.migration_id for record in kept.history.newest(100)] == [f"m{n}" for n in range(22, 17, -1)]
    kept.stop()
    with sqlite3.connect(tmp_path / "migrations.sqlite") as connection:
        assert connection.execute("SELECT COUNT(DISTINCT serial) FROM transitions").fetchone() == (5,)
    connection.close()


def test_the_transitions_of_one_migration_are_bounded(
    keep: Callable[..., RunningHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEPT_TRANSITIONS", 8)
    kept = keep()
    kept.migration("m", E.START, *(each for _ in range(20) for each in (E.EXHAUSTED, E.VOIDED)), E.FAIL)
    kept.wait_until_written()
    found = kept.history.find("m")
    assert found is not None
    numbers = [each.number for each in found[1]]
    assert (numbers[0], numbers[-1], found[1][-1].after) == (0, 42, "FAILED")
    assert numbers[1:] == list(range(36, 43))


def _random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(8_192))


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5_000])


def _other_program(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.executescript("CREATE TABLE migrations (id); PRAGMA user_version = 1")
    connection.close()


@pytest.mark.parametrize("harm", [_random_bytes, _truncated, _other_program])
def test_an_unusable_file_is_quarantined(
    keep: Callable[..., RunningHistory], tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "migrations.sqlite"
    kept = keep()
    for number in range(20):
        kept.migration(f"old{number}", E.START, E.FAIL)
    kept.stop()
    harm(path)
    harmed = path.read_bytes()
    again = keep()
    again.migration("new", E.START, E.FAIL)
    again.wait_until_written()
    assert [record.migration_id for record in again.history.newest(100)] == ["new"]
    assert again.history.snapshot.quarantined == 1
    assert [name for name, _ in again.events] == ["history_quarantined"]
    assert (tmp_path / "migrations.sqlite.unusable").read_bytes() == harmed
    again.stop()
    harm(path)
    once_more = keep()
    once_more.migration("newer", E.START, E.FAIL)
    once_more.wait_until_written()
    assert len(list(tmp_path.glob("*.unusable*"))) == 1, "one is kept, not one a fault"


def test_entries_wait_while_nothing_can_be_written(keep: Callable[..., RunningHistory], tmp_path: Path) -> None:
    directory = tmp_path / "migrations.sqlite"
    directory.mkdir()
    kept = keep()
    kept.migration("m", E.START, E.FAIL)
    while not kept.history.snapshot.failures:
        pass
    assert kept.history.flush(0.0) is False
    assert "migrations.sqlite" in str(kept.history.snapshot.problem)
    with pytest.raises(SnapshotError, match="cannot be read"):
        kept.history.newest(1)
    directory.rmdir()
    done = threading.Event()
    while not kept.history.flush(1.0):
        assert not done.wait(0.01)
    assert [record.state for record in kept.history.newest(1)] == ["FAILED"]
    assert (kept.history.snapshot.problem, kept.history.snapshot.lost) == (None, 0)


def test_a_locked_file_delays_entries_and_loses_none(keep: Callable[..., RunningHistory], tmp_path: Path) -> None:
    kept = keep()
    kept.migration("a", E.START, E.FAIL)
    kept.wait_until_written()
    other = sqlite3.connect(tmp_path / "migrations.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    kept.migration("b", E.START, E.FAIL)
    assert kept.history.flush(0.05) is False
    # Readers do not wait for the writer.
    assert [record.migration_id for record in kept.history.newest(10)] == ["a"]
    other.execute("ROLLBACK")
    other.close()
    while not kept.history.flush(1.0):
        pass
    assert [record.migration_id for record in kept.history.newest(10)] == ["b", "a"]


def actions_of(kept: RunningHistory) -> list[str]:
    return [each.reason for each in kept.history.newest_actions(100)]


def test_actions_are_kept_in_order_and_bounded(keep: Callable[..., RunningHistory]) -> None:
    first = keep(keep=3)
    assert first.history.newest_actions(5) == ()
    for number in range(4):
        first.history.record_action(ActionRecord.of(float(number), "pause", "ann", f"r{number}", "d" * 5_000))
    first.wait_until_written()
    first.stop()
    second = keep(keep=3)
    assert actions_of(second) == ["r3", "r2", "r1"]
    (newest,) = second.history.newest_actions(1)
    assert newest == ActionRecord(3.0, "pause", "ann", "r3", "d" * 2_000)
