"""Access by tokens and their scopes, replaced tokens, and counters of refused requests."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flexd.config.server import TokenConfig
from flexd.core import secrets as secret
from flexd.server.access import REFUSED_REASONS
from tests.support.api_tokens import ADMIN, READ, CallerDaemon, get, serve, token_configs
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def caller_daemon() -> CallerDaemon:
    return CallerDaemon()


@pytest.fixture(scope="module")
def guarded(caller_daemon: CallerDaemon, directory: Path) -> Iterator[str]:
    server = serve(caller_daemon, tokens=token_configs(directory))
    yield server.address
    assert server.stop(10)


def refused(url: str) -> dict[str, float]:
    page = get(url, ADMIN, "/metrics").text
    found = [line.split() for line in page.splitlines() if line.startswith("flexd_api_refused_requests_total{")]
    return {name.split('"')[1]: float(value) for name, value in found}


def test_only_tokens_give_access_and_each_names_its_sender(guarded: str, caller_daemon: CallerDaemon) -> None:
    before = refused(guarded)
    assert set(before) == set(REFUSED_REASONS)
    caller_daemon.__init__()
    for token, path in [
        (None, "/v1/status"),
        ("guess", "/v1/status"),
        ("guess again", "/metrics"),
        (None, "/openapi.json"),
    ]:
        answer = get(guarded, token, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "ApiError")
        assert answer.headers["www-authenticate"] == 'Bearer realm="flexd"'
    assert httpx.get(guarded + "/v1/status", headers={"authorization": f"Basic {READ}"}).status_code == 401
    twice = [("authorization", f"Bearer {READ}"), ("authorization", f"Bearer {ADMIN}")]
    assert httpx.get(guarded + "/v1/status", headers=twice).status_code == 401
    assert caller_daemon.calls == []
    assert get(guarded, READ).status_code == 200
    assert get(guarded, ADMIN, "/v1/pause", "POST").json()["changed"] is True
    assert [call[-1] for call in caller_daemon.calls] == ["dashboard", "operator"]
    after = refused(guarded)
    assert after["unauthenticated"] - before["unauthenticated"] == 2
    assert after["unknown_token"] - before["unknown_token"] == 4


def test_a_body_is_not_read_before_its_sender_is_known(guarded: str, caller_daemon: CallerDaemon) -> None:
    caller_daemon.__init__()
    url = httpx.URL(guarded)
    with socket.create_connection((url.host, url.port or 0), timeout=5) as raw:
        raw.sendall(b"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{")
        assert raw.recv(4096).startswith(b"HTTP/1.1 401 ")
    assert caller_daemon.calls == []


def test_admin_requests_are_logged_with_sender_and_outcome(guarded: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexd.server.access")
    get(guarded, ADMIN, "/v1/resume", "POST")
    get(guarded, READ)
    said = [vars(record) for record in caplog.records if record.message == "admin request"]
    assert [[each[name] for name in ("caller", "address", "method", "path", "status")] for each in said] == [
        ["operator", "127.0.0.1", "POST", "/v1/resume", 200]
    ]
    assert ADMIN not in caplog.text + str([vars(record) for record in caplog.records])


@pytest.fixture
def own_tokens(tmp_path: Path) -> Iterator[str]:
    server = serve(FakeDaemon(), tokens=token_configs(tmp_path))
    yield server.address
    assert server.stop(10)


def test_a_token_is_replaced_without_a_restart(
    own_tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret, "RELOAD_SECONDS", 0.0)
    (tmp_path / "read").write_text(f"another token of it\n{READ}\n")
    assert [get(own_tokens, token).status_code for token in (READ, "another token of it")] == [200, 200]
    (tmp_path / "read").write_text("another token of it\n")
    assert [get(own_tokens, token).status_code for token in (READ, "another token of it")] == [401, 200]


@pytest.mark.parametrize(
    "token", ["sha256:" + "0" * 64 + " and more", "x" * 2_000, "sécurité des données", "  with spaces around it "]
)
def test_a_token_is_its_whole_line(tmp_path: Path, token: str) -> None:
    """A token that begins like a digest, is long, or is not ASCII is compared as a whole."""
    (tmp_path / "token").write_text(token + "\n", encoding="utf-8")
    server = serve(FakeDaemon(), tokens=[TokenConfig(name="x", scope="read", file=tmp_path / "token")])
    try:
        for sent, status in ((token, 200), (token.strip() + "x", 401), (token.strip()[:-1], 401)):
            headers = {b"authorization": b"Bearer " + sent.strip().encode()}
            assert httpx.get(f"{server.address}/v1/status", headers=headers, timeout=10).status_code == status
    finally:
        assert server.stop(10)
