"""The files of a state directory: formats checked together, renamed with what belongs to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.core.errors import SnapshotError, UnusableStateError
from flexd.daemon.state_files import FILES, IMPORTING, NEWER, check_files, newer_files, quarantine_state_file

BY_NAME = {file.name: file for file in FILES}


def write_newer(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_text(json.dumps({"format": 99}))


def test_an_empty_directory_has_nothing_to_refuse(tmp_path: Path) -> None:
    assert newer_files(tmp_path) == {}
    check_files(tmp_path, start_empty=False)
    assert list(tmp_path.iterdir()) == []


def test_all_newer_files_are_named_and_none_is_changed(tmp_path: Path) -> None:
    write_newer(tmp_path, "decisions.json", "poison-offsets.json")
    with pytest.raises(UnusableStateError, match=r"decisions\.json.*; .*poison-offsets\.json"):
        check_files(tmp_path, start_empty=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decisions.json", "poison-offsets.json"]


def test_a_start_from_empty_renames_the_newer_ones_and_leaves_the_others(tmp_path: Path) -> None:
    write_newer(tmp_path, "poison-offsets.json")
    (tmp_path / "plans.jsonl").write_text("{}\n")
    check_files(tmp_path, start_empty=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plans.jsonl", f"poison-offsets.json{NEWER}"]


def test_an_unfinished_import_is_refused_also_by_a_start_from_empty(tmp_path: Path) -> None:
    (tmp_path / IMPORTING).write_text("")
    for start_empty in (False, True):
        with pytest.raises(UnusableStateError, match="import"):
            check_files(tmp_path, start_empty=start_empty)


def test_side_files_go_with_their_file(tmp_path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"migrations.sqlite{suffix}").write_text(suffix)
    quarantine_state_file(tmp_path, BY_NAME["migrations.sqlite"], ".old")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "migrations.sqlite.old": "", "migrations.sqlite.old-wal": "-wal", "migrations.sqlite.old-shm": "-shm",
    }  # fmt: skip


def test_a_file_that_cannot_be_renamed_is_an_error(tmp_path: Path) -> None:
    write_newer(tmp_path, "decisions.json")
    (tmp_path / f"decisions.json{NEWER}").mkdir()
    with pytest.raises(SnapshotError, match="cannot be renamed"):
        quarantine_state_file(tmp_path, BY_NAME["decisions.json"])
