"""The daemon's process needs no torch, so its image has none."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tests.support.api_requests import COMMAND_HEADERS
from tests.support.flexd_processes import RunningDaemon
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.repository import ROOT
from tests.support.until import until


def test_a_daemon_without_torch_migrates_rows_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (hidden, ROOT))))
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    tables = [{"name": table.name, "rows": table.rows, "dim": table.dim} for table in TABLES.tables]
    settings = {
        "job": "job",
        "tables": tables,
        "stream": {"source": {"kind": "synthetic", "accesses_per_second": 50_000}, "poll_seconds": 0.05},
        "sketch": {"memory_bytes": 2**22},
        "control": {"secret_file": str(secret)},
        "planner": {"pins": [{"table": "item", "tier": "NODE", "rows": [1, 2, 3]}], "min_samples": 1},
        "state": {"dir": str(tmp_path / "state")},
    }
    with RunningDaemon(tmp_path, settings) as daemon, Ranks(daemon.config.control.listen_port) as ranks:
        until(lambda: daemon.status()["topology"]["ready"], 60, ranks.state())

        def replanned() -> bool:
            body = {"force": True, "wait_seconds": 30}
            return httpx.post(f"{daemon.url}/v1/replan", json=body, headers=COMMAND_HEADERS, timeout=60).is_success

        until(replanned, 90, daemon.status)
        until(lambda: ranks.placements[0].version > 0, 30, ranks.state())
