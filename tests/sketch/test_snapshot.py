"""Snapshot files: atomic, checked, and kept when the disk is full or a file is damaged."""

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from flexd.core.errors import SnapshotError
from flexd.sketch import snapshot
from flexd.sketch.snapshot import SnapshotStore

ARRAYS = {
    "a": np.arange(12, dtype=np.uint32).reshape(3, 4),
    "empty": np.empty(0, dtype=np.int64),
    "f": np.array([1.5, np.nan, -0.0]),
    "b": np.arange(5, dtype=np.uint8),
}
META = {"positions": {"p0": 2**60, "p1": 0}, "text": "ü", "none": None}


def _equal(arrays):
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert arrays[name].tobytes() == array.tobytes()
        assert arrays[name].flags.writeable


def test_round_trip_mode_and_the_newest_ones_across_restarts(tmp_path):
    store = SnapshotStore(tmp_path / "state", 2)
    assert store.paths() == []
    path = store.save(META, ARRAYS)
    assert store.paths() == [path]
    meta, arrays = snapshot.read(path)
    assert meta == META
    _equal(arrays)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for number in range(3):
        SnapshotStore(tmp_path / "state", 2).save({"number": number}, {})
    paths = store.paths()
    assert sorted(entry.name for entry in (tmp_path / "state").iterdir()) == sorted(path.name for path in paths)
    assert [snapshot.read(path)[0]["number"] for path in paths] == [2, 1]


def test_every_missing_changed_or_further_byte_is_detected(tmp_path):
    path = SnapshotStore(tmp_path, 3).save(META, ARRAYS)
    whole = path.read_bytes()
    damaged = [whole + b"\0", *(whole[:length] for length in range(len(whole)))]
    damaged += [whole[:i] + bytes([byte ^ 1 << i % 8]) + whole[i + 1 :] for i, byte in enumerate(whole)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=str(path)):
            snapshot.read(path)


def test_one_that_is_marked_unusable_is_in_no_rotation_and_only_the_newest_stays(tmp_path):
    store = SnapshotStore(tmp_path, 2)
    for number in range(2):
        path = store.save({"n": number}, {})
        aside = store.mark_unusable(path)
        assert store.paths() == []
        assert snapshot.read(aside)[0] == {"n": number}
    assert list(tmp_path.iterdir()) == [aside]
    for number in range(4):
        store.save({"later": number}, {})
    assert len(store.paths()) == 2
    assert aside.exists()
    with pytest.raises(SnapshotError):
        store.mark_unusable(path)


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_failing_system_calls_leave_the_old_snapshot(tmp_path, monkeypatch, call):
    store = SnapshotStore(tmp_path, 1)
    store.save({"old": 1}, ARRAYS)

    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(SnapshotError):
            store.save({"new": 1}, ARRAYS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot-000000000001.flexd"]
    assert snapshot.read(store.paths()[0])[0] == {"old": 1}


def test_a_snapshot_is_durable_before_it_is_renamed(tmp_path, monkeypatch):
    """A power cut between any two system calls leaves a whole snapshot: data is synced before the rename."""
    calls = []
    for owner, name in ((os, "fsync"), (Path, "replace")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _n=name, _r=real: (calls.append(_n), _r(*args))[1])
    SnapshotStore(tmp_path, 1).save(META, ARRAYS)
    assert calls == ["fsync", "replace", "fsync"]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / "snapshot-000000000001.flexd.tmp").write_bytes(b"half")
    (tmp_path / "other.txt").write_text("kept")
    SnapshotStore(tmp_path, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["other.txt"]
