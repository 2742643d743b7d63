"""Daemons that start over saved state: other tables, and state that they cannot continue from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flexd.cli.exit_codes import ExitCode
from flexd.daemon import state_directory
from flexd.sketch import snapshot
from flexd.sketch.snapshot import SnapshotStore
from tests.support.flexd_processes import RunningDaemon, flexd
from tests.support.until import until

pytestmark = pytest.mark.slow

SECONDS = 60.0
TABLES = [{"name": "items", "rows": 500, "dim": 8}, {"name": "users", "rows": 300, "dim": 8}]
SETTINGS: dict[str, Any] = {
    "tables": TABLES, "stream": {"source": {"kind": "synthetic", "accesses_per_second": 10_000}},
    "sketch": {"memory_bytes": 4 * 2**20},
}  # fmt: skip


def changed(daemon: RunningDaemon, **changes: Any) -> None:
    """Change sections of the daemon's configuration file."""
    settings = yaml.safe_load(daemon.config_file.read_text())
    for name, value in changes.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    daemon.config_file.write_text(yaml.safe_dump(settings))


def make_newer(daemon: RunningDaemon) -> Path:
    """Give the newest snapshot a format that this flexd does not know."""
    store = SnapshotStore(daemon.config.state.dir / "snapshots", 9)
    meta, arrays = snapshot.read(store.paths()[0])
    meta["sketches"]["format"] = 99
    return store.save(meta, arrays)


@pytest.fixture
def stopped(tmp_path: Path) -> RunningDaemon:
    """Return a daemon that has counted, saved and ended."""
    daemon = RunningDaemon(tmp_path, SETTINGS)
    with daemon:
        until(lambda: daemon.status()["stream"]["messages"] >= len(TABLES), SECONDS, daemon.status)
        written = daemon.status()["snapshot"]["written"] + 1  # it may have begun before the last message
        until(lambda: daemon.status()["snapshot"]["written"] > written, SECONDS, daemon.status)
    assert state_directory.report(daemon.config).starts
    return daemon


def answer(daemon: RunningDaemon, path: str) -> httpx.Response | None:
    try:
        return httpx.get(f"{daemon.url}{path}", timeout=5)
    except httpx.HTTPError:
        return None


def test_other_tables_and_then_a_newer_snapshot_until_a_reset(
    stopped: RunningDaemon,
) -> None:
    saved = state_directory.report(stopped.config).snapshots[0].accesses
    changed(stopped, tables=[*TABLES[:1], {"name": "new", "rows": 10, "dim": 8}])
    with stopped:
        state = stopped.status()["state"]
        assert state["outcomes"] == {"kept": 1, "new": 1, "removed": 1}
        assert 0 < state["lost_accesses"] < saved
        metrics = stopped.metrics()
        assert metrics["flexd_state_tables{removed}"] == 1
        assert metrics["flexd_state_lost_accesses"] == state["lost_accesses"]
        shown = flexd("status", "--url", stopped.url).stdout
        assert "lost accesses" in shown
        assert re.search(r"users +removed .*not configured", shown)
    newer = make_newer(stopped)
    refused = flexd("run", "-c", stopped.config_file)
    assert refused.returncode == ExitCode.STATE_UNUSABLE, refused.stderr
    assert "format 99 is of a newer flexd" in refused.stderr
    assert "remedy: " in refused.stderr
    assert "flexd state reset -c FILE" in refused.stderr
    assert newer.exists()
    shown = flexd("state", "show", "-c", stopped.config_file)
    assert shown.returncode == ExitCode.STATE_UNUSABLE
    assert "would be REFUSED" in shown.stdout
    changed(stopped, state={"on_unusable": "wait"})
    with stopped:
        ready = answer(stopped, "/readyz")
        assert ready is not None
        assert ready.status_code == 503
        assert "newer flexd" in ready.text
        health = answer(stopped, "/healthz")
        assert health is not None
        assert health.status_code == 200
        assert flexd("plan", "--url", stopped.url).returncode == ExitCode.REFUSED
        done = flexd("state", "reset", "-c", stopped.config_file, "--yes")
        assert done.returncode == 0, done.stderr

        def counting() -> bool:
            found = answer(stopped, "/v1/status")
            return found is not None and found.status_code == 200 and found.json()["stream"]["messages"] > 0

        until(counting, SECONDS, lambda: answer(stopped, "/readyz"))
    assert list((stopped.config.state.dir / "snapshots").glob("*.unusable"))
