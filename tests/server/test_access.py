"""Access by tokens and their scopes, replaced tokens, and counters of refused requests."""

import asyncio
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flexd.api.base import REQUEST_HEADER
from flexd.config.sections import TokenConfig
from flexd.core import secrets as secret
from flexd.server import access
from flexd.server.access import MAX_REQUEST_BYTES, REFUSED_REASONS, RequestGuard
from flexd.server.app import Metrics, create_app
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
    with serve(caller_daemon, tokens=token_configs(directory)) as server:
        yield server.address


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
    said = [vars(record)["fields"] for record in caplog.records if record.message.startswith("admin request ")]
    assert [[each[name] for name in ("caller", "address", "method", "path", "status")] for each in said] == [
        ["operator", "127.0.0.1", "POST", "/v1/resume", 200]
    ]
    assert "admin request caller=operator address=127.0.0.1 method=POST path=/v1/resume status=200" in caplog.text
    assert ADMIN not in caplog.text + str([vars(record) for record in caplog.records])


@pytest.fixture
def own_tokens(tmp_path: Path) -> Iterator[str]:
    with serve(FakeDaemon(), tokens=token_configs(tmp_path)) as server:
        yield server.address


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
    tokens = [TokenConfig(name="x", scope="read", file=tmp_path / "token")]
    with serve(FakeDaemon(), tokens=tokens) as server:
        for sent, status in ((token, 200), (token.strip() + "x", 401), (token.strip()[:-1], 401)):
            headers = {b"authorization": b"Bearer " + sent.strip().encode()}
            assert httpx.get(f"{server.address}/v1/status", headers=headers, timeout=10).status_code == status


DISCONNECT = {"type": "http.disconnect"}


def part(body: bytes, more: bool | None = None) -> dict[str, Any]:
    """A message of the server; None: it says nothing of more."""
    return {"type": "http.request", "body": body} | ({} if more is None else {"more_body": more})


class Exchange:
    """One request through the access.

    Attributes:
        status, headers, error: of the answer. refused: reasons told. heard: what the handler was given, None if it was
            not called. left: messages of the server that nobody asked for.
    """

    def __init__(self, *messages: dict[str, Any], method: str = "POST", scheme: str = "http", **headers: str) -> None:
        self.refused: Counter[str] = Counter()
        self.heard: list[dict[str, Any]] | None = None
        self.sent: list[dict[str, Any]] = []
        self.left = list(messages)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"host": "localhost", REQUEST_HEADER: "test", **given}
        scope = {
            "type": "http", "method": method, "scheme": scheme, "path": "/v1/pause",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        }  # fmt: skip
        guarded = RequestGuard(self._handler, loopback_only=True, refused=self.refused)
        asyncio.run(guarded(scope, self._receive, self._send))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    async def _handler(self, scope: Any, receive: Any, send: Any) -> None:
        self.heard = []
        if scope["method"] == "POST":
            self.heard = [await receive(), await receive()]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def _receive(self) -> dict[str, Any]:
        if not self.left:
            await asyncio.sleep(2.0)
            raise AssertionError("the server has nothing more to say")
        return self.left.pop(0)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    "parts", [[part(b"{}", False)], [part(b"{", True), part(b"}", False)], [part(b"{", True), part(b"}")]]
)
def test_a_handler_receives_the_whole_body_and_then_the_servers_messages(parts: list[dict[str, Any]]) -> None:
    it = Exchange(*parts, DISCONNECT)
    assert (it.status, list(it.refused), it.left) == (200, [], [])
    assert it.heard == [part(b"{}", False), DISCONNECT]


@pytest.mark.parametrize("sent", [[b"x" * MAX_REQUEST_BYTES], [b"x" * (MAX_REQUEST_BYTES - 1), b"x"]])
def test_the_largest_body_passes_and_one_byte_more_does_not(sent: list[bytes]) -> None:
    whole = [part(body, True) for body in sent]
    assert Exchange(*whole, part(b""), DISCONNECT).status == 200
    assert Exchange(*whole, part(b""), DISCONNECT, content_length=str(MAX_REQUEST_BYTES)).status == 200
    it = Exchange(*whole, part(b"x"), DISCONNECT)
    assert (it.status, it.heard, list(it.refused)) == (413, None, ["too_large"])


