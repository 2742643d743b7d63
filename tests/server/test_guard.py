"""The guard checks requests message by message; handlers see no refused request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from flexd.api.base import REQUEST_HEADER
from flexd.server import access
from flexd.server.access import MAX_REQUEST_BYTES, RequestGuard

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
        self.refused: list[str] = []
        self.heard: list[dict[str, Any]] | None = None
        self.sent: list[dict[str, Any]] = []
        self.left = list(messages)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"host": "localhost", REQUEST_HEADER: "test", **given}
        scope = {
            "type": "http", "method": method, "scheme": scheme, "path": "/v1/pause",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        }  # fmt: skip
        guarded = RequestGuard(self._handler, loopback_only=True, on_refused=self.refused.append)
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
    assert (it.status, it.refused, it.left) == (200, [], [])
    assert it.heard == [part(b"{}", False), DISCONNECT]


@pytest.mark.parametrize("sent", [[b"x" * MAX_REQUEST_BYTES], [b"x" * (MAX_REQUEST_BYTES - 1), b"x"]])
def test_the_largest_body_passes_and_one_byte_more_does_not(sent: list[bytes]) -> None:
    whole = [part(body, True) for body in sent]
    assert Exchange(*whole, part(b""), DISCONNECT).status == 200
    assert Exchange(*whole, part(b""), DISCONNECT, content_length=str(MAX_REQUEST_BYTES)).status == 200
    it = Exchange(*whole, part(b"x"), DISCONNECT)
    assert (it.status, it.heard, it.refused) == (413, None, ["too_large"])


@pytest.mark.parametrize("declared", [str(MAX_REQUEST_BYTES + 1), "1" * 20, "1" * 5_000, "-1", "1e3", "\xb2", ""])
def test_a_body_declared_too_large_is_refused_at_once(declared: str) -> None:
    it = Exchange(DISCONNECT, content_length=declared)
    assert (it.status, it.heard, it.refused, it.left) == (413, None, ["too_large"], [DISCONNECT])


def test_a_truncated_body_reaches_no_handler() -> None:
    """The part that has arrived may be a whole request by itself."""
    it = Exchange(part(b"{}", True), DISCONNECT)
    assert (it.status, it.heard, it.refused) == (400, None, ["malformed"])


def test_a_body_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_SECONDS", 0.05)
    it = Exchange(part(b"{}", True))
    assert (it.status, it.heard, it.refused) == (408, None, ["too_slow"])


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
    assert (it.status, it.heard, it.refused, len(it.left)) == (403, None, ["unknown_sender"], 1)


def test_a_refusal_has_a_reason_and_ends_the_connection() -> None:
    it = Exchange(part(b"{}", True), DISCONNECT)
    assert it.headers[b"connection"] == b"close"
    body = it.sent[1]["body"]
    assert int(it.headers[b"content-length"]) == len(body)
    assert json.loads(body)["error"]["message"] == "the request was cut off"
