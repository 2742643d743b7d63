"""Fixtures of a server over a fake daemon: one serves all tests of a file, since a start takes time."""

from collections.abc import Iterator

import pytest

from flexd.config.sections import ServerConfig
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture(scope="module")
def fake() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(scope="module")
def served_daemon(fake: FakeDaemon) -> Iterator[DaemonServer]:
    server = DaemonServer(fake, Metrics(fake), ServerConfig(port=0, metrics_listen="127.0.0.1:0"))
    server.start()
    yield server
    assert server.stop(10)


@pytest.fixture
def daemon(fake: FakeDaemon) -> Iterator[FakeDaemon]:
    """Return the daemon of the server in its first state: what a test has replaced on it goes too."""
    vars(fake).clear()
    fake.__init__()
    yield fake
    if fake.hold is not None:
        fake.hold.set()


@pytest.fixture
def server(served_daemon: DaemonServer, daemon: FakeDaemon) -> DaemonServer:
    """Return the server, with admin API and metrics-only listener on free loopback ports."""
    return served_daemon


@pytest.fixture
def url(server: DaemonServer) -> str:
    return server.address
