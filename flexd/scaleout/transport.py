"""Count deltas over HTTP: the leader's listener and the follower's link."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from flexd.config.base import is_loopback
from flexd.core.errors import ApiError, ScaleOutError
from flexd.core.secrets import Secret
from flexd.core.supervision import Supervisor
from flexd.scaleout import push_answer, signing
from flexd.scaleout.follower_registry import REASONS
from flexd.scaleout.leader import DeltaReceiver, Leader
from flexd.scaleout.push_answer import PushAnswer
from flexd.server.guard import refuse_browsers
from flexd.server.http import HttpListener

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

PATH = "/v1/delta"
BODY_SECONDS = 30.0
CONNECT_SECONDS = 5.0
ATTEMPT_SECONDS = 60.0
"""Deadline of one attempt of a follower, including the leader's merge."""
MAX_CONNECTIONS = 1024
MAX_BODIES = 4
"""Deltas held in memory at one time; others wait, and are refused as ``busy`` after ``QUEUE_SECONDS``."""
QUEUE_SECONDS = 20.0

_STATUS = {
    "unsigned": 401, "bad_signature": 401, "stale": 401, "replayed": 401, "malformed": 422, "format": 422,
    "too_large": 413, "unknown_sender": 403, "starting": 503, "busy": 503, "not_found": 404,
}  # fmt: skip


