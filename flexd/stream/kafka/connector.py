"""Build a Kafka client in a thread and retry until it succeeds, and check the options that a caller may set."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from kafka.errors import KafkaConfigurationError

from flexd.core.errors import StreamError
from flexd.core.supervision import Backoff

_log = logging.getLogger(__name__)

Client = TypeVar("Client")

ClientOption = str | int | float | bool

FATAL_ERRORS = (KafkaConfigurationError, ValueError, TypeError, AssertionError, FileNotFoundError, PermissionError)
"""Exceptions of a client's constructor that no retry can fix: its options are wrong."""
_RESERVED = frozenset(
    (
        "bootstrap_servers",
        "group_id",
        "enable_auto_commit",
        "auto_offset_reset",
        "isolation_level",
        "value_deserializer",
        "value_serializer",
    )
)
_SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

MAX_HUNG = 4
"""Attempts without a result that are left behind."""


class Connector(Generic[Client]):
    """Own at most one client. Belongs to one thread; ``client`` and ``problem`` may be read from any.

    An attempt without a result in time is left behind, because it may hang for ever (kafka-python waits so for a TLS
    handshake), and another one follows; once ``MAX_HUNG`` are, the last is waited for. A client that is built after
    that, or after ``close``, is disposed of.

    Args:
        name: of the peer, for messages.
        make: build the client; may block.
        dispose: close a client; may block.
        timeout_seconds: time in which an attempt has a result.
        backoff_seconds: shortest and longest wait after an attempt that failed or was left behind.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Client],
        dispose: Callable[[Client], None],
        *,
        timeout_seconds: float,
        backoff_seconds: tuple[float, float] = (0.25, 10.0),
    ) -> None:
        self._name = name
        self._make = make
        self._dispose = dispose
        self._timeout_seconds = timeout_seconds
        self._backoff = Backoff(*backoff_seconds)
        self._attempt: Future[Client] | None = None
        self._hung: list[Future[Client]] = []
        self._next_attempt = self._late_at = 0.0
        self._closed = False
        self.client: Client | None = None
        self.problem: str | None = None

    def get(self, timeout_seconds: float) -> Client | None:
        """Return the client, or None if it is not connected within the deadline (``problem`` has the reason).

        Raises:
            StreamError: the arguments of the client are wrong, or the connector is closed.
        """
        if self._closed:
            raise StreamError(f"{self._name}: closed")
        deadline = time.monotonic() + timeout_seconds
        while self.client is None:
            if self._attempt is None:
                time.sleep(max(0.0, min(self._next_attempt, deadline) - time.monotonic()))
                if time.monotonic() < self._next_attempt:
                    break
                self._attempt = Future()
                self._late_at = time.monotonic() + self._timeout_seconds
                threading.Thread(target=self._run, args=(self._attempt,), name="flexd-connect", daemon=True).start()
            wait([self._attempt], max(0.0, deadline - time.monotonic()))
            if self._attempt.done():
                self._end(self._attempt)
            elif time.monotonic() >= self._late_at:
                self.problem = f"{self._name}: no answer within {self._timeout_seconds:g} s"
                self._leave_behind(self._attempt)
            else:
                self.problem = self.problem or f"{self._name}: connecting"
            if time.monotonic() >= deadline:
                break
        return self.client

    def close(self, timeout_seconds: float) -> None:
        """Dispose of the client, waiting no longer than the deadline."""
        self._closed = True
        self.discard().join(timeout_seconds)

    def discard(self) -> threading.Thread:
        """Drop the client and the running attempt: a thread, which is returned, disposes of them."""
        client, self.client = self.client, None
        attempt, self._attempt = self._attempt, None

        def dispose() -> None:
            try:
                if client is not None:
                    self._dispose(client)
                if attempt is not None:
                    self._dispose(attempt.result())
            except Exception as error:
                _log.info("%s: closing the client failed: %s", self._name, error)

        thread = threading.Thread(target=dispose, name="flexd-disconnect", daemon=True)
        thread.start()
        return thread

    def _run(self, attempt: Future[Client]) -> None:
        try:
            attempt.set_result(self._make())
        except BaseException as error:
            attempt.set_exception(error)

    def _leave_behind(self, attempt: Future[Client]) -> None:
        self._hung = [each for each in self._hung if not each.done()]
        if len(self._hung) < MAX_HUNG:
            self._hung.append(attempt)
            self.discard()
            self._next_attempt = time.monotonic() + self._backoff.seconds()

    def _end(self, attempt: Future[Client]) -> None:
        self._attempt = None
        error = attempt.exception()
        if error is None:
            self.client, self.problem = attempt.result(), None
            self._backoff.reset()
            return
        if isinstance(error, FATAL_ERRORS):
            raise StreamError(f"{self._name}: {error}", remedy="check the address and the client options") from error
        self.problem = f"{self._name}: {type(error).__name__}: {error}"
        self._next_attempt = time.monotonic() + self._backoff.seconds()


def checked_options(client_options: Mapping[str, ClientOption] | None) -> dict[str, Any]:
    """Check the options and convert them to the types that the client expects.

    Raises:
        StreamError: an option is reserved for flexd, or would make the client try to connect for ever.
    """
    options = dict(client_options or {})
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise StreamError(f"Kafka client options {', '.join(reserved)} are set by flexd", remedy="leave them out")
    protocol = options.get("security_protocol", "PLAINTEXT")
    if protocol not in _SECURITY_PROTOCOLS:
        # With an unknown protocol the client would try to connect for ever.
        raise StreamError(
            f"Kafka security_protocol {protocol!r}", remedy=f"use one of {', '.join(_SECURITY_PROTOCOLS)}"
        )
    if isinstance(version := options.get("api_version"), str):
        options["api_version"] = tuple(int(part) for part in version.split("."))  # type: ignore[assignment]
    return options
