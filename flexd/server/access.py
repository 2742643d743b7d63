"""Authenticate and authorise requests: tokens and client certificates."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexd.config.server import ApiScope
from flexd.core.errors import ApiError
from flexd.server.guard import answer_error
from flexd.server.protocol import CLIENT_NAME
from flexd.server.tokens import Caller, Tokens

REFUSED_REASONS = (
    "unauthenticated", "unknown_token", "unknown_certificate", "read_only", "unknown_sender", "too_large",
    "too_slow", "malformed",
)  # fmt: skip
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/"})
"""Asked by kubelets, which have no token: they tell whether the daemon is up and ready, and why not. The status page
at ``/`` has no data in it: it asks its reader for a token."""
LOCAL = Caller("local", "admin")
"""Whoever can reach a loopback port or a socket without tokens."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})

_log = logging.getLogger(__name__)
_caller: ContextVar[Caller] = ContextVar("flexd_caller", default=LOCAL)


def current_caller() -> Caller:
    """Who sent the request that is being served, in its handler and what that calls in its own thread."""
    return _caller.get()


def asked_by(said: str) -> str:
    """Whom to record for what the request asks: who its sender is, and then who they say it is for."""
    caller = current_caller()
    if caller is LOCAL:
        return said
    return f"{caller.name} ({said})" if said and said != caller.name else caller.name


class Refusals:
    """Requests refused, by reason (``REFUSED_REASONS``). Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> dict[str, int]:
        """With zeros for reasons that have not come up."""
        with self._lock:
            return {reason: self._counts[reason] for reason in REFUSED_REASONS}


class AccessControl:
    """ASGI middleware, outermost: nothing of a request's body is read before its sender is known and allowed.

    Reading is what GET, HEAD and OPTIONS do; every other method needs the scope "admin", whichever route it is for.

    Args:
        tokens: who the bearer tokens belong to. clients: scope of each common name of a client certificate.
            With neither, everybody who can connect is ``LOCAL``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        clients: Mapping[str, ApiScope],
        refusals: Refusals,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._clients = clients
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        reading = scope["method"] in _READING
        try:
            caller = self._caller(scope)
        except _Refused as refused:
            await self._refuse(send, refused.reason, refused.error)
            return
        if not reading and caller.scope != "admin":
            self._refusals.count("read_only")
            await answer_error(
                send,
                ApiError(f"{caller.name!r} may only read", status=403, remedy="use a token of scope admin"),
            )
            return
        token = _caller.set(caller)
        try:
            await self._app(scope, receive, send if reading else _Audited(send, scope, caller))
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
                raise _Refused("unknown_token", _unauthorized("the token is not known", "is it the right file?"))
            return owner
        name = scope.get(CLIENT_NAME)
        if name is not None and self._clients:
            if name not in self._clients:
                raise _Refused(
                    "unknown_certificate",
                    ApiError(
                        f"the certificate of {str(name)[:200]!r} may do nothing here",
                        status=403, remedy="name it in server.tls.clients",
                    ),
                )  # fmt: skip
            return Caller(str(name), self._clients[name])
        raise _Refused(
            "unauthenticated",
            _unauthorized("the request says not who it is from", "send a bearer token, or use a client certificate"),
        )

    async def _refuse(self, send: Send, reason: str, error: ApiError) -> None:
        self._refusals.count(reason)
        await answer_error(send, error, [(b"www-authenticate", b'Bearer realm="flexd"')] if error.status == 401 else [])


class _Refused(Exception):
    def __init__(self, reason: str, error: ApiError) -> None:
        self.reason = reason
        self.error = error
        super().__init__(reason)


class _Audited:
    """Logs what became of a request that may change something, and who sent it."""

    def __init__(self, send: Send, scope: Scope, caller: Caller) -> None:
        client = scope.get("client")
        address = "local" if client is None else client[0]
        self._send = send
        self._said = {"caller": caller.name, "address": address, "method": scope["method"], "path": scope["path"][:200]}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            _log.info("admin request", extra={**self._said, "status": message["status"]})
        await self._send(message)


def _unauthorized(message: str, remedy: str) -> ApiError:
    return ApiError(message, status=401, remedy=remedy)
