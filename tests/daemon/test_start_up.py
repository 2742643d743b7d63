"""A start does not wait for torch and other slow imports."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexd.config.model import Config
from flexd.control.daemon import coordinator as coordinator_module
from flexd.control.protocol.store_client import StoreClient, StoreConnector
from flexd.daemon.service import Daemon
from flexd.demo.ports import free_ports
from tests.support.until import until

LOADED_LATER = ("torch", "scipy.optimize", "httpx", "kafka", "confluent_kafka", "matplotlib", "torchrec")
"""No start waits for these; torch alone takes longer to import than any other part of a start."""


def config(directory: Path) -> Config:
    (control,) = free_ports(1)
    return Config.model_validate(
        {
            "job": "start-up",
            "tables": [{"name": "items", "rows": 1_000, "dim": 8}],
            "stream": {"source": {"kind": "synthetic", "accesses_per_second": 20_000}},
            "control": {"listen_port": control},
            "server": {"port": 0},
            "state": {"dir": str(directory / "state")},
        }
    )


def test_daemon_loads_only_what_ingest_needs() -> None:
    program = f"import sys, flexd.cli.main, flexd.daemon.run; print(*(set({LOADED_LATER}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Not started."""
    daemon = Daemon(config(tmp_path))
    try:
        yield daemon
    finally:
        daemon.stop(20)


def test_daemon_ingests_while_the_control_channel_is_loaded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = threading.Event()
    monkeypatch.setattr(coordinator_module, "load_transports", lambda: loaded.wait(60))
    daemon.start()
    until(lambda: daemon.status().stream.messages > 0)
    assert daemon.health().ok
    assert daemon.ready().reasons == ("ranks: the control channel is not up yet",)
    rank = StoreConnector("127.0.0.1", daemon.control_port, "start-up", 60.0)
    connected: list[StoreClient] = []
    early = threading.Thread(target=lambda: connected.append(rank.connect()), daemon=True)
    early.start()
    assert not connected
    loaded.set()
    until(lambda: connected)
    until(lambda: daemon.ready().reasons == ("ranks: no rank is registered",))
    connected[0].close()
    assert daemon.stop(20)


def test_daemon_whose_control_channel_cannot_be_hosted_ingests_and_tries_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_torch() -> None:
        raise ImportError("libtorch_cpu.so: cannot open shared object file\nand more")

    load = coordinator_module.load_transports
    monkeypatch.setattr(coordinator_module, "load_transports", no_torch)
    daemon.start()
    reason = "the control channel cannot be hosted: libtorch_cpu.so: cannot open shared object file"
    until(lambda: f"ranks: {reason}" in daemon.ready().reasons)
    until(lambda: any(text.startswith("thread flexd-coordinator: ImportError") for text in daemon.ready().reasons))
    assert daemon.health().ok, "a restart would end no better"
    until(lambda: daemon.status().stream.messages > 0)
    monkeypatch.setattr(coordinator_module, "load_transports", load)
    until(lambda: daemon.ready().reasons == ("ranks: no rank is registered",), 60, daemon.ready)
    with socket.create_connection(("127.0.0.1", daemon.control_port), timeout=10):
        pass
    assert daemon.stop(20)
