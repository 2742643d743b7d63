"""Idle and slow clients, and clients that read no answer, do not block others for long."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from flexd.config.server import ServerConfig
from flexd.server import protocol
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.fake_daemon import FakeDaemon
from tests.support.until import until

LIMIT = 4


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def served(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonServer]:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr("flexd.server.http.MAX_CONNECTIONS", LIMIT)
    server = DaemonServer(daemon, Metrics(daemon), ServerConfig(port=0))
    server.start()
    yield server
    assert server.stop(10)


def opened(server: DaemonServer, say: bytes = b"") -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    raw.sendall(say)
    return raw


def closed_by_server(raw: socket.socket, seconds: float = 10.0) -> bool:
    raw.settimeout(seconds)
    try:
        while raw.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def is_healthy(server: DaemonServer) -> bool:
    try:
        return httpx.get(f"{server.address}/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("said", [b"", b"GET /heal", b"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nX-Filler: "])
def test_a_missing_head_ends_the_connection(served: DaemonServer, daemon: FakeDaemon, said: bytes) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(opened(served, said)) for _ in range(LIMIT)]
        assert all(closed_by_server(raw) for raw in idle)
        assert is_healthy(served)
    assert daemon.calls == []


def test_a_slow_head_has_the_same_deadline(served: DaemonServer) -> None:
    with opened(served) as raw, contextlib.suppress(ConnectionError):
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 1000:
            raw.send(bytes([byte]))
            time.sleep(0.01)
        pytest.fail("the server accepts a slow head without limit")


def test_the_deadline_holds_for_the_second_request_of_a_connection_too(served: DaemonServer) -> None:
    with opened(served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as raw:
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"GET /healthz HT")
        assert closed_by_server(raw)


def test_refused_connections_are_bounded_too(served: DaemonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(opened(served))
        until(lambda: httpx.get(f"{served.address}/healthz", timeout=5).status_code == 503)
        many = [stack.enter_context(opened(served)) for _ in range(protocol.REFUSED_CONNECTIONS * LIMIT)]
        assert closed_by_server(many[-1])
    until(lambda: is_healthy(served))


def test_a_client_that_reads_no_answer_is_disconnected(served: DaemonServer, daemon: FakeDaemon) -> None:
    daemon.shown = daemon.shown.model_copy(update={"job": "j" * 12_000_000})
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT - 1):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.settimeout(5)
            raw.connect(("127.0.0.1", served.port))
            raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        server = served._admin._server
        assert server is not None
        until(lambda: server.server_state.total_requests >= LIMIT - 1)
        until(lambda: not server.server_state.connections)
        assert is_healthy(served)
