"""The files of a state directory: formats checked together, renamed with what belongs to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flexd.control.daemon.journal import PlacementJournal
from flexd.core.durable import UNUSABLE
from flexd.core.errors import StateVersionError, UnusableStateError
from flexd.daemon.state_files import FILES, check_files, mark_unusable
from flexd.operations.decisions import DecisionFile
from flexd.operations.state_database import StateDatabase

BY_NAME = {file.name: file for file in FILES}


def test_side_files_go_with_their_file(tmp_path: Path) -> None:
    for suffix in ("", "-journal"):
        (tmp_path / f"state.sqlite{suffix}").write_text(suffix)
    mark_unusable(tmp_path, BY_NAME["state.sqlite"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"state.sqlite{UNUSABLE}": "", f"state.sqlite{UNUSABLE}-journal": "-journal",
    }  # fmt: skip


def _newer_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 3")


def _newer_journal(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"FLEXDPJ2" + bytes(8))


OPENERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "placement/placement.journal": (_newer_journal, lambda state: PlacementJournal(state / "placement")),
    "state.sqlite": (_newer_database, lambda state: DecisionFile(StateDatabase(state / "state.sqlite"))),
}  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_newer_file_is_refused_by_name_and_unchanged(tmp_path: Path, file) -> None:
    make_newer, read = OPENERS[file.name]
    make_newer(tmp_path / file.name)
    before = (tmp_path / file.name).read_bytes()
    with pytest.raises(StateVersionError, match=f"{file.name}.*newer flexd"):
        read(tmp_path)
    with pytest.raises(UnusableStateError, match=f"{file.name}.*newer flexd"):
        check_files(tmp_path, start_empty=False)
    assert (tmp_path / file.name).read_bytes() == before
    check_files(tmp_path, start_empty=True)
    assert not (tmp_path / file.name).exists()
    assert (tmp_path / f"{file.name}{UNUSABLE}").read_bytes() == before
