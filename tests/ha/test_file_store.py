"""A lease in files of a shared directory: durability, damaged files, and files of others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flexd.core.errors import LeaseError
from flexd.ha.file_store import FileLeaseStore
from flexd.ha.lease_store import LeaseRecord
from tests.support.disk_order import watch_disk


def _content(record: LeaseRecord | None) -> tuple[str, int, float]:
    assert record is not None
    return record.holder, record.term, record.duration_seconds


def test_files_of_the_directory_are_private_and_few(tmp_path: Path) -> None:
    store = FileLeaseStore(tmp_path / "lease")
    record = None
    for _ in range(30):
        record = store.compare_and_set(record, "a", 1, 5.0)
    assert stat.S_IMODE((tmp_path / "lease").stat().st_mode) == 0o700
    files = list((tmp_path / "lease").iterdir())
    assert len(files) < 8
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", '{"holder": 1}', '{"holder":"a","term":0,"duration_seconds":1}', "x" * 5000,
        f'{{"holder":"{"a" * 257}","term":1,"duration_seconds":1}}',
        '{"holder":"a","term":2147483648,"duration_seconds":1}', '{"holder":"a","term":1,"duration_seconds":Infinity}',
        '{"holder":"a","term":1,"duration_seconds":86401}', '{"holder":"a","term":true,"duration_seconds":1}',
        '{"holder":"a","term":1,"duration_seconds":NaN}', '{"holder":"a","term":1,"duration_seconds":1}' + " " * 4096,
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error(tmp_path: Path, content: str) -> None:
    store = FileLeaseStore(tmp_path)
    (tmp_path / "lease-7").write_text(content)
    with pytest.raises(LeaseError, match="lease-7 is no lease"):
        store.read()


def test_other_files_of_the_directory_are_ignored(tmp_path: Path) -> None:
    store = FileLeaseStore(tmp_path)
    for name in ("lease-9.bak", "my-lease-9", "lease-", "lease-" + "9" * 19):
        (tmp_path / name).write_text("{}")
    assert store.read() is None
    assert _content(store.compare_and_set(None, "a", 1, 5.0)) == ("a", 1, 5.0)
    assert _content(store.read()) == ("a", 1, 5.0)


def test_a_record_is_durable_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileLeaseStore(tmp_path / "lease")
    done = watch_disk(monkeypatch)
    assert store.compare_and_set(None, "a", 1, 5.0) is not None
    assert done[0].startswith("sync .")
    assert done[1:] == ["name lease-1", "sync lease"]
    assert os.listdir(tmp_path / "lease") == ["lease-1"], "nothing half made stays"


def test_a_record_removed_during_a_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileLeaseStore(tmp_path)
    record = store.compare_and_set(None, "a", 1, 5.0)
    listed = [9, 9, 1]
    monkeypatch.setattr(store, "_highest", lambda: listed.pop(0))
    assert store.read() == record
    monkeypatch.setattr(store, "_highest", lambda: 9)
    with pytest.raises(LeaseError, match="changes faster"):
        store.read()


def test_old_unfinished_files_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / ".1-a.tmp", tmp_path / ".2-b.tmp"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))
    FileLeaseStore(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LeaseError, match="cannot be made"):
        FileLeaseStore(tmp_path / "file" / "lease")
