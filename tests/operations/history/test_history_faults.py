"""Failed writes, slow readers and writers, and damaged files of the history."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_events import MigrationEvent
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.core.errors import SnapshotError
from flexd.operations.history import history as history_module
from flexd.operations.history import store as store_module
from flexd.operations.history.history import MigrationHistory
from flexd.operations.history.records import ActionRecord
from flexd.operations.history.store import HistoryStore
from tests.support.until import until

SECONDS = 20.0
"""Deadline of every wait."""


def action(reason: str) -> ActionRecord:
    return ActionRecord.of(1.0, "pause", "ann", reason, "d" * 2_000)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., MigrationHistory]]:
    made: list[MigrationHistory] = []

    def one(retry_seconds: float = 0.01) -> MigrationHistory:
        made.append(MigrationHistory(tmp_path / "migrations.sqlite", 10_000, retry_seconds=retry_seconds))
        return made[-1]

    yield one
    for history in made:
        assert history.stop(SECONDS)


def reasons(history: MigrationHistory) -> list[str]:
    return [each.reason for each in history.newest_actions(100)]


def wait_until_written(history: MigrationHistory) -> None:
    until(lambda: history.flush(1.0), SECONDS, lambda: history.snapshot)


def wait_until_failed(history: MigrationHistory) -> None:
    until(lambda: history.snapshot.failures, SECONDS)


class FailsOnce:
    """Fails the first write after calling ``meanwhile``, and passes on later ones."""

    def __init__(self, history: MigrationHistory, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.write, self.meanwhile = history._store.write, meanwhile
        self.again = threading.Event()
        self.failed = False
        history._store.write = self  # type: ignore[method-assign]

    def __call__(self, entries: Sequence[Any]) -> None:
        if not self.failed:
            self.failed = True
            self.meanwhile()
            raise SnapshotError("the disk is full")
        self.again.set()
        self.write(entries)


def test_entries_that_failed_are_written_in_order(make: Callable[..., MigrationHistory]) -> None:
    history = make()
    history.record_action(action("a"))
    history.record_action(action("b"))
    FailsOnce(history, lambda: [history.record_action(action(reason)) for reason in ("c", "d")] and None)
    history.start()
    wait_until_written(history)
    assert reasons(history) == ["d", "c", "b", "a"]
    figures = history.snapshot
    assert (figures.entries, figures.lost, figures.failures, figures.problem) == (4, 0, 1, None)


def test_a_stop_does_not_wait_for_a_full_disk(make: Callable[..., MigrationHistory]) -> None:
    history = make(retry_seconds=3600.0)

    def full(entries: Sequence[Any]) -> None:
        raise SnapshotError("the disk is full")

    history._store.write = full  # type: ignore[method-assign]
    history.record_action(action("a"))
    history.start()
    wait_until_failed(history)
    assert history.stop(SECONDS)


@pytest.mark.parametrize("read", ["newest", "find", "newest_actions"])
def test_a_reader_sees_every_entry_recorded_before(
    make: Callable[..., MigrationHistory], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "FRESH_SECONDS", SECONDS)
    history = make()
    history.start()
    wait_until_written(history)
    store, done = history._store, threading.Event()
    write = store.write

    def slowly(entries: Sequence[Any]) -> None:
        time.sleep(0.2)
        write(entries)
        done.set()

    store.write = slowly  # type: ignore[method-assign]
    history.record_action(action("a"))
    argument: Any = "m" if read == "find" else 1
    getattr(history, read)(argument)
    assert done.is_set()


def test_a_slow_reader_delays_no_writer_and_leaves_no_large_log(
    make: Callable[..., MigrationHistory], tmp_path: Path
) -> None:
    path = tmp_path / "migrations.sqlite"
    history = make()
    history.start()
    history.record_action(action("first"))
    wait_until_written(history)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT COUNT(*) FROM actions").fetchone() == (1,)
    for number in range(1_000):
        history.record_action(action(str(number)))
    assert history.flush(SECONDS), history.snapshot
    log = tmp_path / "migrations.sqlite-wal"
    assert log.stat().st_size > 2**20, "it cannot be merged under a reader"
    reader.close()
    for number in range(3):
        history.record_action(action(str(number)))
        wait_until_written(history)
    assert log.stat().st_size <= 2**20
    assert (history.snapshot.failures, history.snapshot.entries) == (0, 1_004)


def test_a_file_locked_by_another_writer_is_not_quarantined(
    make: Callable[..., MigrationHistory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.01)
    history = make()
    history.start()
    history.record_action(action("a"))
    wait_until_written(history)
    other = sqlite3.connect(tmp_path / "migrations.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    history.record_action(action("b"))
    wait_until_failed(history)
    other.execute("ROLLBACK")
    other.close()
    wait_until_written(history)
    assert reasons(history) == ["b", "a"]
    assert history.snapshot.quarantined == 0


def test_entries_of_one_write_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "migrations.sqlite", 10, lambda _: None)
    broken: Any = object()
    with pytest.raises(SnapshotError, match="cannot be written"):
        store.write([action("a"), ActionRecord.of(1.0, "pause", broken, "b")])
    assert store.newest_actions(9) == ()
    store.write([action("c")])
    assert [each.reason for each in store.newest_actions(9)] == ["c"]
    store.close()


def test_a_migration_is_settled_by_its_last_event(make: Callable[..., MigrationHistory]) -> None:
    history = make()
    history.start()
    migration = Migration("plan", [], metadata=MigrationMetadata("m", "", "manual", "ann", ""))
    migration.observe(lambda of, transition: history.record_migration(MigrationEvent(of, transition)))
    migration.fire(TransitionEvent.START, "")
    migration.fire(TransitionEvent.FAIL, "")
    assert [each.settled for each in history.newest(9)] == [False], "a chunk may still be on its way"
    history.record_migration(MigrationEvent(migration, None))
    assert [each.settled for each in history.newest(9)] == [True]
