"""The state's file: damaged, locked and full disks, and files of another program."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flexd.core.errors import SnapshotError
from flexd.operations import state_file
from flexd.operations.state_file import NAME, StateFile

ADD = "INSERT INTO actions (document) VALUES (?)"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], StateFile]]:
    made: list[StateFile] = []

    def one() -> StateFile:
        made.append(StateFile(tmp_path / NAME))
        return made[-1]

    yield one
    for file in made:
        file.close()


def documents(file: StateFile) -> list[str]:
    return [document for (document,) in file.read("SELECT document FROM actions ORDER BY serial")]


def test_a_write_is_whole_and_kept(make: Callable[[], StateFile], tmp_path: Path) -> None:
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
    make: Callable[[], StateFile], tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    for text in ("old", "newer"):
        file = make()
        file.write([(ADD, (text * 5_000,))])
        file.close()
        harm(tmp_path / NAME)
        harmed = (tmp_path / NAME).read_bytes()
        again = make()
        assert documents(again) == []
        assert again.quarantined == 1
        again.close()
        assert (tmp_path / f"{NAME}.unusable").read_bytes() == harmed
    assert len(list(tmp_path.glob("*.unusable*"))) == 1, "one is kept, not one a fault"


def test_a_locked_file_is_an_error_and_not_quarantined(
    make: Callable[[], StateFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "BUSY_SECONDS", 0.01)
    file = make()
    file.write([(ADD, ("a",))])
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SnapshotError, match="locked"):
            file.write([(ADD, ("b",))])
        assert documents(file) == ["a"]
    file.write([(ADD, ("c",))])
    assert (documents(file), file.quarantined) == (["a", "c"], 0)


def test_a_path_that_is_no_file_is_an_error(make: Callable[[], StateFile], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    file = make()
    with pytest.raises(SnapshotError, match=f"{NAME} cannot be read"):
        documents(file)
    (tmp_path / NAME).rmdir()
    file.write([(ADD, ("a",))])
    assert documents(file) == ["a"]
