"""Listeners on ports and unix sockets: taken addresses, start and stop."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import httpx
import pytest

from flexd.config.server import ServerConfig
from flexd.core.errors import ApiError
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.until import until


def make_server(daemon, **config) -> DaemonServer:
    return DaemonServer(daemon, Metrics(daemon), ServerConfig(**config))


def over(path: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(transport=transport, base_url="http://flexd", timeout=10, headers=COMMAND_HEADERS)


def test_a_taken_port_is_an_error_with_a_remedy(server, daemon):
    second = make_server(daemon, port=server.port)
    with pytest.raises(ApiError, match=f"{server.port}: Address already in use") as caught:
        second.start()
    assert "port" in caught.value.remedy


def test_unix_socket_is_private_served_and_removed(daemon, tmp_path):
    path = tmp_path / "flexd.sock"
    served = make_server(daemon, unix_socket=path)
    served.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (served.address, served.port) == (f"unix:{path}", 0)
        with over(path) as client:
            assert client.get("/v1/status").json()["job"] == "job"
            assert client.post("/v1/pause", json={}).status_code == 200
    finally:
        assert served.stop(10)
    assert not path.exists()


def test_a_stale_socket_is_replaced_a_live_one_is_not(daemon, tmp_path):
    path = tmp_path / "flexd.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    served = make_server(daemon, unix_socket=path)
    served.start()
    try:
        with pytest.raises(ApiError, match="another process serves"):
            make_server(daemon, unix_socket=path).start()
        with over(path) as client:
            assert client.get("/healthz").status_code == 200
    finally:
        assert served.stop(10)


def test_stop_ends_although_a_call_hangs(daemon):
    daemon.hold = threading.Event()
    served = make_server(daemon, port=0)
    served.start()
    failures: list[Exception] = []

    def wait() -> None:
        try:
            httpx.post(f"{served.address}/v1/replan", json={"wait_seconds": 60}, headers=COMMAND_HEADERS, timeout=30)
        except httpx.HTTPError as error:
            failures.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    until(lambda: daemon.calls, 20)
    assert served.stop(5)
    caller.join(10)
    assert not caller.is_alive()
    daemon.hold.set()


def test_stop_twice_and_start_again_on_the_same_port(daemon):
    first = make_server(daemon, port=0)
    first.start()
    port = first.port
    httpx.get(f"{first.address}/healthz")
    assert first.stop(10)
    assert first.stop(10)
    again = make_server(daemon, port=port)
    again.start()
    assert again.stop(10)


def test_no_descriptor_or_thread_is_left(daemon):
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    warm = make_server(daemon, port=0)
    warm.start()
    warm.stop(10)
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(3):
        served = make_server(daemon, port=0, metrics_listen="127.0.0.1:0")
        served.start()
        assert served.stop(10)
    # Other tests of this process may still release or hold descriptors.
    until(
        lambda: open_descriptors() <= before and threading.active_count() <= threads, 10,
        lambda: f"{open_descriptors()} descriptors of {before}, {threading.active_count()} threads of {threads}",
    )  # fmt: skip
