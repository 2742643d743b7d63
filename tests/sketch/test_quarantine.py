"""Quarantined snapshots: names, the newest kept, the bounds, and deletion by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexd.core.errors import SnapshotError
from flexd.sketch.quarantine import DIRECTORY, Quarantine


def made(directory: Path, number: int, content: bytes = b"counts") -> Path:
    path = directory / f"snapshot-{number:012d}.flexd"
    path.write_bytes(content)
    return path


def names(quarantine: Quarantine) -> list[str]:
    return [kept.path.name for kept in quarantine.list()]


def test_a_snapshot_is_moved_or_linked_and_named_after_its_reason(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    moved, linked = made(tmp_path, 1), made(tmp_path, 2)
    quarantine.add(moved, "damaged", move=True)
    quarantine.add(linked, "converted", move=False)
    assert (moved.exists(), linked.exists()) == (False, True)
    assert names(quarantine) == ["snapshot-000000000002-converted.flexd", "snapshot-000000000001-damaged.flexd"]
    assert [(kept.reason, kept.bytes) for kept in quarantine.list()] == [("converted", 6), ("damaged", 6)]


def test_the_same_file_is_kept_once_and_another_one_of_its_name_gets_a_number(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    for _ in range(2):
        quarantine.add(made(tmp_path, 1), "reset", move=False)
    (tmp_path / "snapshot-000000000001.flexd").unlink()
    quarantine.add(made(tmp_path, 1, b"others"), "reset", move=True)
    assert names(quarantine) == ["snapshot-000000000001-reset-2.flexd", "snapshot-000000000001-reset.flexd"]


def test_beyond_a_bound_the_oldest_goes_and_the_newest_stays(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, keep=2)
    for number in (1, 2, 3):
        quarantine.add(made(tmp_path, number), "newer", move=True)
    assert names(quarantine) == ["snapshot-000000000003-newer.flexd", "snapshot-000000000002-newer.flexd"]
    small = Quarantine(tmp_path, keep=9, max_bytes=7)
    small.add(made(tmp_path, 4, b"more bytes than may be kept"), "newer", move=True)
    assert names(small) == ["snapshot-000000000004-newer.flexd"]


def test_one_is_deleted_by_its_name_and_no_other_file_is_listed_or_deleted(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    assert quarantine.list() == []
    quarantine.add(made(tmp_path, 1), "unusable", move=True)
    (tmp_path / DIRECTORY / "notes.txt").write_text("of an operator")
    (tmp_path / DIRECTORY / "snapshot-000000000009-eaten.flexd").write_text("of no known reason")
    assert names(quarantine) == ["snapshot-000000000001-unusable.flexd"]
    for name in ("notes.txt", "../snapshot-000000000001.flexd", "snapshot-000000000009-eaten.flexd"):
        with pytest.raises(SnapshotError, match="was quarantined"):
            quarantine.discard(name)
    assert quarantine.discard("snapshot-000000000001-unusable.flexd") == 6
    assert quarantine.list() == []


def test_a_folder_that_cannot_be_made_is_an_error_and_the_snapshot_stays(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).write_text("in the way")
    snapshot = made(tmp_path, 1)
    with pytest.raises(SnapshotError, match="cannot be quarantined"):
        Quarantine(tmp_path).add(snapshot, "damaged", move=True)
    assert snapshot.exists()
