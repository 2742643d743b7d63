"""A daemon that starts over saved state: other tables, and state that it cannot continue from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from flexd.cli.client import ExitCode, exit_code_of
from flexd.cli.main import app
from flexd.config.model import Config
from flexd.core.errors import UnusableStateError
from flexd.daemon import Daemon, state_directory
from flexd.sketch import snapshot
from flexd.sketch.snapshot import SnapshotStore

TABLES = [{"name": "items", "rows": 500, "dim": 8}, {"name": "users", "rows": 300, "dim": 8}]


def make_newer(config: Config) -> Path:
    """Give the newest snapshot a format that this flexd does not know."""
    store = SnapshotStore(config.state.dir / "snapshots", 9)
    meta, arrays = snapshot.read(store.paths()[0])
    meta["sketches"]["format"] = 99
    return store.save(meta, arrays)


def flexd(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_other_tables_and_then_a_newer_snapshot_until_a_reset(
    start: Callable[..., Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(tables=TABLES)
    first = start(config)
    first.until(lambda: first.daemon.status().stream.messages >= len(TABLES))
    first.stop()
    saved = state_directory.report(config).snapshots[0].accesses
    changed = make_config(tables=[*TABLES[:1], {"name": "new", "rows": 10, "dim": 8}])
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

    newer = make_newer(changed)
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
