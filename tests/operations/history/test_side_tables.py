"""Records beside the format of the history: one of a kind a migration, and none without the migration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexd.operations.history.history import MigrationHistory
from flexd.operations.history.records import VerdictRecord
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
