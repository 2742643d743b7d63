"""Signatures of requests and answers between followers and leader: HMAC-SHA256 by the shared secret.

A request's signature covers method, path, time, a nonce, and the digest and length of its body; it is checked before
the body is read, and the digest after. An answer's covers the request's nonce, its status and its body, so that a
recorded one fits no other request. Replaying a delta would be harmless by the position rule; it is refused anyway.

The leader's clock decides whether a request is fresh. Its signed refusal of a stale request states its time, and the
follower dates its next requests by that: clocks that differ, or are set at runtime, hold no counts back.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from flexd.core.errors import ScaleOutError
from flexd.core.process_start import ProcessStart
from flexd.core.secrets import Secret, accepted_keys, equals_any, signing_key

CLOCK_SKEW_SECONDS = 60.0
MAX_NONCES = 100_000
_NONCE_HEX = 32
TIME, NONCE, DIGEST, SIGNATURE = "x-flexd-time", "x-flexd-nonce", "x-flexd-digest", "x-flexd-signature"


def _mac(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def _is_signed(signature: str, secret: Secret, *parts: str) -> bool:
    return equals_any(signature.encode(), [_mac(key, *parts).encode() for key in accepted_keys(secret)])


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def request_headers(
    secret: Secret, method: str, path: str, body: bytes, unix_seconds: float | None = None
) -> dict[str, str]:
    """Return the headers of one request; without a secret the signature is left out."""
    headers = {
        TIME: f"{time.time() if unix_seconds is None else unix_seconds:.3f}",
        NONCE: secrets.token_hex(_NONCE_HEX // 2),
        DIGEST: digest_of(body),
    }
    if secret is not None:
        headers[SIGNATURE] = _mac(
            signing_key(secret), "request", method, path, headers[TIME], headers[NONCE], headers[DIGEST], str(len(body))
        )
    return headers


def answer_signature(secret: Secret, nonce: str, status: int, body: bytes) -> str:
    return _mac(signing_key(secret), "answer", nonce, str(status), digest_of(body))


def check_answer(secret: Secret, nonce: str, status: int, body: bytes, signature: str | None) -> None:
    """Raise ScaleOutError (``unsigned``, ``bad_signature``) unless the leader gave this answer to this request."""
    if secret is None:
        return
    if signature is None:
        raise ScaleOutError(
            f"the leader's answer (HTTP {status}) is not signed", reason="unsigned",
            remedy="give the leader the same secret file, and check that scale_out.leader is the leader",
        )  # fmt: skip
    if not _is_signed(signature, secret, "answer", nonce, str(status), digest_of(body)):
        raise ScaleOutError(
            "the leader's answer has a wrong signature", reason="bad_signature", remedy="use one secret file"
        )


class RequestClock:
    """Clock of a follower's requests: its own, until the leader reports a different time. Not thread-safe.

    Only the leader's clock decides whether a request is fresh, so a follower with a wrong one does no harm by
    following it; a clock that is set meanwhile (either's) does not matter to either.
    """

    def __init__(self) -> None:
        self._leads_seconds = time.time() - time.monotonic()

    def unix_seconds(self) -> float:
        return self._leads_seconds + time.monotonic()

    def follow(self, leader_unix_seconds: float) -> float:
        """Follow the leader's clock from now on. Return the difference in seconds."""
        apart = leader_unix_seconds - self.unix_seconds()
        self._leads_seconds += apart
        return apart


class RequestVerifier:
    """Refuse requests that are unsigned, stale or replayed. Thread-safe.

    Args:
        clock: unix seconds; by default those of the start plus the time since, whatever the calendar is set to.
    """

    def __init__(self, secret: Secret, clock: Callable[[], float] | None = None) -> None:
        started = ProcessStart()
        self._secret = secret
        self._clock = clock or (lambda: started.unix_seconds_since)
        self._lock = threading.Lock()
        self._nonces: dict[str, float] = {}
        """Nonce -> time at which it is dropped, in order of arrival."""

    def check(self, method: str, path: str, headers: Mapping[str, str], body_bytes: int) -> str:
        """Check the headers and return the digest to compare the body with.

        Raises:
            ScaleOutError: ``unsigned``, ``bad_signature``, ``stale``, ``replayed`` or ``busy``.
        """
        digest = headers.get(DIGEST, "")
        if self._secret is None:
            return digest
        signature, nonce, at = headers.get(SIGNATURE), headers.get(NONCE, ""), headers.get(TIME, "")
        if signature is None:
            raise ScaleOutError("the request is not signed", reason="unsigned", remedy="set scale_out.secret_file")
        if not _is_signed(signature, self._secret, "request", method, path, at, nonce, digest, str(body_bytes)):
            raise ScaleOutError("the request has a wrong signature", reason="bad_signature", remedy="use one secret")
        now = self._clock()
        # Signed, so it is one of our own numbers.
        if abs(now - float(at)) > CLOCK_SKEW_SECONDS:
            raise ScaleOutError(
                f"the request is {now - float(at):.0f} s old", reason="stale", remedy="set the clocks of the machines"
            )
        self._remember(nonce, now)
        return digest

    def release(self, nonce: str) -> None:
        """Let the nonce of a request that was checked and then refused be used again: nothing of it was counted, and
        its sender may not be the one who cut it off or changed its body."""
        with self._lock:
            self._nonces.pop(nonce, None)

    def now(self) -> float:
        """Return the leader's time in Unix seconds."""
        return self._clock()

    def _remember(self, nonce: str, now: float) -> None:
        with self._lock:
            while self._nonces and next(iter(self._nonces.values())) < now:
                del self._nonces[next(iter(self._nonces))]
            if nonce in self._nonces:
                raise ScaleOutError("the request was seen before", reason="replayed", remedy="sign each one anew")
            if len(self._nonces) >= MAX_NONCES:
                raise ScaleOutError("too many requests", reason="busy", remedy="push less often")
            # Kept as long as it could be fresh: it may be dated ahead by the skew.
            self._nonces[nonce] = now + 2 * CLOCK_SKEW_SECONDS
