"""The daemon's HTTP server over a fake daemon, and a client of it."""

from collections.abc import Iterator

import httpx
import pytest

from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.served_daemon import daemon, fake, served_daemon, server  # noqa: F401


@pytest.fixture
def client(server: DaemonServer) -> Iterator[httpx.Client]:  # noqa: F811
    with httpx.Client(base_url=server.address, timeout=10, headers=COMMAND_HEADERS) as client:
        yield client
