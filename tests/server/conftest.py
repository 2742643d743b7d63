"""One server over a fake daemon for all tests of the folder, and a client of it."""

from collections.abc import Iterator

import httpx
import pytest

from flexd.config.sections import ServerConfig
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture(scope="module")
def _daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(scope="module")
def _server(_daemon: FakeDaemon) -> Iterator[DaemonServer]:
    config = ServerConfig(port=0, metrics_listen="127.0.0.1:0")
    served = DaemonServer(_daemon, Metrics(_daemon), config)
    served.start()
    yield served
    assert served.stop(10)


@pytest.fixture
def daemon(_daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    """Return the daemon of the server in its first state: one server serves all tests, since a start takes time."""
    _daemon.__init__()
    yield _daemon
    if _daemon.hold is not None:
        _daemon.hold.set()


@pytest.fixture
def server(_server: DaemonServer, daemon: FakeDaemon) -> DaemonServer:
    """Return the server, with admin API and metrics-only listener on free loopback ports."""
    return _server


@pytest.fixture
def client(server: DaemonServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=10, headers=COMMAND_HEADERS) as client:
        yield client