@pytest.mark.parametrize("declared", [str(MAX_REQUEST_BYTES + 1), "1" * 20, "1" * 5_000, "-1", "1e3", "\xb2", ""])
def test_a_body_declared_too_large_is_refused_at_once(declared: str) -> None:
    it = Exchange(DISCONNECT, content_length=declared)
    assert (it.status, it.heard, list(it.refused), it.left) == (413, None, ["too_large"], [DISCONNECT])


def test_a_truncated_body_reaches_no_handler() -> None:
    """The part that has arrived may be a whole request by itself."""
    it = Exchange(part(b"{}", True), DISCONNECT)
    assert (it.status, it.heard, list(it.refused)) == (400, None, ["malformed"])


def test_a_body_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_SECONDS", 0.05)
    it = Exchange(part(b"{}", True))
    assert (it.status, it.heard, list(it.refused)) == (408, None, ["too_slow"])


@pytest.mark.parametrize(
    ("headers", "scheme"),
    [
        ({"host": "evil.example"}, "http"), ({"host": ""}, "http"), ({"host": "[::1"}, "http"),
        ({"host": "localhost:1@evil.example"}, "http"), ({"origin": "https://localhost"}, "http"),
        ({"origin": "http://localhost"}, "https"), ({"origin": "http://localhost:1"}, "http"), ({"origin": ""}, "http"),
    ],
)  # fmt: skip
def test_unknown_senders_are_refused_before_they_are_read(headers: dict[str, str], scheme: str) -> None:
    it = Exchange(part(b"{}", False), scheme=scheme, **headers)
    assert (it.status, it.heard, list(it.refused), len(it.left)) == (403, None, ["unknown_sender"], 1)


def test_a_refusal_has_a_reason_and_ends_the_connection() -> None:
    it = Exchange(part(b"{}", True), DISCONNECT)
    assert it.headers[b"connection"] == b"close"
    body = it.sent[1]["body"]
    assert int(it.headers[b"content-length"]) == len(body)
    assert json.loads(body)["error"]["message"] == "the request was cut off"


CROSS_SITE: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    # A page of another port of this machine is of the same site.
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    {"sec-fetch-site": "something-new"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"host": "evil.example"},
]
FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
"""Content types that a page may send to another site without asking it first."""


ROUTES = sorted(
    (method, re.sub(r"{\w+}", "latest", route.path))
    for route in create_app(FakeDaemon(), Metrics(FakeDaemon())).routes
    for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
)
"""Method and path of every route of the admin API, the page included."""
POSTS = [path for method, path in ROUTES if method == "POST"]


@pytest.fixture
def bare(server: Any) -> Iterator[httpx.Client]:
    """Yield a client that adds no header of its own, as a browser would not."""
    with httpx.Client(base_url=server.address, timeout=10) as client:
        yield client


@pytest.mark.parametrize("headers", CROSS_SITE, ids=str)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_refuses_other_sites(
    bare: httpx.Client, daemon: FakeDaemon, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = bare.request(method, path, headers={REQUEST_HEADER: "x", **headers})
    assert answer.status_code == 403
    assert answer.json()["error"]["remedy"]
    assert daemon.calls == []


@pytest.mark.parametrize("path", POSTS)
def test_every_post_needs_a_header_that_no_form_can_send(bare: httpx.Client, daemon: FakeDaemon, path: str) -> None:
    """Browsers that send neither ``Origin`` nor ``Sec-Fetch-Site`` send no header of a page's own to another site."""
    for kind in (*FORM_TYPES, "application/json"):
        answer = bare.post(path, content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 403
        assert REQUEST_HEADER in answer.json()["error"]["remedy"].lower()
    assert bare.post(path, content=b"{}", headers={REQUEST_HEADER: ""}).status_code == 403
    assert daemon.calls == []


def test_a_preflight_gets_no_permission(bare: httpx.Client, daemon: FakeDaemon) -> None:
    for path in POSTS:
        answer = bare.options(
            path, headers={"origin": "https://evil.example", "access-control-request-headers": REQUEST_HEADER}
        )
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.status_code == 403
    assert daemon.calls == []


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_own_page_and_the_address_bar_are_served(bare: httpx.Client, site: str) -> None:
    for path in ("/", "/v1/status", "/metrics", "/healthz"):
        assert bare.get(path, headers={"sec-fetch-site": site}).status_code == 200
    assert bare.post("/v1/plan", headers={"sec-fetch-site": site, REQUEST_HEADER: "page"}).status_code == 200
