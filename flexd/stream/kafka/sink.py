"""Connect to a Kafka broker without ever waiting for it, and write messages to a topic."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from kafka import KafkaProducer
from kafka.errors import (
    InvalidRecordError,
    InvalidTimestampError,
    KafkaConfigurationError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
)

from flexd.core.errors import StreamError
from flexd.core.supervision import Backoff

_log = logging.getLogger(__name__)

Client = TypeVar("Client")

ClientOption = str | int | float | bool

# Exceptions of a client's constructor that no retry can fix: its options are wrong.
FATAL_ERRORS = (KafkaConfigurationError, ValueError, TypeError, AssertionError, FileNotFoundError, PermissionError)
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

# Attempts without a result that are left behind.
MAX_HUNG = 4


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


_CLOSE_SECONDS = 5.0
# Errors that concern one message, not the producer.
_MESSAGE_ERRORS = (
    InvalidRecordError, InvalidTimestampError, MessageSizeTooLargeError, PolicyViolationError, RecordListTooLargeError,
)  # fmt: skip


class KafkaSink:
    """Send messages to a topic, spread over its partitions. See ``Sink`` for the contract.

    The client connects on the first ``send``. Between attempts to reach an unreachable broker ``send`` raises at once.

    Each message is delivered at most once: the client's idempotent producer repeats unacknowledged messages under a
    sequence number, by which the broker drops those it already has. A broker that has lost its log has lost the
    producer's registration too, and refuses it for good. So a producer that delivers nothing any more, for errors that
    no retry fixes, is replaced after a second (then two, four, ... up to a minute, until a message is delivered). Its
    undelivered messages are not sent again but counted as failed; those in flight when it was closed may have arrived.

    Args:
        max_unacknowledged_bytes: beyond this ``send`` waits up to ``max_wait_seconds`` for the broker, then raises.
        client_options: passed to kafka-python, over flexd's defaults.

    Attributes:
        messages_failed: see ``Sink``.
        producers_replaced: number of replacements.

    Raises:
        StreamError: ``client_options`` sets an option that is reserved for flexd.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        *,
        connect_timeout_seconds: float = 15.0,
        max_wait_seconds: float = 1.0,
        max_unacknowledged_bytes: int = 32 * 2**20,
        client_options: Mapping[str, ClientOption] | None = None,
    ) -> None:
        self._topic = topic
        self._name = f"Kafka topic {topic!r} at {bootstrap_servers}"
        self._max_wait_seconds = max_wait_seconds
        self._max_unacknowledged_bytes = max_unacknowledged_bytes
        options: dict[str, Any] = {
            "bootstrap_servers": [server.strip() for server in bootstrap_servers.split(",")],
            "bootstrap_timeout_ms": int(connect_timeout_seconds * 1000),
            "max_block_ms": int(max_wait_seconds * 1000),
            "max_request_size": 16 * 2**20,
            "batch_size": 2**20,
            "linger_ms": 5,
            "request_timeout_ms": 10_000,
            "delivery_timeout_ms": 30_000,
            "reconnect_backoff_max_ms": 2_000,
            "metrics_enabled": False,
            **checked_options(client_options),
        }
        self._connector: Connector[_Producer] = Connector(
            self._name,
            lambda: _Producer(**options),
            _dispose,
            timeout_seconds=connect_timeout_seconds,
        )
        self._acknowledged = threading.Condition()
        self._unacknowledged_bytes = 0
        self.messages_failed = 0
        self.producers_replaced = 0
        self._failing_since: float | None = None
        # Shortest and longest time without a delivery after which a failing producer is replaced.
        self._replacements = Backoff(1.0, 60.0)
        self._replace_after_seconds = self._replacements.seconds()
        self._dead_error: KafkaError | None = None

    def send(self, payload: bytes) -> None:
        self._replace_dead_producer()
        producer = self._connector.get(self._max_wait_seconds)
        if producer is None:
            raise StreamError(self._connector.problem or f"{self._name}: not connected", remedy="check the broker")
        with self._acknowledged:
            if not self._acknowledged.wait_for(
                lambda: self._unacknowledged_bytes < self._max_unacknowledged_bytes, self._max_wait_seconds
            ):
                raise StreamError(
                    f"{self._name}: {self._unacknowledged_bytes} bytes unacknowledged", remedy="check the broker"
                )
            self._unacknowledged_bytes += len(payload)
        try:
            future = producer.send(self._topic, value=payload)
        except (KafkaError, OSError) as error:
            self._release(len(payload))
            raise StreamError(f"{self._name}: {type(error).__name__}: {error}", remedy="check the broker") from error
        number = self.producers_replaced
        future.add_callback(lambda _: self._on_delivered(len(payload), number))
        future.add_errback(lambda error: self._on_failed(len(payload), number, error))

    def flush(self, timeout_seconds: float) -> None:
        with self._acknowledged:
            if self._unacknowledged_bytes == 0:
                return
        producer = self._connector.client
        if producer is None:
            raise StreamError(f"{self._name}: not connected", remedy="check the broker")
        try:
            producer.flush(timeout_seconds)
        except KafkaError as error:
            raise StreamError(
                f"{self._name}: not delivered within {timeout_seconds:g} s", remedy="check the broker"
            ) from error

    def close(self) -> None:
        self._connector.close(_CLOSE_SECONDS)

    def _replace_dead_producer(self) -> None:
        with self._acknowledged:
            error, self._dead_error = self._dead_error, None
            if error is None:
                return
            self.producers_replaced += 1
            self._failing_since = None
            self._replace_after_seconds = self._replacements.seconds()
        _log.warning(
            "%s: replacing the producer, which delivers no more: %s: %s", self._name, type(error).__name__, error
        )
        self._connector.discard()

    # ---- on the client's thread ----

    def _on_delivered(self, payload_bytes: int, number: int) -> None:
        with self._acknowledged:
            if number == self.producers_replaced:
                self._failing_since, self._dead_error = None, None
                self._replacements.reset()
                self._replace_after_seconds = self._replacements.seconds()
            self._release(payload_bytes)

    def _on_failed(self, payload_bytes: int, number: int, error: BaseException) -> None:
        with self._acknowledged:
            self.messages_failed += 1
            for_good = isinstance(error, KafkaError) and not error.retriable and not isinstance(error, _MESSAGE_ERRORS)
            if number == self.producers_replaced and for_good:
                now = time.monotonic()
                self._failing_since = now if self._failing_since is None else self._failing_since
                if now - self._failing_since >= self._replace_after_seconds:
                    self._dead_error = error
            self._release(payload_bytes)

    def _release(self, payload_bytes: int) -> None:
        with self._acknowledged:
            self._unacknowledged_bytes -= payload_bytes
            self._acknowledged.notify_all()


class _Producer(KafkaProducer):  # type: ignore[misc]
    """A producer whose ``close`` always ends its thread: the base class raises before that if messages are left."""

    closing = False

    def flush(self, timeout: float | None = None) -> None:
        if not self.closing:
            super().flush(timeout)


def _dispose(producer: _Producer) -> None:
    # Close the producer; messages not delivered within half of ``_CLOSE_SECONDS`` fail.
    with contextlib.suppress(KafkaTimeoutError):
        producer.flush(_CLOSE_SECONDS / 2)
    producer.closing = True
    producer.close(timeout=_CLOSE_SECONDS / 4)
