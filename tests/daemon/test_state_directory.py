"""The state directory: its lock, the formats of its files, what ``flexd state`` shows and resets."""

import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from flexd.cli.client import ExitCode, exit_code_of
from flexd.cli.main import app
from flexd.config.model import Config, load_config, parse_config
from flexd.control.daemon.journal import PlacementJournal
from flexd.core import supervision
from flexd.core.durable import UNUSABLE
from flexd.core.errors import StateLockedError, StateVersionError, UnusableStateError
from flexd.core.supervision import POINTS, POINTS_OF_A_JOB, VARIABLE, InjectedFaultError
from flexd.daemon import Daemon, state_directory
from flexd.daemon.config_file import sketch_settings
from flexd.daemon.state_directory import FILES, StateLock, check_files
from flexd.operations.decisions import DecisionFile, StateDatabase, quarantine
from flexd.sketch import snapshot
from flexd.sketch.restore import RestoredState, restore
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore


def test_side_files_go_with_their_file(tmp_path: Path) -> None:
    for suffix in ("", "-journal"):
        (tmp_path / f"state.sqlite{suffix}").write_text(suffix)
    quarantine(tmp_path / "state.sqlite")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"state.sqlite{UNUSABLE}": "", f"state.sqlite{UNUSABLE}-journal": "-journal",
    }  # fmt: skip


OPENERS: dict[str, Callable[[Path], object]] = {
    "placement/placement.journal": lambda state: PlacementJournal(state / "placement"),
    "state.sqlite": lambda state: DecisionFile(StateDatabase(state / "state.sqlite")),
}


@pytest.mark.parametrize("name", FILES)
def test_a_newer_file_is_refused_by_name_and_unchanged(tmp_path: Path, name: str) -> None:
    (tmp_path / "placement").mkdir()
    (tmp_path / "placement" / "placement.journal").write_bytes(b"FLEXDPJ3" + bytes(8))
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.execute("PRAGMA user_version = 4")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(StateVersionError, match=f"{name}.*newer flexd"):
        OPENERS[name](tmp_path)
    with pytest.raises(UnusableStateError, match=f"{name}.*newer flexd"):
        check_files(tmp_path, start_empty=False)
    assert (tmp_path / name).read_bytes() == before
    check_files(tmp_path, start_empty=True)
    assert not (tmp_path / name).exists()
    assert (tmp_path / f"{name}{UNUSABLE}").read_bytes() == before


