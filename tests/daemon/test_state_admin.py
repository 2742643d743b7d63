"""``flexd state``: reset, restore, discard, export and import over a folder with the files of a daemon.

A SIGKILL at any step leaves the old state, the new one, or a folder that no daemon starts from until the command was
run again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flexd.config.load import load_config
from flexd.config.model import Config
from flexd.core.errors import SnapshotError, StateLockedError, StateVersionError, UnusableStateError
from flexd.core.fault_points import POINTS, POINTS_OF_A_JOB, VARIABLE
from flexd.daemon import factory, state_admin, state_archive
from flexd.daemon.state_files import IMPORTING, check_files
from flexd.daemon.state_lock import StateLock
from flexd.ingest.restore import RestoredState, restore
from flexd.sketch.quarantine import KEEP, Quarantine
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.offsets_in_work import RECORD_NAME, OffsetsInWork
from tests.support.disk_order import watch_disk
from tests.support.repository import ROOT, child_environment

FILES = ROOT / "tests" / "state" / "formats" / "53a69c5"
TABLES = [
    {"name": "users", "rows": 500, "dim": 8, "optimizer": "adam"},
    {"name": "items", "rows": 20_000, "dim": 8},
    {"name": "clicks", "rows": 3_000_000, "dim": 16},
]
COUNTED = 3600


def write_config(directory: Path, **more: object) -> Path:
    settings = {
        "job": "ads", "tables": TABLES, "stream": {"source": {"kind": "synthetic"}},
        "sketch": {"memory_bytes": 1_048_576, "half_life_seconds": 600, "max_hot_rows": 50},
        "state": {"dir": str(directory / "state")}, **more,
    }  # fmt: skip
    path = directory / "flexd.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a configuration whose state directory has the files of a daemon."""
    state = tmp_path / "state"
    shutil.copytree(FILES, state, ignore=shutil.ignore_patterns("plain", "logarithmic", "expected.json"))
    shutil.copytree(FILES / "logarithmic" / "snapshots", state / "snapshots")
    return write_config(tmp_path)


@pytest.fixture
def config(file: Path) -> Config:
    return load_config(file, {})


def started(config: Config, **more: bool) -> RestoredState:
    """Return the counters that a daemon would start from."""
    check_files(config.state.dir, start_empty=False)
    store = SnapshotStore(config.state.dir / "snapshots", 3)
    return restore(store, config.keyspace().tables, factory.sketch_settings(config), **more)


def names(config: Config) -> list[str]:
    return [kept.path.name for kept in Quarantine(config.state.dir / "snapshots").list()]


def test_the_report_says_what_a_start_would_keep(config: Config) -> None:
    report = state_admin.report(config)
    assert report.starts
    assert [(saved.format, saved.accesses, saved.problem) for saved in report.snapshots] == [(4, 3 * COUNTED, "")]
    assert {outcome.table: outcome.outcome for outcome in report.preview.outcomes}["users"] == "kept"
    assert names(config) == []
    newest = config.state.dir / "snapshots" / "snapshot-000000000001.flexd"
    newest.write_bytes(newest.read_bytes()[:-1])
    report = state_admin.report(config)
    assert not report.starts
    assert "damaged" in report.preview.refused[0] or "bytes of" in report.preview.refused[0]
    assert newest.exists()


@pytest.mark.parametrize("keep_positions", [False, True])
def test_a_reset_starts_empty_and_can_be_undone(config: Config, keep_positions: bool) -> None:
    before = started(config)
    state_admin.reset(config, keep_positions=keep_positions)
    empty = started(config)
    assert sum(empty.sketches.samples_by_table()) == 0
    assert empty.positions == (before.positions if keep_positions else None)
    name = "snapshot-000000000001-reset.flexd"
    assert name in names(config)
    state_admin.restore(config, name)
    again = started(config)
    assert again.sketches.samples_by_table() == before.sketches.samples_by_table()
    assert again.positions == before.positions


def test_discarding_deletes_only_what_it_names(config: Config) -> None:
    state_admin.reset(config, keep_positions=True)
    started(config)
    with pytest.raises(SnapshotError, match="no snapshot 'x'"):
        state_admin.discard(config, ["x"])
    with pytest.raises(SnapshotError, match="no snapshot"):
        state_admin.discard(config, ["../snapshot-000000000002.flexd"])
    assert state_admin.discard(config, []) == ["snapshot-000000000001-reset.flexd"]
    assert names(config) == []
    assert started(config).path is not None


