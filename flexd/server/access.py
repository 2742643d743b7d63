"""Authenticate and authorise requests: bearer tokens and client certificates."""

import asyncio
import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexd.api.base import REQUEST_HEADER, ErrorBody, ErrorDetail
from flexd.api.routes import ROUTES
from flexd.config.base import is_loopback
from flexd.config.sections import ApiScope, TokenConfig
from flexd.core.errors import ApiError, ConfigError
from flexd.core.secrets import KeyFile
from flexd.core.supervision import log_event

CLIENT_NAME = "flexd.client_name"
"""Key of the ASGI scope: common name of the client's certificate."""
MAX_REQUEST_BYTES = 64 * 1024
BODY_SECONDS = 10.0
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class RefusedRequestError(ApiError):
    """A request that no handler sees. ``reason``: one of ``REFUSED_REASONS``."""

    def __init__(self, reason: str, message: str, status: int, remedy: str) -> None:
        super().__init__(message, status=status, remedy=remedy)
        self.reason = reason


def _too_large() -> RefusedRequestError:
    message = f"the request body is larger than {MAX_REQUEST_BYTES} bytes"
    return RefusedRequestError("too_large", message, 413, "send a shorter reason")


class RequestGuard:
    """ASGI middleware.

    A browser on the same machine can be made to send requests to loopback by any page it shows, directly
    (cross-site request) or by a name that resolves to 127.0.0.1 later on (DNS rebinding), and adds its client
    certificate to them. So ``Host`` must be a loopback name, and ``Origin`` and ``Sec-Fetch-Site``, if present, those
    of this server; a link on any page may open ``/``. Browsers that send neither with an image or a form are why
    whatever changes state or computes is a POST with ``REQUEST_HEADER``.

    Args:
        loopback_only: check ``Host``; false on listeners that browsers cannot reach (unix sockets) or that have other
            names (beyond loopback).
        refused: counts requests that are refused here, by reason.
    """

    def __init__(self, app: ASGIApp, *, loopback_only: bool, refused: Counter[str]) -> None:
        self._app = app
        self._loopback_only = loopback_only
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            _check_sender(scope, headers, loopback_only=self._loopback_only)
            if _declared_length(headers) > MAX_REQUEST_BYTES:
                raise _too_large()
            # A GET may carry a body too; it is not read, and uvicorn closes the connection then.
            body = await _whole_body(receive) if scope["method"] not in ("GET", "HEAD") else None
        except RefusedRequestError as error:
            self._refused[error.reason] += 1
            await answer_error(send, error)
            return
        await self._app(scope, receive if body is None else _replayed(body, receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what hands out a body that was read already, then what the server says next (a disconnect)."""
    left = [body]

    async def replay() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replay


async def _whole_body(receive: Receive) -> bytes:
    """Reads the body. Raises RefusedRequestError if it is too large, too slow or cut off."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise RefusedRequestError("malformed", "the request was cut off", 400, "send it again")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_REQUEST_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RefusedRequestError(
            "too_slow", f"the request body did not arrive in {BODY_SECONDS:g} s", 408, "send it again"
        ) from None


def _check_sender(scope: Scope, headers: Headers, *, loopback_only: bool) -> None:
    """Refuse what a page of another site may have sent."""
    method, host, origin = scope["method"], headers.get("host", ""), headers.get("origin")
    if loopback_only and not is_loopback(_host_name(host)):
        raise RefusedRequestError(
            "unknown_sender", f"the Host header {host[:200]!r} is not a loopback name", 403,
            "address the daemon as 127.0.0.1 or localhost",
        )  # fmt: skip
    if origin is not None and origin.lower() != f"{scope.get('scheme', 'http')}://{host}".lower():
        raise RefusedRequestError(
            "unknown_sender", f"requests from the web page {origin[:200]!r} are refused", 403,
            "use the flexd command line or another HTTP client",
        )  # fmt: skip
    # Of the page's requests and of the address bar; another port of this machine is ``same-site``.
    site = headers.get("sec-fetch-site", "none")
    opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    linked = opened and (method, scope["path"]) == ("GET", "/")
    if site not in ("same-origin", "none") and not linked:
        raise RefusedRequestError(
            "unknown_sender", f"requests from pages of other sites are refused (Sec-Fetch-Site: {site[:200]!r})", 403,
            "use the flexd command line or another HTTP client",
        )  # fmt: skip
    if method not in READING_METHODS and not headers.get(REQUEST_HEADER):
        raise RefusedRequestError(
            "unknown_sender", "the request has no header that tells it from a page's", 403,
            f"send the header {REQUEST_HEADER}: with any value",
        )  # fmt: skip


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _declared_length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else MAX_REQUEST_BYTES + 1


async def answer_error(send: Send, error: ApiError) -> None:
    """The error as an answer, after which the connection ends: what is left of the request is not read."""
    detail = ErrorDetail(type=ApiError.__name__, message=error.message, remedy=error.remedy)
    body = ErrorBody(error=detail).model_dump_json().encode()
    headers = [
        *([(b"www-authenticate", b'Bearer realm="flexd"')] if error.status == 401 else []),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class Caller:
    """The sender of a request. ``scope`` "admin" may also change."""

    name: str
    scope: ApiScope


class Tokens:
    """The configured tokens; a changed file takes effect within ``secrets.RELOAD_SECONDS``. Thread-safe.

    Raises:
        ConfigError: a file cannot be read or holds no token, or two names have the same one.
    """

    def __init__(self, configured: Sequence[TokenConfig]) -> None:
        self._files = [
            (Caller(token.name, token.scope), KeyFile(token.file, f"server.tokens[{at}].file"))
            for at, token in enumerate(configured)
        ]
        seen: dict[bytes, str] = {}
        for at, (caller, file) in enumerate(self._files):
            for digest in _digests(file):
                if digest in seen:
                    raise ConfigError(
                        f"server.tokens[{at}].file: {caller.name!r} has the token of {seen[digest]!r}",
                        remedy="give each name a token of its own",
                    )
                seen[digest] = caller.name

    def __bool__(self) -> bool:
        return bool(self._files)

    def owner(self, token: str) -> Caller | None:
        """Return the owner of a token. The time does not depend on which token matches, or whether one does."""
        # Restore the bytes as they were sent: headers are decoded as Latin-1.
        given = hashlib.sha256(token.encode("latin-1")).digest()
        found = None
        for caller, file in self._files:
            for digest in _digests(file):
                if hmac.compare_digest(given, digest):
                    found = caller
        return found


def _digests(file: KeyFile) -> list[bytes]:
    digests = []
    for key in file.keys():  # noqa: SIM118
        match = re.fullmatch(rb"sha256:([0-9a-fA-F]{64})", key)
        digests.append(bytes.fromhex(match[1].decode()) if match else hashlib.sha256(key).digest())
    return digests


REFUSED_REASONS = (
    "unauthenticated", "unknown_token", "unknown_certificate", "read_only", "unknown_sender", "too_large",
    "too_slow", "malformed",
)  # fmt: skip
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/"})
"""Open without a token: kubelets, which have none, request the probes; the status page at ``/`` holds no data."""
LOCAL = Caller("local", "admin")
"""Sender of a request where neither tokens nor client certificates are configured."""
READING_POSTS = frozenset(route.path for route in ROUTES if route.reads)
"""Paths whose POST computes and changes nothing: the scope "read" suffices."""

_log = logging.getLogger(__name__)
_caller: ContextVar[Caller] = ContextVar("flexd_caller", default=LOCAL)


def requester(stated: str) -> str:
    """Return the name to record for a request: its authenticated sender, then the name that the request states.

    Valid in the handler of the request and what that calls in the same thread.
    """
    caller = _caller.get()
    if caller is LOCAL:
        return stated
    return f"{caller.name} ({stated})" if stated and stated != caller.name else caller.name


class AccessControl:
    """Outermost ASGI middleware: no body is read before the sender is authenticated and authorised.

    GET, HEAD and OPTIONS need the scope "read", and so does POST on ``READING_POSTS``; everything else needs "admin",
    on every route.

    Args:
        tokens: owners of the bearer tokens.
        clients: scope of each common name of a client certificate. Without tokens and clients every sender is
            ``LOCAL``.
        refused: counts requests that are refused here, by reason.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens, clients: Mapping[str, ApiScope], refused: Counter[str]) -> None:
        self._app = app
        self._tokens = tokens
        self._clients = clients
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        reading = method in READING_METHODS or (method == "POST" and path in READING_POSTS)
        try:
            caller = self._caller(scope)
            if not reading and caller.scope != "admin":
                message = f"{caller.name!r} may only read"
                raise RefusedRequestError("read_only", message, 403, "use a token of scope admin")
        except RefusedRequestError as refused:
            self._refused[refused.reason] += 1
            await answer_error(send, refused)
            return
        token = _caller.set(caller)
        try:
            await self._app(scope, receive, send if reading else _audited(send, scope, caller))
        finally:
            _caller.reset(token)

    def _caller(self, scope: Scope) -> Caller:
        if not self._tokens and not self._clients:
            return LOCAL
        given = Headers(scope=scope).getlist("authorization")
        if given and self._tokens:
            kind, _, token = given[0].partition(" ")
            owner = self._tokens.owner(token.strip()) if len(given) == 1 and kind.lower() == "bearer" else None
            if owner is None:
                raise RefusedRequestError("unknown_token", "the token is not known", 401, "is it the right file?")
            return owner
        name = scope.get(CLIENT_NAME)
        if name is not None and self._clients:
            if name not in self._clients:
                message = f"the certificate of {str(name)[:200]!r} has no scope here"
                raise RefusedRequestError("unknown_certificate", message, 403, "name it in server.tls.clients")
            return Caller(str(name), self._clients[name])
        raise RefusedRequestError(
            "unauthenticated",
            "the request is not authenticated",
            401,
            "send a bearer token, or use a client certificate",
        )


def _audited(send: Send, scope: Scope, caller: Caller) -> Send:
    """Return ``send`` that logs the outcome and the sender of a request that may change something."""
    address = scope["client"][0] if scope.get("client") else "local"
    fields = {"caller": caller.name, "address": address, "method": scope["method"], "path": scope["path"][:200]}

    async def audited(message: Message) -> None:
        if message["type"] == "http.response.start":
            log_event(_log, logging.INFO, "admin request", {**fields, "status": message["status"]})
        await send(message)

    return audited
