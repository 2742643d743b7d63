"""A daemon in this process without ranks: commands, stop within the deadline, and restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.core.errors import ApiError, ControlError, FlexdError, PlanError
from flexd.daemon import Daemon
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.flexd_processes import saved_sketches, weights
from tests.support.ranks_in_threads import Ranks
from tests.support.until import until

SHUTDOWN_SECONDS = 20.0


def _config(directory: Path, source: dict[str, Any] | None = None, **sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 3_000, "dim": 4}],
            "stream": {"source": source or {"kind": "synthetic", "accesses_per_second": 20_000}, "poll_seconds": 0.05},
            "sketch": {"memory_bytes": 2**22},
            "control": {"listen_port": 0},
            "server": {"port": 0},
            "state": {"dir": str(directory / "state"), "snapshot_interval_seconds": 3600.0},
            "shutdown_seconds": SHUTDOWN_SECONDS,
            **sections,
        }
    )


class Running:
    """The daemon's loop in a thread, as the main thread runs it."""

    def __init__(self, config: Config) -> None:
        self.daemon = Daemon(config)
        self.daemon.start()
        self.ended: bool | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.ended = self.daemon.run_until_stopped()

    def stop(self) -> None:
        self.daemon.request_stop()
        self._thread.join(SHUTDOWN_SECONDS + 5)
        assert not self._thread.is_alive(), "the daemon did not end within its deadline"
        assert self.ended is True

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, 30, self.daemon.status)


@pytest.fixture
def start() -> Iterator[Callable[[Config], Running]]:
    made: list[Running] = []

    def make(config: Config) -> Running:
        made.append(Running(config))
        return made[-1]

    yield make
    for running in made:
        running.stop()


def test_commands_without_ranks(start: Callable[[Config], Running], tmp_path: Path) -> None:
    running = start(_config(tmp_path))
    daemon = running.daemon
    running.until(lambda: daemon.status().stream.accesses > 1_000)
    # The channel starts later than ingest, since it loads torch.
    running.until(lambda: any("no rank" in reason for reason in daemon.status().reasons))
    status = daemon.status()
    assert (status.job, status.healthy, status.ready, status.paused) == ("j", True, False, False)
    assert status.topology.ready is False
    assert status.topology.nodes == 0
    assert status.placement.version == 0
    assert any("no rank" in reason for reason in status.reasons)
    assert daemon.health().ok
    assert not daemon.ready().ok
    for verb in (daemon.plan, lambda: daemon.replan("r", 0.0)):
        with pytest.raises(PlanError, match="no plan without ranks"):
            verb()

    for table, row in (("nothing", None), ("item", 3_000)):
        with pytest.raises(ApiError, match=r"no (table|row)") as missing:
            daemon.explain(table, row, 10)
        assert missing.value.status == 404
    with pytest.raises(PlanError, match="no plan without ranks"):
        daemon.explain("item", 2_999, 10)

    assert daemon.pause("one").changed is True
    assert daemon.pause("two").changed is False
    assert daemon.status().pause_reason == "two"
    with pytest.raises(ApiError, match="paused: two") as refused:
        daemon.replan("r", 0.0)
    assert refused.value.status == 409
    with pytest.raises(PlanError):
        daemon.plan()
    accesses = daemon.status().stream.accesses
    running.until(lambda: daemon.status().stream.accesses > accesses)
    assert daemon.resume().changed is True
    assert daemon.resume().changed is False
    with pytest.raises(PlanError):
        daemon.replan("r", 0.0)


def test_the_status_names_the_ranks_that_are_missing(start: Callable[[Config], Running], tmp_path: Path) -> None:
    tables = [{"name": "item", "rows": 50_000, "dim": 8}, {"name": "shop", "rows": 1_000, "dim": 16}]
    running = start(_config(tmp_path, job="job", tables=tables))
    ranks = Ranks(running.daemon.control_port, secret=None)
    try:
        for rank in ranks.ranks[:3]:
            rank.agent.start()
        running.until(lambda: running.daemon.status().topology.missing_ranks == (3,))
    finally:
        for rank in ranks.ranks:
            rank.agent.stop(10)


def test_commands_over_http(start: Callable[[Config], Running], tmp_path: Path) -> None:
    running = start(_config(tmp_path))
    with httpx.Client(base_url=running.daemon.address, timeout=10, trust_env=False, headers=COMMAND_HEADERS) as client:
        assert client.get("/v1/status").json()["job"] == "j"
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503
        refused = client.post("/v1/plan")
        assert refused.status_code == 409
        assert refused.json()["error"]["type"] == "PlanError"
        assert client.post("/v1/pause", json={"reason": "x"}).json()["paused"] is True
        paused = client.post("/v1/replan", json={})
        assert paused.status_code == 409
        assert "paused: x" in paused.json()["error"]["message"]
        assert "flexd_paused 1.0" in client.get("/metrics").text
        assert client.post("/v1/resume").json()["changed"] is True


def test_a_stopping_daemon_is_not_ready_and_refuses_a_replan(tmp_path: Path) -> None:
    running = Running(_config(tmp_path))
    running.stop()
    assert "shutting down" in running.daemon.ready().reasons
    with pytest.raises(ApiError) as error:
        running.daemon.replan("r", 0.0)
    assert error.value.status == 503


def _log(directory: Path) -> tuple[dict[str, Any], FileLogSink]:
    return {"kind": "file_log", "path": str(directory / "log")}, FileLogSink(directory / "log", "p0", flush_seconds=0.0)


def test_a_restart_continues_from_the_snapshot(start: Callable[[Config], Running], tmp_path: Path) -> None:
    source, sink = _log(tmp_path)
    config = _config(tmp_path, source, sketch={"memory_bytes": 2**22, "half_life_seconds": None})

    def send(messages: int) -> None:
        for _ in range(messages):
            sink.send(encode_arrow([AccessBatch("item", np.arange(100), 0, 5.0)]))
        sink.flush()

    send(30)
    first = start(config)
    first.until(lambda: first.daemon.status().stream.messages == 30)
    first.stop()
    send(7)
    second = start(config)
    second.until(lambda: second.daemon.status().stream.messages == 7)
    assert second.daemon.status().stream.accesses == 700, "only messages that the first daemon had not read"
    second.stop()
    sketches = saved_sketches(config)
    assert sketches.samples == 3_700
    assert weights(sketches, config)["item"][:101].tolist() == [37.0] * 100 + [0.0]
    sink.close()


def test_a_taken_port_is_an_error_and_leaves_nothing_running(
    start: Callable[[Config], Running], tmp_path: Path
) -> None:
    running = start(_config(tmp_path))
    before = threading.active_count()
    port = running.daemon.control_port
    second = Daemon(_config(tmp_path / "second", control={"listen_port": port}))
    with pytest.raises(ControlError):
        second.start()
    http_port = int(running.daemon.address.rsplit(":", 1)[1])
    third = Daemon(_config(tmp_path / "third", server={"port": http_port}))
    with pytest.raises(FlexdError, match=str(http_port)):
        third.start()
    running.until(lambda: threading.active_count() <= before)
    fourth = start(_config(tmp_path / "third"))
    assert fourth.daemon.health().ok, "the failed daemon released its state directory"