def test_a_running_daemon_is_not_disturbed(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_admin, "LOCK_WAIT_SECONDS", 0.0)
    archive = tmp_path / "a.flexd-state"
    lock = StateLock(config.state.dir)
    state_archive.export_state(config, archive)
    for change in (
        lambda: state_admin.reset(config, keep_positions=False),
        lambda: state_admin.restore(config, "x"),
        lambda: state_archive.import_state(config, archive, replace=True),
    ):
        with pytest.raises(StateLockedError):
            change()
    # A daemon that only looks whether it can start has the lock for a moment.
    monkeypatch.setattr(state_admin, "LOCK_WAIT_SECONDS", 60.0)
    threading.Timer(0.2, lock.release).start()
    state_admin.reset(config, keep_positions=False)


def test_quarantined_snapshots_are_bounded_and_outlive_the_rotation(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2)
    for number in range(12):
        store.quarantine.add(store.save({"n": number}, {}), "emptied", move=number % 2 == 0)
    kept = store.quarantine.list()
    assert len(kept) == KEEP
    assert "snapshot-000000000012-emptied.flexd" in kept[0].path.name or kept[0].path.exists()
    for number in range(5):
        store.save({"later": number}, {})
    assert store.quarantine.list() == kept
    small = Quarantine(tmp_path, max_bytes=1)
    newest = small.add(store.paths()[0], "reset", move=False)
    assert [each.path for each in small.list()] == [newest], "the newest one stays whatever its size"


def test_a_snapshot_is_in_the_quarantine_before_it_leaves_the_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(tmp_path, 2)
    path = store.save({}, {})
    done = watch_disk(monkeypatch)
    store.quarantine.add(path, "damaged", move=True)
    assert done.index("sync quarantine") < len(done) - 1
    assert done[-1] == f"sync {tmp_path.name}"


def test_an_archive_restores_on_another_machine(config: Config, tmp_path: Path) -> None:
    archive = tmp_path / "backup.flexd-state"
    manifest = state_archive.export_state(config, archive)
    assert set(manifest.files) == {
        "snapshots/snapshot-000000000001.flexd", "placement/placement.journal", "migrations.sqlite", "decisions.json",
        "plans.jsonl",
    }  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    there = load_config(write_config(other), {})
    state_archive.import_state(there, archive, replace=False)
    assert started(there).sketches.samples_by_table() == (COUNTED,) * 3
    for name in ("placement/placement.journal", "decisions.json", "plans.jsonl"):
        assert (there.state.dir / name).read_bytes() == (config.state.dir / name).read_bytes()
    assert all(path.stat().st_mode & 0o077 == 0 for path in there.state.dir.rglob("*"))
    with pytest.raises(SnapshotError, match="has state"):
        state_archive.import_state(there, archive, replace=False)
    state_archive.import_state(there, archive, replace=True)
    assert "snapshot-000000000001-replaced.flexd" in names(there)
    assert (there.state.dir / "decisions.json.replaced").exists()


def test_offsets_at_which_the_daemon_died_are_shown_and_move_with_the_state(config: Config, tmp_path: Path) -> None:
    for partition, times in (("clicks/0", 2), ("clicks/1", 1)):
        for _ in range(times):
            OffsetsInWork(config.state.dir).begin(partition, 5, 9)
    OffsetsInWork(config.state.dir).close()
    archive = tmp_path / "backup.flexd-state"
    assert RECORD_NAME in state_archive.export_state(config, archive).files
    other = tmp_path / "other"
    other.mkdir()
    there = load_config(write_config(other), {})
    state_archive.import_state(there, archive, replace=False)
    shown = state_admin.report(there)
    assert shown.starts
    assert [(each.partition, each.first, each.last, each.deaths) for each in shown.deadly_offsets] == [
        ("clicks/0", 5, 9, 2), ("clicks/1", 5, 9, 1),
    ]  # fmt: skip
    work = OffsetsInWork(there.state.dir)
    assert not work.begin("clicks/0", 5, 9)
    assert work.begin("clicks/1", 5, 9)
    work.close()
    (there.state.dir / RECORD_NAME).write_text("[")
    assert state_admin.report(there).deadly_offsets == ()


