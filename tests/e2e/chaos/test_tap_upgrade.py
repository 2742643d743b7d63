"""Counts of a tap reach daemons of two versions, one after another: each access is counted once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import yaml

import flexd
from flexd.config.load import load_config
from flexd.demo.ports import free_ports
from tests.e2e.chaos.chaos_processes import Child, Clock, ProcessServer
from tests.support.flexd_processes import saved_sketches
from tests.support.second_tree import ADDED, write_second_tree
from tests.support.until import until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

ITEMS = 5_000


class Trainer:
    """One rank that trains and counts exactly what its tap should count."""

    def __init__(self) -> None:
        self.collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", ITEMS, 4)])
        self.tap = flexd.Tap(self.collection, interval_steps=3)
        self.exact = np.zeros(ITEMS, np.int64)
        self._rng = np.random.default_rng(0)

    def train_until(self, condition: Callable[[], object], what: Callable[[], object]) -> None:
        """Train at least ten steps, and on until the condition is true."""
        deadline, steps = time.monotonic() + 60, 0
        while steps < 10 or not condition():
            assert time.monotonic() < deadline, what()
            rows = (self._rng.zipf(1.2, 500) % ITEMS).astype(np.int64)
            out = self.collection({"item": flexd.Jagged(torch.from_numpy(rows), torch.full((10,), 50))})
            out["item"].values.sum().backward()
            self.collection.optimizer.step()
            np.add.at(self.exact, rows, 1)
            steps += 1
            time.sleep(0.002)


@pytest.mark.long
def test_counts_reach_daemons_of_both_versions_once(tmp_path: Path) -> None:
    control, http = free_ports(2)
    config_file, url = tmp_path / "flexd.yaml", f"http://127.0.0.1:{http}"
    config_file.write_text(yaml.safe_dump({
        "job": "tapped", "tables": [{"name": "item", "rows": ITEMS, "dim": 4}],
        "stream": {"source": {"kind": "tap"}, "poll_seconds": 0.02},
        "sketch": {"half_life_seconds": None}, "planner": {"interval_seconds": 3600},
        "state": {"dir": str(tmp_path / "state"), "snapshot_interval_seconds": 0.3},
        "control": {"listen_port": control}, "server": {"port": http},
    }))  # fmt: skip
    this, following = ProcessServer(), ProcessServer(write_second_tree(tmp_path / "next"))
    clock, trainer = Clock(tmp_path / "clock"), Trainer()
    children: list[Child] = []

    def status() -> dict[str, object]:
        try:
            return dict(httpx.get(f"{url}/v1/status", timeout=1.0, verify=False).json())
        except (httpx.HTTPError, ValueError):
            return {}

    def start(server: ProcessServer) -> None:
        children.append(
            server.start(
                "tests.e2e.chaos.chaos_processes:daemon", tmp_path / "daemon.log", config_file=str(config_file),
                clock_file=str(clock.path),
            )
        )  # fmt: skip

    try:
        start(this)
        connection = flexd.connect(
            trainer.collection, f"127.0.0.1:{control}", job="tapped", attempt="a", timeout_seconds=5.0, tap=trainer.tap
        )
        for server in (following, this, following):
            before = trainer.tap.counters.messages
            trainer.train_until(lambda before=before: trainer.tap.counters.messages > before, status)  # type: ignore[misc]
            children[-1].kill()
            trainer.train_until(lambda: True, status)
            start(server)
        trainer.train_until(lambda: ADDED in status(), children[-1].tail)
        connection.close(60.0)
        assert trainer.tap.outbox.free
        assert trainer.tap.counters.accesses == trainer.exact.sum()
        until(lambda: (status().get("stream") or {}).get("lag_messages") == 0, 60, status)  # type: ignore[attr-defined]
        children[-1].signal(15)
        children[-1].wait(25.0)
        sketches = saved_sketches(load_config(config_file, {}))
    finally:
        for child in children:
            if child.alive:
                child.kill()
        this.close()
        following.close()
    assert sketches.samples == trainer.exact.sum(), "none twice, none missing"
    assert np.array_equal(sketches.query("item", np.arange(ITEMS)), trainer.exact)
