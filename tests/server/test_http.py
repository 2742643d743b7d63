"""Listeners on ports and unix sockets: taken addresses, start and stop."""

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flexd.config.sections import ServerConfig
from flexd.core.errors import ApiError
from flexd.server import http
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.api_tokens import serve
from tests.support.fake_daemon import FakeDaemon
from tests.support.until import until


def make_server(daemon, **config) -> DaemonServer:
    return DaemonServer(daemon, Metrics(daemon), ServerConfig(**config))


def over(path: Path) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://flexd", timeout=10, headers=COMMAND_HEADERS
    )


def test_a_taken_port_is_an_error_with_a_remedy(server, daemon):
    second = make_server(daemon, port=server.port)
    with pytest.raises(ApiError, match=f"{server.port}: Address already in use") as caught:
        second.start()
    assert "port" in caught.value.remedy


def test_unix_socket_is_private_served_and_removed(daemon, tmp_path):
    path = tmp_path / "flexd.sock"
    with serve(daemon, unix_socket=path) as served:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (served.address, served.port) == (f"unix:{path}", 0)
        with over(path) as client:
            assert client.get("/v1/status").json()["job"] == "job"
            assert client.post("/v1/pause", json={}).status_code == 200
    assert not path.exists()


def test_a_stale_socket_is_replaced_a_live_one_is_not(daemon, tmp_path):
    path = tmp_path / "flexd.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with serve(daemon, unix_socket=path):
        with pytest.raises(ApiError, match="another process serves"):
            make_server(daemon, unix_socket=path).start()
        with over(path) as client:
            assert client.get("/healthz").status_code == 200


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

    with serve(daemon):  # warms up
        pass
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(3):
        with serve(daemon, metrics_listen="127.0.0.1:0"):
            pass
    # Other tests of this process may still release or hold descriptors.
    until(
        lambda: open_descriptors() <= before and threading.active_count() <= threads, 10,
        lambda: f"{open_descriptors()} descriptors of {before}, {threading.active_count()} threads of {threads}",
    )  # fmt: skip


LIMIT = 4


@pytest.fixture
def served(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonServer]:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr("flexd.server.http.MAX_CONNECTIONS", LIMIT)
    with serve(daemon) as server:
        yield server


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


def test_connections_without_a_request_refuse_nobody(served: DaemonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            many = [stack.enter_context(opened(served, b"GET /heal")) for _ in range(3 * LIMIT)]
            assert closed_by_server(many[0])
            assert is_healthy(served)


def test_refused_connections_are_bounded_too(served: DaemonServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(http.REFUSED_CONNECTIONS * LIMIT + LIMIT):  # each has had an answer and waits for a request
            newest = stack.enter_context(opened(served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            with contextlib.suppress(ConnectionError):
                newest.recv(65536)
        assert closed_by_server(newest)
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
        until(lambda: server.server_state.total_requests >= LIMIT - 1)
        until(lambda: not server.server_state.connections)
        assert is_healthy(served)
