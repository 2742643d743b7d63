"""Check requests before their handlers: bodies must be small, and web pages of other sites are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexd.api.base import REQUEST_HEADER, error_body
from flexd.config.base import is_loopback
from flexd.core.errors import ApiError

MAX_REQUEST_BYTES = 64 * 1024
BODY_SECONDS = 10.0
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITE = frozenset({"same-origin", "none"})
"""``Sec-Fetch-Site`` of the page's requests and of the address bar. Another port of this machine is ``same-site``."""
_REASONS = {403: "unknown_sender", 408: "too_slow", 413: "too_large"}


class RequestTooLargeError(ApiError):
    """The body is larger than any verb needs."""

    def __init__(self) -> None:
        super().__init__(
            f"the request body is larger than {MAX_REQUEST_BYTES} bytes", status=413, remedy="send a shorter reason"
        )


class RequestGuard:
    """ASGI middleware.

    A browser on the same machine can be made to send requests to loopback by any page it shows, directly
    (cross-site request) or by a name that resolves to 127.0.0.1 later on (DNS rebinding), and adds its client
    certificate to them. So ``Host`` must be a loopback name, and ``Origin`` and ``Sec-Fetch-Site``, if present, those
    of this server. Browsers that send neither with an image or a form are why whatever changes state or computes is a
    POST with ``REQUEST_HEADER``.

    Args:
        loopback_only: check ``Host``; false on listeners that browsers cannot reach (unix sockets) or that have other
            names (beyond loopback).
        linked_paths: paths that a link on any page may open.
        on_refused: called with the reason of each request that is refused here.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        loopback_only: bool,
        linked_paths: frozenset[str] = frozenset({"/"}),
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._app = app
        self._loopback_only = loopback_only
        self._linked_paths = linked_paths
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._loopback_only:
                _refuse_other_hosts(headers)
            _refuse_other_origins(headers, str(scope.get("scheme", "http")))
            linked = scope["method"] == "GET" and scope["path"] in self._linked_paths
            _refuse_other_sites(headers, linked=linked)
            if scope["method"] not in READING_METHODS:
                _require_request_header(headers)
            if _declared_length(headers) > MAX_REQUEST_BYTES:
                raise RequestTooLargeError
            # A GET may carry a body too; it is not read, and uvicorn closes the connection then.
            body = await _whole_body(receive) if scope["method"] not in ("GET", "HEAD") else None
        except ApiError as error:
            self._on_refused(_REASONS.get(error.status, "malformed"))
            await answer_error(send, error)
            return
        await self._app(scope, receive if body is None else _Replay(body, receive), send)


class _Replay:
    """Hands out a body that was read already, then what the server says next (a disconnect)."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _whole_body(receive: Receive) -> bytes:
    """Reads the body. Raises ApiError if it is too large, too slow or cut off."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ApiError("the request was cut off", status=400, remedy="send it again")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_REQUEST_BYTES:
                    raise RequestTooLargeError
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            f"the request body did not arrive in {BODY_SECONDS:g} s", status=408, remedy="send it again"
        ) from None


def _refuse_other_hosts(headers: Headers) -> None:
    host = headers.get("host", "")
    if not is_loopback(_host_name(host)):
        raise ApiError(
            f"the Host header {host[:200]!r} is not a loopback name",
            status=403,
            remedy="address the daemon as 127.0.0.1 or localhost",
        )


def _refuse_other_origins(headers: Headers, scheme: str) -> None:
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"{scheme}://{headers.get('host', '')}".lower():
        raise ApiError(
            f"requests from the web page {origin[:200]!r} are refused",
            status=403,
            remedy="use the flexd command line or another HTTP client",
        )


def _refuse_other_sites(headers: Headers, *, linked: bool) -> None:
    site = headers.get("sec-fetch-site")
    if site is None or site in _OWN_SITE:
        return
    opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    if not (linked and opened):
        raise ApiError(
            f"requests from pages of other sites are refused (Sec-Fetch-Site: {site[:200]!r})",
            status=403,
            remedy="use the flexd command line or another HTTP client",
        )


def _require_request_header(headers: Headers) -> None:
    if not headers.get(REQUEST_HEADER):
        raise ApiError(
            "the request has no header that tells it from a page's",
            status=403,
            remedy=f"send the header {REQUEST_HEADER}: with any value",
        )


def refuse_browsers(headers: Headers, *, loopback_only: bool) -> None:
    """Raise ApiError for a request that a browser sent, and for a ``Host`` that is not loopback if ``loopback_only``.

    For listeners that serve programs alone.
    """
    if loopback_only:
        _refuse_other_hosts(headers)
    for name in ("origin", "sec-fetch-site"):
        if name in headers:
            raise ApiError(f"requests of browsers are refused ({name})", status=403, remedy="use another HTTP client")


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _declared_length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else MAX_REQUEST_BYTES + 1


async def answer_error(send: Send, error: ApiError, more_headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """The error as an answer, after which the connection ends: what is left of the request is not read."""
    body = json.dumps(error_body(error).model_dump()).encode()
    headers = [
        *more_headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
