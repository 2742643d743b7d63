"""The state's file: damaged, locked and full disks, and files of another program."""

from __future__ import annotations

import hashlib
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon.migration import ActionRecord, MigrationRecord, Transition, VerificationReport
from flexd.core.errors import SnapshotError
from flexd.operations import state_database
from flexd.operations.decisions import Decisions, HeldPlan, Pause, ThrottleOverride
from flexd.operations.state_database import NAME, StateDatabase

ADD = "INSERT INTO actions (document) VALUES (?)"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], StateDatabase]]:
    made: list[StateDatabase] = []

    def one() -> StateDatabase:
        made.append(StateDatabase(tmp_path / NAME))
        return made[-1]

    yield one
    for file in made:
        file.close()


def documents(file: StateDatabase) -> list[str]:
    return [document for (document,) in file.read("SELECT document FROM actions ORDER BY serial")]


def test_a_write_is_whole_and_kept(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    file = make()
    assert documents(file) == []
    assert not (tmp_path / NAME).exists(), "a reader makes no file"
    with pytest.raises(SnapshotError, match="cannot be written"):
        file.write([(ADD, ("a",)), ("INSERT INTO actions (document) VALUES (NULL)", ())])
    assert documents(file) == []
    file.write([(ADD, ("b",)), (ADD, ("c",))])
    file.close()
    assert documents(make()) == ["b", "c"]
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def _random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(8_192))


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5_000])


def _other_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE migrations (id); PRAGMA user_version = 1")


@pytest.mark.parametrize("harm", [_random_bytes, _truncated, _other_program])
def test_an_unusable_file_is_quarantined(
    make: Callable[[], StateDatabase], tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    for text in ("old", "newer"):
        file = make()
        file.write([(ADD, (text * 5_000,))])
        file.close()
        harm(tmp_path / NAME)
        harmed = (tmp_path / NAME).read_bytes()
        again = make()
        assert documents(again) == []
        again.close()
        assert (tmp_path / f"{NAME}.unusable").read_bytes() == harmed
    assert len(list(tmp_path.glob("*.unusable*"))) == 1, "one is kept, not one a fault"


def test_a_file_of_format_1_keeps_its_decisions(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        tables = "".join(
            f"CREATE TABLE {'decisions' if name == 'documents' else name} ({columns});"
            for name, columns in state_database._TABLES.items()
        )
        connection.executescript(f"{tables} INSERT INTO decisions VALUES ('in force', 'x'); PRAGMA user_version = 1")
    before = (tmp_path / NAME).read_bytes()
    reader = StateDatabase(tmp_path / NAME, read_only=True)
    with pytest.raises(SnapshotError, match="of format 1, not 2 - start the daemon once"):
        reader.document("in force")
    assert (tmp_path / NAME).read_bytes() == before
    assert make().document("in force") == "x"
    assert reader.document("in force") == "x"
    reader.close()


STORED = (MigrationRecord, Transition, VerificationReport, ActionRecord, Decisions, Pause, ThrottleOverride, HeldPlan)


def test_what_is_stored_does_not_change_without_a_new_format() -> None:
    """After a changed field: raise ``FORMAT``, and change older documents in ``_UPGRADES`` where defaults do not."""
    fields = sorted(
        f"{model.__name__}.{name}: {field.annotation}" for model in STORED for name, field in model.model_fields.items()
    )
    # A class that moves to another module stores the same.
    text = re.sub(r"flexd(\.\w+)*\.", "", "\n".join(fields))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert {2: "3d7da59971d8"}[state_database.FORMAT] == digest


def test_a_locked_file_is_an_error_and_not_quarantined(
    make: Callable[[], StateDatabase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_database, "BUSY_SECONDS", 0.01)
    file = make()
    file.write([(ADD, ("a",))])
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SnapshotError, match="locked"):
            file.write([(ADD, ("b",))])
        assert documents(file) == ["a"]
    file.write([(ADD, ("c",))])
    assert (documents(file), list(tmp_path.glob("*.unusable"))) == (["a", "c"], [])


def test_a_path_that_is_no_file_is_an_error(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    file = make()
    with pytest.raises(SnapshotError, match=f"{NAME} cannot be read"):
        documents(file)
    (tmp_path / NAME).rmdir()
    file.write([(ADD, ("a",))])
    assert documents(file) == ["a"]
