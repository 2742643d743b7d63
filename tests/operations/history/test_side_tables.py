"""Records beside the format of the history: one of a kind a migration, and none without the migration."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from flexd.operations.history.history import MigrationHistory
from flexd.operations.history.records import EffectRecord, VerdictRecord
from flexd.operations.history.side_tables import EFFECTS, VERDICTS
from tests.operations.test_effects import FLUSH_SECONDS, Recorded

VERDICT = VerdictRecord("m1", 1.5e9, "slower", 0.05, 0.01, 0.09, 12, 0.5, 640, True, "5.0 % slower")
UNKNOWN = replace(VERDICT, state="interrupted", change=None, low=None, high=None, pairs=0, rolled_back=False)


def file_of(tmp_path: Path) -> Path:
    return tmp_path / "migrations.sqlite"


def written(it: Recorded, verdict: VerdictRecord) -> None:
    it.history.record_verdict(verdict)
    assert it.history.flush(FLUSH_SECONDS)


@pytest.mark.parametrize("verdict", [VERDICT, UNKNOWN])
def test_a_verdict_is_kept_as_it_was(tmp_path: Path, verdict: VerdictRecord) -> None:
    it = Recorded(file_of(tmp_path))
    it.settle(it.start("m1"))
    written(it, VERDICT)
    written(it, verdict)
    it.stop()
    later = MigrationHistory(file_of(tmp_path), 100)
    assert later.newest_verdict() == verdict, "before the file is opened for writing"
    later.start()
    assert later.verdicts(["m1", "m2"]) == {"m1": verdict}
    assert later.stop(FLUSH_SECONDS)


def test_the_newest_verdict_is_that_of_the_newest_migration(tmp_path: Path) -> None:
    it = Recorded(file_of(tmp_path))
    assert it.history.newest_verdict() is None
    for name in ("m1", "m2", "m3"):
        it.settle(it.start(name))
    written(it, replace(VERDICT, migration_id="m2"))
    written(it, VERDICT)
    newest = it.history.newest_verdict()
    assert newest is not None
    assert newest.migration_id == "m2"
    it.stop()


@pytest.mark.parametrize("table", [EFFECTS, VERDICTS], ids=lambda table: table.name)
def test_a_file_without_the_table_has_no_records_and_gains_it(tmp_path: Path, table) -> None:  # type: ignore[no-untyped-def]
    first = Recorded(file_of(tmp_path))
    first.settle(first.start("m1", predicted=0.01))
    written(first, VERDICT)
    first.stop()
    with closing(sqlite3.connect(file_of(tmp_path))) as file:
        file.execute(f"DROP TABLE {table.name}")
        assert table.of_migrations(file, ["m1"]) == {}
        assert table.newest(file) is None
    second = Recorded(file_of(tmp_path))
    second.history.record_effect(EffectRecord("m1", 0.02, None, None, 0, None, None, 0))
    written(second, VERDICT)
    assert second.history.effects(["m1"])["m1"].predicted_saving_seconds == 0.02
    assert second.history.verdicts(["m1"]) == {"m1": VERDICT}
    assert second.history.snapshot.quarantined == 0
    second.stop()


def test_a_verdict_goes_with_its_migration(tmp_path: Path) -> None:
    it = Recorded(file_of(tmp_path), keep=1)
    it.settle(it.start("m1"))
    written(it, VERDICT)
    it.settle(it.start("m2"))
    written(it, VERDICT)
    it.stop()
    with closing(sqlite3.connect(file_of(tmp_path))) as file:
        assert file.execute("SELECT COUNT(*) FROM verdicts").fetchone() == (0,)