def test_a_killed_holder_leaves_no_lock(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from flexd.daemon.state_directory import StateLock\n"
        "lock = StateLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(StateLockedError, match=rf"process {holder.pid}"):
        StateLock(tmp_path)
    holder.kill()
    holder.wait(10)
    StateLock(tmp_path).release()


TABLES = [{"name": "users", "rows": 500, "dim": 8}, {"name": "items", "rows": 20_000, "dim": 8}]
COUNTED = 90


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a configuration whose state directory has two snapshots."""
    settings = {
        "job": "ads", "tables": TABLES, "stream": {"source": {"kind": "synthetic"}},
        "sketch": {"memory_bytes": 1_048_576, "half_life_seconds": 600}, "state": {"dir": str(tmp_path / "state")},
    }  # fmt: skip
    path = tmp_path / "flexd.yaml"
    path.write_text(yaml.safe_dump(settings))
    config = load_config(path, {})
    sketches = SketchSet(config.keyspace().tables, sketch_settings(config))
    store = SnapshotStore(config.state.dir / "snapshots", 3)
    for number in range(1, 3):
        for table in TABLES:
            sketches.ingest(str(table["name"]), np.arange(COUNTED // 2), 0, 1.7e9 + number)
        meta, arrays = sketches.state()
        store.save({"sketches": meta, "positions": {"p": number}, "generation": number, "saved": {}}, arrays)
    return path


@pytest.fixture
def config(file: Path) -> Config:
    return load_config(file, {})


def started(config: Config) -> RestoredState:
    """Return the counters that a daemon would start from."""
    check_files(config.state.dir, start_empty=False)
    return restore(SnapshotStore(config.state.dir / "snapshots", 3), config.keyspace().tables, sketch_settings(config))


def test_the_report_says_what_a_start_would_keep(config: Config) -> None:
    report = state_directory.report(config)
    assert report.starts
    assert [(saved.format, saved.accesses, saved.messages, saved.problem) for saved in report.snapshots] == [
        (6, 2 * COUNTED, 2, ""), (6, COUNTED, 1, ""),
    ]  # fmt: skip
    assert {outcome.table: outcome.outcome for outcome in report.tables} == {"users": "kept", "items": "kept"}
    for path in (config.state.dir / "snapshots").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    report = state_directory.report(config)
    assert not report.starts
    assert "bytes of" in report.problems[0]
    assert len(list((config.state.dir / "snapshots").iterdir())) == 2, "nothing is changed"


@pytest.mark.parametrize("keep_positions", [False, True])
def test_a_reset_starts_empty_and_the_newest_snapshot_can_be_renamed_back(config: Config, keep_positions: bool) -> None:
    before = started(config)
    reset = state_directory.reset(config, keep_positions=keep_positions)
    assert reset.removed == ("snapshot-000000000001.flexd", "snapshot-000000000002.flexd")
    empty = started(config)
    assert (empty.sketches.samples, empty.positions) == (0, before.positions if keep_positions else None)
    (aside,) = (config.state.dir / "snapshots").glob("*.unusable")
    aside.rename(aside.with_name("snapshot-000000000009.flexd"))
    again = started(config)
    assert again.sketches.samples_by_table() == before.sketches.samples_by_table()
    assert again.positions == before.positions


def test_a_running_daemon_is_not_disturbed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_directory, "LOCK_WAIT_SECONDS", 0.0)
    lock = StateLock(config.state.dir)
    assert state_directory.report(config).starts
    with pytest.raises(StateLockedError):
        state_directory.reset(config, keep_positions=False)
    # A daemon that only looks whether it can start has the lock for a moment.
    monkeypatch.setattr(state_directory, "LOCK_WAIT_SECONDS", 60.0)
    threading.Timer(0.2, lock.release).start()
    state_directory.reset(config, keep_positions=False)


@pytest.mark.parametrize(("point", "keep_positions"), [("reset.saved", True), ("reset.moved", False)])
def test_a_reset_that_ends_halfway_is_run_again(config: Config, point: str, keep_positions: bool) -> None:
    assert {"reset.saved", "reset.moved"} == set(POINTS) - set(POINTS_OF_A_JOB)
    supervision.arm({VARIABLE: f"{point}:1:raise"})
    with pytest.raises(InjectedFaultError):
        state_directory.reset(config, keep_positions=keep_positions)
    supervision.arm({})
    started(config)
    state_directory.reset(config, keep_positions=keep_positions)
    assert started(config).sketches.samples == 0


ITEM = [{"name": "item", "rows": 100, "dim": 4}]


def document(directory: Path, job: str, **sections: Any) -> dict[str, Any]:
    return {
        "job": job, "tables": ITEM, "stream": {"source": {"kind": "tap"}}, "control": {"listen_port": 0},
        "server": {"port": 0}, "state": {"dir": str(directory / "state")}, **sections,
    }  # fmt: skip


@pytest.fixture
def of_laptop(tmp_path: Path, start: Callable[..., Any]) -> Path:
    """Return a directory with the state of job "laptop", whose daemon has written a snapshot."""
    start(parse_config(document(tmp_path, "laptop"))).stop()
    return tmp_path


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of the state but the lock."""
    return {
        str(path): path.read_bytes()
        for path in (directory / "state").rglob("*")
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.parametrize("on_unusable", ["exit", "reset"])
@pytest.mark.parametrize("tables", [ITEM, []], ids=["tables", "tables of the ranks"])
def test_another_job_is_refused_by_name_and_nothing_changes(
    of_laptop: Path, on_unusable: str, tables: list[dict[str, Any]]
) -> None:
    # Files that a start would quarantine.
    (of_laptop / "state" / "state.sqlite").write_text("no database")
    before = content(of_laptop)
    state = {"dir": str(of_laptop / "state"), "on_unusable": on_unusable}
    config = parse_config(document(of_laptop, "sasrec", tables=tables, state=state))
    with pytest.raises(
        UnusableStateError, match=r"has the state of job 'laptop', not of 'sasrec' - .*of its own"
    ) as no:
        Daemon(config)
    assert exit_code_of(no.value) is ExitCode.STATE_UNUSABLE
    assert content(of_laptop) == before


def test_state_commands_refuse_the_state_of_another_job(of_laptop: Path) -> None:
    before = content(of_laptop)
    path = of_laptop / "sasrec.yaml"
    path.write_text(yaml.safe_dump(document(of_laptop, "sasrec")))
    shown = flexd("state", "show", "-c", path)
    assert shown.exit_code == ExitCode.STATE_UNUSABLE
    assert "laptop" in shown.output
    reset = flexd("state", "reset", "--yes", "-c", path)
    assert reset.exit_code != 0
    assert "laptop" in f"{reset.output}{reset.exception}"
    assert content(of_laptop) == before


def test_tables_that_ranks_say_are_kept_for_their_job_alone(tmp_path: Path, start: Callable[..., Any]) -> None:
    """A daemon that has no tables yet marks the directory too."""
    start(parse_config(document(tmp_path, "laptop", tables=[])))
    assert (tmp_path / "state" / "job").read_text() == "laptop\n"


ITEMS_AND_USERS = [{"name": "items", "rows": 500, "dim": 8}, {"name": "users", "rows": 300, "dim": 8}]


def flexd(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_other_tables_and_then_a_newer_snapshot_until_a_reset(
    start: Callable[..., Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(tables=ITEMS_AND_USERS)
    first = start(config)
    first.until(lambda: first.daemon.status().stream.messages >= len(ITEMS_AND_USERS))
    first.stop()
    saved = state_directory.report(config).snapshots[0].accesses
    changed = make_config(tables=[*ITEMS_AND_USERS[:1], {"name": "new", "rows": 10, "dim": 8}])
    second = start(changed)
    state = second.daemon.status().state
    assert state.outcomes == {"kept": 1, "new": 1, "removed": 1}
    assert 0 < state.lost_accesses < saved
    metrics = httpx.get(f"{second.daemon.address}/metrics").text
    assert 'flexd_state_tables{outcome="removed"} 1.0' in metrics
    assert f"flexd_state_lost_accesses {float(state.lost_accesses)}" in metrics
    shown = flexd("status", "--url", second.daemon.address).output
    assert "lost accesses" in shown
    assert re.search(r"users +removed .*not configured", shown)
    second.stop()

    # The newest snapshot is of a format that this flexd does not know.
    store = SnapshotStore(changed.state.dir / "snapshots", 9)
    meta, arrays = snapshot.read(store.paths()[0])
    meta["sketches"]["format"] = 99
    newer = store.save(meta, arrays)
    with pytest.raises(
        UnusableStateError, match=r"format 99 is of a newer flexd.*flexd state reset -c FILE"
    ) as refused:
        Daemon(changed)
    assert exit_code_of(refused.value) is ExitCode.STATE_UNUSABLE
    assert newer.exists()
    file = tmp_path / "flexd.yaml"
    file.write_text(yaml.safe_dump(changed.document()))
    shown = flexd("state", "show", "-c", file)
    assert (shown.exit_code, "would be REFUSED" in shown.output) == (ExitCode.STATE_UNUSABLE, True)
    waiting = start(
        make_config(tables=changed.document()["tables"], state={**changed.document()["state"], "on_unusable": "wait"})
    )
    ready = httpx.get(f"{waiting.daemon.address}/readyz")
    assert (ready.status_code, "newer flexd" in ready.text) == (503, True)
    assert httpx.get(f"{waiting.daemon.address}/healthz").status_code == 200
    assert exit_code_of(flexd("plan", "--url", waiting.daemon.address).exception) is ExitCode.REFUSED
    done = flexd("state", "reset", "-c", file, "--yes")
    assert done.exit_code == 0, done.output
    waiting.until(lambda: waiting.daemon.ready().reasons and waiting.daemon._components)
    waiting.until(lambda: waiting.daemon.status().stream.messages > 0)
    assert list((changed.state.dir / "snapshots").glob("*.unusable"))
