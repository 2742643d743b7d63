"""Every term has a directory that begins as a copy of the one before."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.core.errors import SnapshotError
from flexd.core.placement import Placement
from flexd.ha import term_directories as terms
from flexd.ha.term_directories import highest_term, open_term_directory
from flexd.sketch.snapshot import SnapshotStore
from tests.support.disk_order import watch_disk


def _fill(directory: Path) -> None:
    """Write the files of a daemon."""
    SnapshotStore(directory / "snapshots", 3).save({"n": 1}, {"a": np.arange(5)})
    journal = PlacementJournal(directory / "placement")
    journal.begin(Segment("a", 3, "t"), Placement.of(np.arange(4), np.full(4, 1, np.uint8), 7))
    journal.close()
    (directory / "plans.jsonl").write_text('{"plan_id": "p"}\n')
    (directory / "dead-letters.jsonl").write_text("samples\n")
    (directory / "lock").write_text("1\n")
    (directory / "snapshots" / ".snapshot-000000000009.tmp").write_text("half")
    (directory / "decisions.json.tmp").write_text("half")
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
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["migrations.sqlite", "placement", "plans.jsonl", "snapshots"]
    assert [path.suffix for path in (directory / "snapshots").iterdir()] == [".flexd"]


def test_the_first_term_continues_from_a_daemon_without_a_lease(tmp_path: Path) -> None:
    _fill(tmp_path)
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "lease-1").write_text("{}")
    made = open_term_directory(tmp_path, 4)
    assert made == tmp_path / "term-0000000004"
    _check(made)
    assert not (made / "lease").exists()
    assert highest_term(tmp_path) == 4


def test_later_writes_of_an_old_leader_do_not_reach_the_new_term(tmp_path: Path) -> None:
    first = open_term_directory(tmp_path, 1)
    _fill(first)
    second = open_term_directory(tmp_path, 2)
    _check(second)
    # The old leader continues to write.
    SnapshotStore(first / "snapshots", 1).save({"n": 2}, {"a": np.arange(3)})
    journal = PlacementJournal(first / "placement")
    journal.begin(Segment("b", 9, "u"), Placement.empty(99))
    journal.close()
    (first / "plans.jsonl").write_text("other\n")
    with closing(sqlite3.connect(first / "migrations.sqlite")) as database:
        database.execute("insert into t values (6)")
        database.commit()
    _check(second)


def test_logs_of_a_database_are_merged_and_not_copied(tmp_path: Path) -> None:
    first = open_term_directory(tmp_path, 1)
    _fill(first)
    with closing(sqlite3.connect(first / "migrations.sqlite")) as writing:
        writing.execute("insert into t values (6)")
        writing.commit()
        (first / "other.sqlite-journal").write_text("of an unfinished write")
        assert (first / "migrations.sqlite-wal").stat().st_size > 0
        second = open_term_directory(tmp_path, 2)
    with closing(sqlite3.connect(second / "migrations.sqlite")) as database:
        assert database.execute("select x from t").fetchall() == [(5,), (6,)]
    assert list(second.glob("*.sqlite*")) == [second / "migrations.sqlite"]


def test_a_link_to_somewhere_else_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    first = open_term_directory(tmp_path / "state", 1)
    (tmp_path / "secret").write_text("not for everybody")
    (first / "file").symlink_to(tmp_path / "secret")
    (first / "directory").symlink_to(tmp_path)
    (first / "loop").symlink_to(first)
    assert list(open_term_directory(tmp_path / "state", 2).iterdir()) == []


def test_a_term_is_durable_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(open_term_directory(tmp_path, 1))
    done = watch_disk(monkeypatch)
    open_term_directory(tmp_path, 2)
    named = done.index("name term-0000000002")
    unfinished = f".unfinished-2-{os.getpid()}"
    synced = {"sync plans.jsonl", "sync placement.journal", "sync placement", "sync snapshots", f"sync {unfinished}"}
    assert synced <= set(done[:named])
    assert done[named + 1 :] == [f"sync {tmp_path.name}"]


def test_an_unfinished_directory_of_this_process_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / f".unfinished-2-{os.getpid()}"
    left.mkdir()
    (left / "half").write_text("x")
    assert list(open_term_directory(tmp_path, 2).iterdir()) == []


def test_an_unfinished_directory_of_another_process_is_kept(tmp_path: Path) -> None:
    """It may be of a later term, or of the same one, which only one process can complete."""
    for name in (".unfinished-3-77", ".unfinished-4-77", ".unfinished-9-77", ".unfinished-x"):
        (tmp_path / name).mkdir()
    open_term_directory(tmp_path, 4)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [".unfinished-4-77", ".unfinished-9-77", ".unfinished-x", "term-0000000004"]


def test_a_term_whose_directory_another_process_fills_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(open_term_directory(tmp_path, 1))
    copy = terms._copy_file

    def meanwhile(source: Path, target: Path) -> None:
        (tmp_path / "term-0000000002").mkdir(exist_ok=True)
        (tmp_path / "term-0000000002" / "theirs").touch()
        copy(source, target)

    monkeypatch.setattr(terms, "_copy_file", meanwhile)
    with pytest.raises(SnapshotError, match="cannot be copied to term-0000000002"):
        open_term_directory(tmp_path, 2)
    assert [path.name for path in (tmp_path / "term-0000000002").iterdir()] == ["theirs"]
    assert list(tmp_path.glob(".unfinished-*")) == []


def test_a_file_removed_while_it_is_copied_is_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_term_directory(tmp_path, 1)
    _fill(first)
    copy = terms._copy_file

    def meanwhile(source: Path, target: Path) -> None:
        if source.suffix in (".flexd", ".jsonl"):
            source.unlink()
        copy(source, target)

    monkeypatch.setattr(terms, "_copy_file", meanwhile)
    second = open_term_directory(tmp_path, 2)
    assert not (second / "plans.jsonl").exists()
    assert list((second / "snapshots").iterdir()) == []
    assert (second / "placement" / "placement.journal").exists()


def test_where_files_cannot_be_linked_snapshots_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(open_term_directory(tmp_path, 1))

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    _check(open_term_directory(tmp_path, 2))


def test_a_torn_end_of_the_journal_is_truncated_as_after_a_crash(tmp_path: Path) -> None:
    first = open_term_directory(tmp_path, 1)
    _fill(first)
    with (first / "placement" / "placement.journal").open("ab") as file:
        file.write(b"half a fra")
    second = open_term_directory(tmp_path, 2)
    journal = PlacementJournal(second / "placement")
    assert (journal.last_version, journal.truncated_bytes) == (7, 10)
    journal.close()


def test_a_malformed_database_is_omitted(tmp_path: Path) -> None:
    first = open_term_directory(tmp_path, 1)
    (first / "migrations.sqlite").write_text("no database at all, but long enough to be looked at " * 40)
    assert not (open_term_directory(tmp_path, 2) / "migrations.sqlite").exists()


def test_other_names_are_no_terms(tmp_path: Path) -> None:
    for name in ("term-9", "term-00000000099", "term-0000000009.old", "my-term-0000000009"):
        (tmp_path / name).mkdir()
    assert highest_term(tmp_path) == 0


def test_an_old_term_gets_no_directory(tmp_path: Path) -> None:
    open_term_directory(tmp_path, 5)
    for term in (5, 4):
        with pytest.raises(SnapshotError, match="term 5 already"):
            open_term_directory(tmp_path, term)
    assert [entry.name for entry in tmp_path.iterdir()] == ["term-0000000005"]


def test_old_terms_and_unfinished_directories_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-2-77").mkdir()
    for term in range(1, 8):
        made = open_term_directory(tmp_path, term)
        assert term == 1 or (made / "x").read_text() == str(term - 1), "it continues from the newest term"
        (made / "x").write_text(str(term))
    assert highest_term(tmp_path) == 7
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [f"term-{term:010d}" for term in (5, 6, 7)]


def test_a_term_that_cannot_be_copied_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(open_term_directory(tmp_path, 1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flexd.ha.term_directories.shutil.copyfileobj", full)
    with pytest.raises(SnapshotError, match="No space left"):
        open_term_directory(tmp_path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["term-0000000001"]


def test_files_are_private(tmp_path: Path) -> None:
    _fill(open_term_directory(tmp_path, 1))
    os.chmod(tmp_path / "term-0000000001" / "plans.jsonl", 0o644)
    second = open_term_directory(tmp_path, 2)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [second, *second.rglob("*")])
