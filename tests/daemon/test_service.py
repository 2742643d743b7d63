"""A daemon in this process without ranks: commands, stop within the deadline, and restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.api import routes
from flexd.config.model import Config
from flexd.core.errors import ApiError, ControlError, FlexdError, PlanError
from flexd.daemon import Daemon
from flexd.daemon import daemon as daemon_module
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.flexd_processes import saved_sketches, weights

Make, Start = Callable[..., Config], Callable[..., Any]


def test_commands_without_ranks(start: Start, make_config: Make) -> None:
    running = start(make_config())
    daemon = running.daemon
    running.until(lambda: daemon.status().stream.accesses > 1_000)
    # The channel starts later than ingest.
    running.until(lambda: any("no rank" in reason for reason in daemon.status().reasons))
    status = daemon.status()
    assert (status.job, status.healthy, status.ready, status.paused) == ("j", True, False, False)
    assert status.topology.ready is False
    assert status.topology.nodes == 0
    assert status.placement.version == 0
    assert any("no rank" in reason for reason in status.reasons)
    assert daemon.health().ok
    assert not daemon.ready().ok
    for verb in (daemon.components.planning.plan, lambda: daemon.components.planning.replan("r", 0.0)):
        with pytest.raises(PlanError, match="no plan without ranks"):
            verb()

    for table, row in (("nothing", None), ("item", 3_000)):
        with pytest.raises(ApiError, match=r"no (table|row)") as missing:
            daemon.components.planning.explain(table, row, 10)
        assert missing.value.status == 404
    with pytest.raises(PlanError, match="no plan without ranks"):
        daemon.components.planning.explain("item", 2_999, 10)

    assert daemon.call(routes.PAUSE, reason="one").changed is True
    assert daemon.call(routes.PAUSE, reason="two").changed is False
    assert daemon.status().pause_reason == "two"
    with pytest.raises(ApiError, match="paused: two") as refused:
        daemon.components.planning.replan("r", 0.0)
    assert refused.value.status == 409
    with pytest.raises(PlanError):
        daemon.components.planning.plan()
    accesses = daemon.status().stream.accesses
    running.until(lambda: daemon.status().stream.accesses > accesses)
    assert daemon.components.operator.resume().changed is True
    assert daemon.components.operator.resume().changed is False
    with pytest.raises(PlanError):
        daemon.components.planning.replan("r", 0.0)


def test_requests_read_the_kept_status_that_ticks_and_commands_renew(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request touches a part for it, unless the loop has not ticked for long."""
    monkeypatch.setattr(daemon_module, "RENEWAL_SHARE", 1e9)
    daemon = Daemon(make_config())
    kept = daemon.status()
    daemon.components.operator.pause("behind its back")
    assert (daemon.status().paused, daemon.ready().reasons) == (False, kept.reasons)
    assert daemon.status().age_seconds > kept.age_seconds
    daemon.tick()
    assert daemon.status().pause_reason == "behind its back"
    daemon.call(routes.RESUME, reason="r")
    assert not daemon.status().paused
    with pytest.raises(FlexdError, match="not started from a file"):
        daemon.call(routes.RELOAD)
    assert "not started from a file" in (daemon.status().config.problem or "")
    daemon.components.operator.pause("a long plan")
    assert not daemon.status().paused
    monkeypatch.setattr(daemon_module, "STALE_SECONDS", 0.0)
    assert daemon.status().pause_reason == "a long plan"
    assert daemon.stop(20.0)


def test_a_stopping_daemon_is_not_ready_and_refuses_a_replan(start: Start, make_config: Make) -> None:
    running = start(make_config())
    running.stop()
    assert "shutting down" in running.daemon.ready().reasons
    with pytest.raises(ApiError) as error:
        running.daemon.components.planning.replan("r", 0.0)
    assert error.value.status == 503


def _log(directory: Path) -> tuple[dict[str, Any], FileLogSink]:
    return {"kind": "file_log", "path": str(directory / "log")}, FileLogSink(directory / "log", "p0", flush_seconds=0.0)


def test_a_restart_continues_from_the_snapshot(start: Start, make_config: Make, tmp_path: Path) -> None:
    source, sink = _log(tmp_path)
    config = make_config(
        stream={"source": source, "poll_seconds": 0.05}, sketch={"memory_bytes": 2**22, "half_life_seconds": None}
    )

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
    start: Start, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(make_config())
    before = threading.active_count()
    port = running.daemon.components.coordinator.port
    second = Daemon(make_config(state={"dir": str(tmp_path / "second")}, control={"listen_port": port}))
    with pytest.raises(ControlError):
        second.start()
    http_port = int(running.daemon.address.rsplit(":", 1)[1])
    third = Daemon(make_config(state={"dir": str(tmp_path / "third")}, server={"port": http_port}))
    monkeypatch.setattr(third.components, "start", lambda: pytest.fail("ranks are served by a daemon that ends"))
    with pytest.raises(FlexdError, match=str(http_port)):
        third.start()
    running.until(lambda: threading.active_count() <= before)
    fourth = start(make_config(state={"dir": str(tmp_path / "third")}))
    assert fourth.daemon.health().ok, "the failed daemon released its state directory"
