"""Every term has its directory, and begins as what the one before has left."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flexd.config.load import parse_config
from flexd.control.journal import PlacementJournal, Segment
from flexd.daemon.leadership import FencedSnapshots, alone
from flexd.daemon.terms import highest_term, open_term
from flexd.errors import SnapshotError
from flexd.placement import Placement
from flexd.sketch.snapshot import SnapshotStore


def _fill(directory: Path) -> None:
    """What a daemon leaves."""
    SnapshotStore(directory / "snapshots", 3).save({"n": 1}, {"a": np.arange(5)})
    journal = PlacementJournal(directory / "placement")
    journal.begin(Segment("a", 3, "t"), Placement.of(np.arange(4), np.full(4, 1, np.uint8), 7))
    journal.close()
    (directory / "plans.jsonl").write_text('{"plan_id": "p"}\n')
    (directory / "dead-letters.jsonl").write_text("samples\n")
    (directory / "lock").write_text("1\n")
    (directory / "snapshots" / ".snapshot-000000000009.tmp").write_text("half")
    with closing(sqlite3.connect(directory / "migrations.sqlite")) as database:
        database.execute("pragma journal_mode=wal")
        database.execute("create table t (x)")
        database.execute("insert into t values (5)")
        database.commit()


def _check(directory: Path) -> None:
    loaded = SnapshotStore(directory / "snapshots", 3).load_newest()
    assert loaded is not None
    assert loaded.meta == {"n": 1}
    journal = PlacementJournal(directory / "placement")
    assert (journal.segment, journal.last_version, journal.truncated_bytes) == (Segment("a", 3, "t"), 7, 0)
    journal.close()
    assert (directory / "plans.jsonl").read_text() == '{"plan_id": "p"}\n'
    with closing(sqlite3.connect(directory / "migrations.sqlite")) as database:
        assert database.execute("select x from t").fetchall() == [(5,)]
    assert not (directory / "lock").exists()
    assert not (directory / "dead-letters.jsonl").exists()
    assert not (directory / "snapshots" / ".snapshot-000000000009.tmp").exists()


def test_the_first_term_goes_on_from_a_daemon_without_a_lease(tmp_path: Path) -> None:
    _fill(tmp_path)
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "lease-1").write_text("{}")
    made = open_term(tmp_path, 4)
    assert made == tmp_path / "term-0000000004"
    _check(made)
    assert not (made / "lease").exists()
    assert highest_term(tmp_path) == 4


def test_what_an_old_leader_writes_afterwards_is_its_own(tmp_path: Path) -> None:
    first = open_term(tmp_path, 1)
    _fill(first)
    second = open_term(tmp_path, 2)
    _check(second)
    # The deposed leader goes on as if nothing had happened.
    SnapshotStore(first / "snapshots", 1).save({"n": 2}, {"a": np.arange(3)})
    journal = PlacementJournal(first / "placement")
    journal.begin(Segment("b", 9, "u"), Placement.empty(99))
    journal.close()
    (first / "plans.jsonl").write_text("other\n")
    with closing(sqlite3.connect(first / "migrations.sqlite")) as database:
        database.execute("insert into t values (6)")
        database.commit()
    _check(second)


def test_a_torn_end_is_what_it_is_after_a_crash(tmp_path: Path) -> None:
    first = open_term(tmp_path, 1)
    _fill(first)
    with (first / "placement" / "placement.journal").open("ab") as file:
        file.write(b"half a fra")
    second = open_term(tmp_path, 2)
    journal = PlacementJournal(second / "placement")
    assert (journal.last_version, journal.truncated_bytes) == (7, 10)
    journal.close()


def test_a_database_that_is_none_is_left_out(tmp_path: Path) -> None:
    first = open_term(tmp_path, 1)
    (first / "migrations.sqlite").write_text("no database at all, but long enough to be looked at " * 40)
    assert not (open_term(tmp_path, 2) / "migrations.sqlite").exists()


def test_an_old_term_gets_no_directory(tmp_path: Path) -> None:
    open_term(tmp_path, 5)
    for term in (5, 4):
        with pytest.raises(SnapshotError, match="term 5 already"):
            open_term(tmp_path, term)
    assert [entry.name for entry in tmp_path.iterdir()] == ["term-0000000005"]


def test_directories_of_long_ago_and_of_failed_starts_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-2-77").mkdir()
    for term in range(1, 8):
        (open_term(tmp_path, term) / "x").write_text(str(term))
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [f"term-{term:010d}" for term in (5, 6, 7)]


def test_a_term_that_cannot_be_copied_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(open_term(tmp_path, 1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flexd.daemon.terms.shutil.copyfileobj", full)
    with pytest.raises(SnapshotError, match="No space left"):
        open_term(tmp_path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["term-0000000001"]


def test_files_are_private(tmp_path: Path) -> None:
    _fill(open_term(tmp_path, 1))
    os.chmod(tmp_path / "term-0000000001" / "plans.jsonl", 0o644)
    second = open_term(tmp_path, 2)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [second, *second.rglob("*")])


def test_a_daemon_without_a_lease_does_not_go_back_in_time(tmp_path: Path) -> None:
    config = parse_config(
        {
            "job": "j", "tables": [{"name": "item", "rows": 10, "dim": 4}],
            "stream": {"source": {"kind": "synthetic"}}, "state": {"dir": str(tmp_path)},
        }
    )  # fmt: skip
    assert alone(config).holds()
    open_term(tmp_path, 3)
    with pytest.raises(SnapshotError, match="term-0000000003"):
        alone(config)


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_a_snapshot_counts_only_if_the_lease_outlives_it(tmp_path: Path, answers: list[bool]) -> None:
    left = list(answers)
    store = FencedSnapshots(tmp_path, 3, lambda: left.pop(0))
    with pytest.raises(SnapshotError, match="leads no more"):
        store.save({}, {"a": np.arange(3)})
    assert left == []
    assert len(store.paths()) == len(answers) - 1, "one that is there all the same is not told of"
    assert FencedSnapshots(tmp_path, 3, lambda: True).save({}, {"a": np.arange(3)}).exists()
