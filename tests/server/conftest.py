"""One server over a fake daemon for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexd.config.server import ServerConfig
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture(scope="session")
def _daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(scope="session")
def _server(_daemon: FakeDaemon) -> Iterator[DaemonServer]:
    config = ServerConfig(port=0, metrics_listen="127.0.0.1:0")
    served = DaemonServer(_daemon, Metrics(_daemon), config)
    served.start()
    yield served
    assert served.stop(10)


@pytest.fixture
def daemon(_daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    """Fresh for each test, behind one server (starting one takes a good part of a second)."""
    _daemon.__init__()
    yield _daemon
    if _daemon.hold is not None:
        _daemon.hold.set()


@pytest.fixture
def server(_server: DaemonServer, daemon: FakeDaemon) -> DaemonServer:
    """Admin API and metrics-only listener on free loopback ports."""
    return _server
