"""A daemon in this process without ranks: commands, stop within the deadline, and restart."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flexd.api import routes
from flexd.config.model import Config
from flexd.control.daemon.channel_server import ChannelServer
from flexd.core.errors import ApiError, ControlError, FlexdError, PlanError
from flexd.daemon import Daemon
from flexd.daemon import daemon as daemon_module
from flexd.daemon.components import MIN_SHARE, ShutdownBudget
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.api_contract import RESPONSE_CHECKS, for_every_request, operations_of
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.flexd_processes import RunningDaemon, saved_sketches, weights
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.repository import ROOT
from tests.support.until import until

Make, Start = Callable[..., Config], Callable[..., Any]


def test_commands_without_ranks(start: Start, make_config: Make) -> None:
    running = start(make_config())
    daemon = running.daemon
    running.until(lambda: daemon.status().stream.accesses > 1_000)
    # The channel starts later than ingest.
    running.until(lambda: any("no rank" in reason for reason in daemon.status().reasons))
    status = daemon.status()
    assert (status.job, status.healthy, status.ready, status.paused) == ("j", True, False, False)
    assert (status.topology.ready, status.topology.nodes, status.placement.version) == (False, 0, 0)
    assert (daemon.health().ok, daemon.ready().ok) == (True, False)
    for verb in (daemon.components.planning.plan, lambda: daemon.components.planning.replan("r", 0.0)):
        with pytest.raises(PlanError, match="no plan without ranks"):
            verb()

    for table, row in (("nothing", None), ("item", 3_000)):
        with pytest.raises(ApiError, match=r"no (table|row)") as missing:
            daemon.components.planning.explain(table, row, 10)
        assert missing.value.status == 404
    with pytest.raises(PlanError, match="no plan without ranks"):
        daemon.components.planning.explain("item", 2_999, 10)

    assert [daemon.call(routes.PAUSE, reason=reason).changed for reason in ("one", "two")] == [True, False]
    assert daemon.status().pause_reason == "two"
    with pytest.raises(ApiError, match="paused: two") as refused:
        daemon.components.planning.replan("r", 0.0)
    assert refused.value.status == 409
    with pytest.raises(PlanError):
        daemon.components.planning.plan()
    accesses = daemon.status().stream.accesses
    running.until(lambda: daemon.status().stream.accesses > accesses)
    assert [daemon.components.operator.resume().changed for _ in range(2)] == [True, False]
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


def test_a_restart_continues_from_the_snapshot(start: Start, make_config: Make, tmp_path: Path) -> None:
    sink = FileLogSink(tmp_path / "log", "p0", flush_seconds=0.0)
    config = make_config(
        stream={"source": {"kind": "file_log", "path": str(tmp_path / "log")}, "poll_seconds": 0.05},
        sketch={"memory_bytes": 2**22, "half_life_seconds": None},
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
    # The failed daemon has released its state directory.
    assert start(make_config(state={"dir": str(tmp_path / "third")})).daemon.health().ok


LOADED_LATER = ("torch", "scipy.optimize", "httpx", "kafka", "confluent_kafka", "matplotlib", "torchrec")
"""No start waits for these; torch alone takes longer to import than any other part of a start."""


def test_daemon_loads_only_what_ingest_needs() -> None:
    program = f"import sys, flexd.cli.main, flexd.daemon.daemon; print(*(set({LOADED_LATER}) & set(sys.modules)))"
    assert not subprocess.check_output([sys.executable, "-c", program], timeout=120).split()


def test_daemon_whose_control_channel_cannot_be_hosted_ingests_and_tries_again(
    start: Callable[..., Any], make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[ChannelServer] = []

    def no_threads(server: ChannelServer) -> None:
        servers.append(server)
        raise RuntimeError("can't start new thread\nand more")

    with_threads = ChannelServer.start
    monkeypatch.setattr(ChannelServer, "start", no_threads)
    daemon = start(make_config()).daemon
    until(lambda: "ranks: the control channel cannot be hosted: can't start new thread" in daemon.ready().reasons)
    until(lambda: any(text.startswith("thread flexd-coordinator: RuntimeError") for text in daemon.ready().reasons))
    assert daemon.health().ok, "a restart would end no better"
    assert {sock.fileno() for sock in (servers[0]._listener, servers[0]._wake_reader, servers[0]._wake_writer)} == {-1}
    until(lambda: daemon.status().stream.messages > 0)
    monkeypatch.setattr(ChannelServer, "start", with_threads)
    until(lambda: daemon.ready().reasons == ("ranks: no rank is registered",), 60, daemon.ready)
    with socket.create_connection(("127.0.0.1", daemon.components.coordinator.port), timeout=10):
        pass


UNUSED = [(1.0, 0.6), (2.0, 0.1), (15.0, 0.0)]
HANGS = [(1e9, 0.6), (1.0, 0.1), (1e9, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("parts", "given", "late"),
    [(UNUSED, [8.0, 17.0, 17.0], []), (HANGS, [8.0, 10.0, 11.0, 20.0 * MIN_SHARE], ["0", "2"])],
    ids=["unused time is given to later parts", "a part that hangs leaves the reserve to later parts"],
)
def test_the_deadline_is_shared(parts: list[tuple[float, float]], given: list[float], late: list[str]) -> None:
    """Each part needs some seconds, and leaves a reserve to later ones."""
    now, shares = 100.0, []
    budget = ShutdownBudget(20.0, lambda: now)

    def stop(seconds: float) -> bool:
        nonlocal now
        needs, _ = parts[len(shares)]
        shares.append(seconds)
        now += min(needs, seconds)
        return needs <= seconds

    for number, (_, reserve) in enumerate(parts):
        budget.stop_part(str(number), stop, reserve)
    assert (shares, budget.late) == (pytest.approx(given), late)


PROBE = """
import resource, sys
from flexd.daemon.daemon import keep_freed_memory
changed = keep_freed_memory() if sys.argv[1] == "keep" else False
kept = bytes(1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    parts = [b"x" * 3_000_000 for _ in range(4)]
    del parts
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def probe(how: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", PROBE, how]
    changed, faults = subprocess.check_output(command, text=True, timeout=60, env=clean).split()
    return changed == "True", int(faults)


def test_freed_buffers_are_kept():
    changed, faults = probe("keep")
    if not changed:
        pytest.skip("another C library than glibc")
    pages = 12_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults < 2 * pages
    assert probe("leave")[1] > 10 * pages


def test_a_real_daemon_answers_as_documented(start: Callable[..., Any], make_config: Callable[..., Config]) -> None:
    url = start(make_config()).daemon.address
    document = httpx.get(f"{url}/openapi.json", timeout=20).json()
    statuses: dict[str, set[int]] = {}
    for operation in operations_of(document):
        seen = statuses.setdefault(operation.label, set())

        def asking(case: Any, seen: set[int] = seen) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
                case.body["wait_seconds"] = min(case.body["wait_seconds"], 0.01)
            answer = case.call(base_url=url, headers=COMMAND_HEADERS, timeout=30)
            case.validate_response(answer, checks=RESPONSE_CHECKS)
            seen.add(answer.status_code)

        for_every_request(operation, asking, examples=3)
    assert not {label: seen for label, seen in statuses.items() if seen & {401, 403, 500, 502, 504}}
    assert 200 in statuses["POST /v1/pause"]
    assert 409 in statuses["POST /v1/replan"]


def test_a_daemon_without_torch_migrates_rows_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (hidden, ROOT))))
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    settings = {
        "job": "job",
        "tables": [{"name": table.name, "rows": table.rows, "dim": table.dim} for table in TABLES.tables],
        "stream": {"source": {"kind": "synthetic", "accesses_per_second": 50_000}, "poll_seconds": 0.05},
        "sketch": {"memory_bytes": 2**22},
        "control": {"secret_file": str(secret)},
        "planner": {"pins": [{"table": "item", "tier": "NODE", "rows": [1, 2, 3]}], "min_samples": 1},
        "state": {"dir": str(tmp_path / "state")},
    }
    with RunningDaemon(tmp_path, settings) as daemon, Ranks(daemon.config.control.listen_port) as ranks:
        until(lambda: daemon.status()["topology"]["ready"], 60, ranks.state())

        def replanned() -> bool:
            return httpx.post(
                f"{daemon.url}/v1/replan", json={"force": True, "wait_seconds": 30}, headers=COMMAND_HEADERS, timeout=60
            ).is_success

        until(replanned, 90, daemon.status)
        until(lambda: ranks.placements[0].version > 0, 30, ranks.state())