class DeltaApp:
    """ASGI application with one path. No body is read before the signature of its request is verified.

    Args:
        secret: None: not signed, for loopback only.
        loopback_only: refuse a ``Host`` that is no loopback name.
        verifier: for tests with another clock.
    """

    def __init__(
        self,
        leader: DeltaReceiver,
        secret: Secret,
        verifier: signing.RequestVerifier | None = None,
        *,
        loopback_only: bool = True,
    ) -> None:
        self._loopback_only = loopback_only
        self._leader = leader
        self._secret = secret
        self._verifier = verifier or signing.RequestVerifier(secret)
        self._bodies = asyncio.Semaphore(MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        try:
            answer = await self._answer(scope, headers, receive)
            status, body = (409 if answer.outcome == "refused" else 200), push_answer.encode(answer)
        except ScaleOutError as error:
            status = _STATUS.get(error.reason, 500)
            refusal: dict[str, object] = {"reason": error.reason, "message": str(error)}
            if error.reason == "stale":
                refusal["unix_seconds"] = self._verifier.now()
            body = json.dumps(refusal).encode()
        except Exception:
            _log.exception("a delta could not be processed")
            self._leader.followers.count_refusal("internal_error")
            status, body = 500, json.dumps({"reason": "internal_error", "message": "see the leader's log"}).encode()
        out = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self._secret is not None:
            signature = signing.answer_signature(self._secret, headers.get(signing.NONCE, ""), status, body)
            out.append((signing.SIGNATURE.encode(), signature.encode()))
        if status not in (200, 409):
            # The rest of the body is not read.
            out.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": out})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive) -> PushAnswer:
        if scope["path"] != PATH or scope["method"] != "POST":
            raise ScaleOutError(f"only POST {PATH} is served", reason="not_found")
        try:
            try:
                refuse_browsers(headers, loopback_only=self._loopback_only)
            except ApiError as error:
                raise ScaleOutError(str(error), reason="unknown_sender") from None
            length = _length(headers, self._leader.max_unpacked_bytes)
            digest = self._verifier.check("POST", PATH, headers, length)
        except ScaleOutError as error:
            self._leader.followers.count_refusal(error.reason)
            raise
        try:
            answer = await self._offer(receive, length, digest)
        except BaseException:
            self._verifier.release(headers.get(signing.NONCE, ""))
            raise
        if answer.outcome == "refused":
            self._verifier.release(headers.get(signing.NONCE, ""))
        return answer

    async def _offer(self, receive: Receive, length: int, digest: str) -> PushAnswer:
        """Read the body of a checked request and offer it to the leader."""
        try:
            try:
                await asyncio.wait_for(self._bodies.acquire(), QUEUE_SECONDS)
            except TimeoutError:
                raise ScaleOutError("too many deltas at one time", reason="busy", remedy="it is retried") from None
            try:
                body = await _body(receive, length)
                if self._secret is not None and signing.digest_of(body) != digest:
                    raise ScaleOutError("the body is not the one that was signed", reason="bad_signature")
            except BaseException:
                self._bodies.release()
                raise
        except ScaleOutError as error:
            self._leader.followers.count_refusal(error.reason)
            raise
        try:
            return await run_in_threadpool(self._leader.offer, body)
        finally:
            self._bodies.release()


def listener(
    leader: DeltaReceiver, secret: Secret, host: str, port: int, supervisor: Supervisor | None = None
) -> HttpListener:
    """Return the leader's listener, not started."""
    app = DeltaApp(leader, secret, loopback_only=is_loopback(host))
    return HttpListener(
        app, host=host, port=port, max_connections=MAX_CONNECTIONS, named="scale_out.listen_host",
        supervisor=supervisor, thread="flexd-scale-out",
    )  # fmt: skip


class HttpLink:
    """Connection to a leader on another machine. Not thread-safe."""

    def __init__(self, host: str, port: int, secret: Secret, attempt_seconds: float = ATTEMPT_SECONDS) -> None:
        # Only a follower needs it, and it brings a command line of its own with it.
        import httpx

        bare = f"[{host}]" if ":" in host else host
        self._url = f"http://{bare}:{port}{PATH}"
        self._secret = secret
        self._attempt_seconds = attempt_seconds
        self._clock = signing.RequestClock()
        self._client = httpx.Client(
            timeout=httpx.Timeout(attempt_seconds, connect=min(CONNECT_SECONDS, attempt_seconds)), trust_env=False,
            limits=httpx.Limits(max_connections=1),
        )  # fmt: skip

    def offer(self, data: bytes) -> PushAnswer:
        status, body = self._post(data)
        if _reason(body) == "stale" and self._follow_clock(body):
            status, body = self._post(data)
        if status in (200, 409):
            return push_answer.decode(body)
        raise ScaleOutError(f"{self._url}: HTTP {status}: {_message(body)}", reason=_reason(body))

    def _post(self, data: bytes) -> tuple[int, bytes]:
        """Send once; return HTTP status and body of the verified answer."""
        import httpx

        headers = signing.request_headers(self._secret, "POST", PATH, data, self._clock.unix_seconds())
        deadline = time.monotonic() + self._attempt_seconds
        try:
            with self._client.stream("POST", self._url, content=data, headers=headers) as response:
                body = _bounded(response, deadline)
                status, signature = response.status_code, response.headers.get(signing.SIGNATURE)
        except (httpx.HTTPError, OSError) as error:
            raise ScaleOutError(
                f"{self._url}: {type(error).__name__}: {error}", reason="unreachable",
                remedy="is the leader up, and scale_out.leader its address?",
            ) from error  # fmt: skip
        signing.check_answer(self._secret, headers[signing.NONCE], status, body, signature)
        return status, body

    def _follow_clock(self, body: bytes) -> bool:
        """Follow the clock of a refusal. Return False if it states no time."""
        unix_seconds = _document(body).get("unix_seconds")
        if not isinstance(unix_seconds, (int, float)) or not math.isfinite(unix_seconds):
            return False
        difference = self._clock.follow(float(unix_seconds))
        _log.warning(
            "leader: its clock differs by %+.0f s from this one: requests are dated by the leader's", difference
        )
        return True

    def close(self) -> None:
        self._client.close()


class LocalLink:
    """Connection to a leader in this process, for partitions that it reads itself."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def offer(self, data: bytes) -> PushAnswer:
        return self._leader.offer(data)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _length(headers: Headers, max_bytes: int) -> int:
    text = headers.get("content-length", "")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ScaleOutError("the length of the request is not given", reason="malformed")
    if int(text) > max_bytes:
        raise ScaleOutError(
            f"a delta of {text} bytes, at most {max_bytes} are taken", reason="too_large",
            remedy="give all daemons of a job the same sketch.memory_bytes",
        )  # fmt: skip
    return int(text)


async def _body(receive: Receive, length: int) -> bytes:
    """Read exactly ``length`` bytes. Raises ScaleOutError if there are more, fewer, or they arrive too slowly."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ScaleOutError("the request was cut off", reason="malformed")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > length:
                    raise ScaleOutError("the request is longer than its content-length", reason="malformed")
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ScaleOutError(f"the request did not arrive in {BODY_SECONDS:g} s", reason="malformed") from None
    if size != length:
        raise ScaleOutError("the request is shorter than its content-length", reason="malformed")
    return b"".join(parts)


def _bounded(response: httpx.Response, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    for part in response.iter_raw():
        size += len(part)
        if size > push_answer.MAX_ANSWER_BYTES or time.monotonic() > deadline:
            raise ScaleOutError("the leader's answer is too large or too slow", reason="malformed")
        parts.append(part)
    return b"".join(parts)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _reason(body: bytes) -> str:
    reason = str(_document(body).get("reason", ""))
    return reason if reason in REASONS else "unreachable"


def _message(body: bytes) -> str:
    return str(_document(body).get("message", "no flexd leader answers here"))[:500]
