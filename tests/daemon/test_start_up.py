"""A start does not wait for torch and other slow imports."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from flexd.config.model import Config
from flexd.control.daemon.channel_server import ChannelServer
from tests.support.until import until

LOADED_LATER = ("torch", "scipy.optimize", "httpx", "kafka", "confluent_kafka", "matplotlib", "torchrec")
"""No start waits for these; torch alone takes longer to import than any other part of a start."""


def test_daemon_loads_only_what_ingest_needs() -> None:
    program = f"import sys, flexd.cli.main, flexd.daemon.run; print(*(set({LOADED_LATER}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


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
    reason = "the control channel cannot be hosted: can't start new thread"
    until(lambda: f"ranks: {reason}" in daemon.ready().reasons)
    until(lambda: any(text.startswith("thread flexd-coordinator: RuntimeError") for text in daemon.ready().reasons))
    assert daemon.health().ok, "a restart would end no better"
    assert {sock.fileno() for sock in (servers[0]._listener, servers[0]._wake_reader, servers[0]._wake_writer)} == {-1}
    until(lambda: daemon.status().stream.messages > 0)
    monkeypatch.setattr(ChannelServer, "start", with_threads)
    until(lambda: daemon.ready().reasons == ("ranks: no rank is registered",), 60, daemon.ready)
    with socket.create_connection(("127.0.0.1", daemon.components.coordinator.port), timeout=10):
        pass
