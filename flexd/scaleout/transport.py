"""Deltas over HTTP: the leader's listener and the follower's link."""

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

from flexd.core.errors import ScaleOutError
from flexd.core.secrets import Secret
from flexd.scaleout import push_answer as answers
from flexd.scaleout import signing
from flexd.scaleout.leader import REASONS, Leader
from flexd.scaleout.push_answer import Answer
from flexd.server.http import HttpListener

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

PATH = "/v1/delta"
BODY_SECONDS = 30.0
CONNECT_SECONDS = 5.0
ATTEMPT_SECONDS = 60.0
"""Deadline of one attempt of a follower, with the leader's merging."""
MAX_CONNECTIONS = 1024
MAX_BODIES = 4
"""Deltas held in memory at one time; more wait, and are told ``busy`` after ``QUEUE_SECONDS``."""
QUEUE_SECONDS = 20.0

_STATUS = {
    "unsigned": 401, "bad_signature": 401, "stale": 401, "replayed": 401, "malformed": 422, "too_large": 413,
    "starting": 503, "busy": 503, "not_found": 404,
}  # fmt: skip


class DeltaApp:
    """ASGI application with one path. Nothing of a body is read before its request's signature holds.

    Args:
        secret: None: not signed, for loopback only.
        verifier: for tests with another clock.
    """

    def __init__(self, leader: Leader, secret: Secret, verifier: signing.RequestVerifier | None = None) -> None:
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
            status, body = (409 if answer.outcome == "refused" else 200), answers.encode(answer)
        except ScaleOutError as error:
            status = _STATUS.get(error.reason, 500)
            told: dict[str, object] = {"reason": error.reason, "message": str(error)}
            if error.reason == "stale":
                told["unix_seconds"] = self._verifier.now()
            body = json.dumps(told).encode()
        except Exception:
            _log.exception("a delta could not be taken")
            self._leader.count_refusal("internal_error")
            status, body = 500, json.dumps({"reason": "internal_error", "message": "see the leader's log"}).encode()
        out = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self._secret is not None:
            signature = signing.answer_signature(self._secret, headers.get(signing.NONCE, ""), status, body)
            out.append((signing.SIGNATURE.encode(), signature.encode()))
        if status not in (200, 409):
            # What is left of the body is not read.
            out.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": out})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive) -> Answer:
        if scope["path"] != PATH or scope["method"] != "POST":
            raise ScaleOutError(f"only POST {PATH} is served", reason="not_found")
        try:
            length = _length(headers, self._leader.max_unpacked_bytes)
            digest = self._verifier.check("POST", PATH, headers, length)
            try:
                await asyncio.wait_for(self._bodies.acquire(), QUEUE_SECONDS)
            except TimeoutError:
                raise ScaleOutError("too many deltas at one time", reason="busy", remedy="it is tried again") from None
            try:
                body = await _body(receive, length)
                if self._secret is not None and signing.digest_of(body) != digest:
                    raise ScaleOutError("the body is not the one that was signed", reason="bad_signature")
            except BaseException:
                self._bodies.release()
                raise
        except ScaleOutError as error:
            self._leader.count_refusal(error.reason)
            raise
        try:
            return await run_in_threadpool(self._leader.offer, body)
        finally:
            self._bodies.release()


def listener(leader: Leader, secret: Secret, host: str, port: int) -> HttpListener:
    """Not started yet."""
    return HttpListener(
        DeltaApp(leader, secret), host=host, port=port, max_connections=MAX_CONNECTIONS, named="scale_out.listen_host"
    )


class HttpLink:
    """The way to a leader on another machine. One thread at a time."""

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

    def offer(self, data: bytes) -> Answer:
        status, body = self._post(data)
        if _reason(body) == "stale" and self._follow_clock(body):
            status, body = self._post(data)
        if status in (200, 409):
            return answers.decode(body)
        raise ScaleOutError(f"{self._url}: HTTP {status}: {_message(body)}", reason=_reason(body))

    def _post(self, data: bytes) -> tuple[int, bytes]:
        """HTTP status and body of an answer that is the leader's to this request."""
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
        """Whether the refusal says what time it is at the leader."""
        said = _document(body).get("unix_seconds")
        if not isinstance(said, (int, float)) or not math.isfinite(said):
            return False
        apart = self._clock.follow(float(said))
        _log.warning("leader: its clock is %+.0f s from this one: requests are dated by the leader's", apart)
        return True

    def close(self) -> None:
        self._client.close()


class LocalLink:
    """The way to a leader in this process, for partitions that it reads itself."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def offer(self, data: bytes) -> Answer:
        return self._leader.offer(data)

    def close(self) -> None:
        """Nothing to release."""


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
    """Exactly ``length`` bytes. Raises ScaleOutError if there are others or they come too slowly."""
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
                    raise ScaleOutError("the request is longer than it said", reason="malformed")
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ScaleOutError(f"the request did not arrive in {BODY_SECONDS:g} s", reason="malformed") from None
    if size != length:
        raise ScaleOutError("the request is shorter than it said", reason="malformed")
    return b"".join(parts)


def _bounded(response: httpx.Response, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    for part in response.iter_raw():
        size += len(part)
        if size > answers.MAX_ANSWER_BYTES or time.monotonic() > deadline:
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