def test_an_archive_that_was_cut_or_changed_is_refused(config: Config, tmp_path: Path) -> None:
    archive = tmp_path / "backup.flexd-state"
    state_archive.export_state(config, archive)
    whole = archive.read_bytes()
    before = {path: path.stat().st_mtime_ns for path in config.state.dir.rglob("*") if path.name != "lock"}
    changed = bytearray(whole)
    changed[len(whole) // 3] ^= 1
    for content in (b"", whole[: len(whole) // 2], whole[:-11_000], bytes(changed), b"PK" + whole):
        archive.write_bytes(content)
        with pytest.raises(SnapshotError):
            state_archive.import_state(config, archive, replace=True)
    left = {path: path.stat().st_mtime_ns for path in config.state.dir.rglob("*") if path.name != "lock"}
    assert {path: left[path] for path in before if path != config.state.dir} == {
        path: at for path, at in before.items() if path != config.state.dir
    }


def _evil(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    archive = tmp_path / "evil.flexd-state"
    with tarfile.open(archive, "w") as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return archive


def _member(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


@pytest.mark.parametrize(
    "member",
    [
        _member("../evil"), _member("/etc/passwd"), _member("snapshots/../../x"), _member("lock"),
        _member("decisions.json", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        _member("snapshots", b"", type=tarfile.DIRTYPE),
        _member("flexd-state.json", json.dumps({"format": 1, "files": {}}).encode()),
        _member("flexd-state.json", b"[" * 100_000),
        _member("snapshots/snapshot-000000000001.flexd", b"", type=tarfile.LNKTYPE, linkname="decisions.json"),
    ],
    ids=range(9),
)  # fmt: skip
def test_nothing_unexpected_is_unpacked(config: Config, tmp_path: Path, member: tuple[tarfile.TarInfo, bytes]) -> None:
    archive = _evil(tmp_path, member)
    with pytest.raises(SnapshotError):
        state_archive.import_state(config, archive, replace=True)
    assert not (tmp_path / "evil").exists()
    assert started(config).sketches.samples_by_table() == (COUNTED,) * 3


def test_an_archive_of_a_newer_flexd_is_refused(config: Config, tmp_path: Path) -> None:
    content = json.dumps({"format": 2, "new": []}).encode()
    with pytest.raises(StateVersionError, match="newer flexd"):
        state_archive.import_state(config, _evil(tmp_path, _member("flexd-state.json", content)), replace=True)


def test_an_archive_that_the_configuration_cannot_use_is_refused(config: Config, tmp_path: Path) -> None:
    archive = tmp_path / "backup.flexd-state"
    started(config)
    state_archive.export_state(config, archive)
    other = tmp_path / "other"
    other.mkdir()
    there = load_config(write_config(other, tables=[{"name": "users", "rows": 7, "dim": 8}]), {})
    with pytest.raises(UnusableStateError, match="cannot be continued from"):
        state_archive.import_state(there, archive, replace=False)
    assert not (there.state.dir / IMPORTING).exists()


def _same(config: Config) -> None:
    assert started(config).sketches.samples_by_table() == (COUNTED,) * 3


def _refused(config: Config) -> None:
    with pytest.raises(UnusableStateError, match="did not end"):
        check_files(config.state.dir, start_empty=True)


KILLS: list[tuple[str, tuple[str, ...], Callable[[Config], None]]] = [
    ("export.written", ("export", "ARCHIVE2"), _same),
    ("import.extracted", ("import", "ARCHIVE", "--replace"), _same),
    ("import.moving", ("import", "ARCHIVE", "--replace"), _refused),
    ("import.moved", ("import", "ARCHIVE", "--replace"), _refused),
    ("quarantine.linked", ("reset",), _same),
    ("reset.saved", ("reset", "--keep-positions"), lambda config: None),
    ("reset.moved", ("reset",), lambda config: None),
]


QUICK = ("import.moving", "reset.moved")
"""The points after which the most is left to do."""


@pytest.mark.parametrize(
    ("point", "command", "after"),
    [pytest.param(*kill, id=kill[0], marks=() if kill[0] in QUICK else pytest.mark.long) for kill in KILLS],
)
def test_a_kill_at_any_step_is_recovered_by_running_the_command_again(
    file: Path, config: Config, tmp_path: Path, point: str, command: tuple[str, ...], after: Callable[[Config], None]
) -> None:
    archive, second = tmp_path / "backup.flexd-state", tmp_path / "second.flexd-state"
    state_archive.export_state(config, archive)
    named = {"ARCHIVE": str(archive), "ARCHIVE2": str(second)}
    words = [named.get(word, word) for word in command]
    arguments = [sys.executable, "-m", "flexd", "state", words[0], "-c", str(file), *words[1:]]
    killed = subprocess.run(
        arguments, env=child_environment(**{VARIABLE: f"{point}:1:kill"}), cwd=ROOT, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert not second.exists()
    after(config)
    done = subprocess.run(
        arguments, env=child_environment(), cwd=ROOT, capture_output=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert not list(config.state.dir.glob(".importing-*"))
    expected = 0 if words[0] == "reset" else COUNTED
    assert set(started(config).sketches.samples_by_table()) == {expected}


def test_every_step_that_changes_files_has_a_kill() -> None:
    assert {kill[0] for kill in KILLS} == set(POINTS) - set(POINTS_OF_A_JOB)


def test_quarantine_works_where_files_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(tmp_path, 2)
    path = store.save({"n": 1}, {})

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    first = store.quarantine.add(path, "emptied", move=False)
    assert first.read_bytes() == path.read_bytes()
    assert store.quarantine.add(path, "emptied", move=False) == first, "the same file is kept once"
