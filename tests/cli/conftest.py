"""The command line in a subprocess, and a server over a fake daemon for it to talk to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from fake_daemon import FakeDaemon

from flexd.config import ServerConfig
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics

REPOSITORY = Path(__file__).parents[2]
Flexd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def _fake() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(scope="session")
def _served(_fake: FakeDaemon) -> Iterator[DaemonServer]:
    server = DaemonServer(_fake, Metrics(lambda: _fake.figures), ServerConfig(port=0))
    server.start()
    yield server
    assert server.stop(10)


@pytest.fixture
def daemon(_fake: FakeDaemon) -> Iterator[FakeDaemon]:
    _fake.__init__()
    yield _fake
    if _fake.hold is not None:
        _fake.hold.set()


@pytest.fixture
def url(_served: DaemonServer, daemon: FakeDaemon) -> str:
    return _served.address


@pytest.fixture
def flexd_command() -> Flexd:
    """Runs ``flexd ARGUMENTS`` as a process with its output in pipes."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FLEXD")}
        return subprocess.run(
            [sys.executable, "-m", "flexd", *map(str, arguments)],
            cwd=REPOSITORY,
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run
