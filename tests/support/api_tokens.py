"""A server of one test, and bearer tokens that it may require."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from flexd.config.sections import ServerConfig, TokenConfig
from flexd.server.access import requester
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.fake_daemon import FakeDaemon

READ, ADMIN = "the token of the dashboard", "the token of the operator"


class CallerDaemon(FakeDaemon):
    """Records the name of the sender with each call."""

    def _enter(self, *call: object) -> None:
        super()._enter(*call, requester(""))


@contextlib.contextmanager
def serve(daemon: FakeDaemon, **config: object) -> Iterator[DaemonServer]:
    server = DaemonServer(daemon, Metrics(daemon), ServerConfig(port=0, **config))  # type: ignore[arg-type]
    server.start()
    try:
        yield server
    finally:
        assert server.stop(10)


def token_configs(directory: Path) -> list[TokenConfig]:
    """Write a read token in plain text and an admin token as its digest."""
    (directory / "read").write_text(READ + "\n")
    (directory / "admin").write_text("sha256:" + hashlib.sha256(ADMIN.encode()).hexdigest())
    return [
        TokenConfig(name="dashboard", scope="read", file=directory / "read"),
        TokenConfig(name="operator", scope="admin", file=directory / "admin"),
    ]


def get(url: str, token: str | None = None, path: str = "/v1/status", method: str = "GET") -> httpx.Response:
    headers = COMMAND_HEADERS | ({} if token is None else {"authorization": f"Bearer {token}"})
    return httpx.request(method, url + path, headers=headers, timeout=10, json={} if method == "POST" else None)
