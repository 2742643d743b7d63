"""Build a client in a thread with a deadline and retry until it succeeds: constructors of clients can hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from flexd.core.backoff import Backoff
from flexd.core.errors import StreamError

_log = logging.getLogger(__name__)

Client = TypeVar("Client")


class Connector(Generic[Client]):
    """Own at most one client. Belongs to one thread; ``problem`` may be read from any.

    An attempt that exceeds its deadline is abandoned: its thread may hang for ever, and disposes of the client if one
    is built after all. At most ``max_hung`` such threads exist; beyond that no attempt starts until one ends.

    Args:
        name: of the peer, for messages.
        make: build the client; may block without bound.
        dispose: close a client; may block.
        timeout_seconds: deadline of one attempt.
        fatal: exceptions of ``make`` that no retry can fix.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Client],
        dispose: Callable[[Client], None],
        *,
        timeout_seconds: float,
        fatal: tuple[type[BaseException], ...] = (ValueError, TypeError),
        first_backoff_seconds: float = 0.25,
        max_backoff_seconds: float = 10.0,
        max_hung: int = 4,
    ) -> None:
        self._name = name
        self._make = make
        self._dispose = dispose
        self._timeout_seconds = timeout_seconds
        self._fatal = fatal
        self._backoff = Backoff(first_backoff_seconds, max_backoff_seconds)
        self._max_hung = max_hung
        self._client: Client | None = None
        self._attempt: _Attempt[Client] | None = None
        self._hung: list[_Attempt[Client]] = []
        self._next_attempt = 0.0
        self._closed = False
        self.problem: str | None = None

    @property
    def client(self) -> Client | None:
        """The client if it is connected; does not wait or connect."""
        return self._client

    def get(self, timeout_seconds: float) -> Client | None:
        """Return the client, or None if it is not connected within the deadline (``problem`` has the reason).

        Raises:
            StreamError: the arguments of the client are wrong, or the connector is closed.
        """
        if self._client is not None:
            return self._client
        if self._closed:
            raise StreamError(f"{self._name}: closed")
        deadline = time.monotonic() + timeout_seconds
        while True:
            if self._attempt is None:
                wait = min(self._next_attempt, deadline) - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                if time.monotonic() < self._next_attempt or not self._begin():
                    return None
            if self._finish(deadline) or time.monotonic() >= deadline:
                return self._client

    def close(self, timeout_seconds: float) -> None:
        """Dispose of the client, waiting no longer than the deadline."""
        self._closed = True
        client, self._client = self._client, None
        if self._attempt is not None:
            if self._attempt.abandon():
                client = self._attempt.client
            self._attempt = None
        if client is None:
            return
        self._dispose_in_thread(client).join(timeout_seconds)

    def discard(self) -> None:
        """Drop the client without waiting: a thread disposes of it, and the next ``get`` builds another."""
        client, self._client = self._client, None
        if client is not None:
            self._dispose_in_thread(client)

    def _begin(self) -> bool:
        self._hung = [attempt for attempt in self._hung if not attempt.done.is_set()]
        if len(self._hung) >= self._max_hung:
            self.problem = (
                f"{self._name}: {len(self._hung)} connection attempts hang; the peer accepts but never answers"
            )
            self._delay()
            return False
        self._attempt = _Attempt(self._make, self._dispose_safely)
        return True

    def _finish(self, deadline: float) -> bool:
        """Wait for the running attempt. Return whether it ended, in success or failure."""
        attempt = self._attempt
        if attempt is None:
            return True
        limit = attempt.started + self._timeout_seconds
        attempt.done.wait(max(0.0, min(deadline, limit) - time.monotonic()))
        if not attempt.done.is_set():
            if time.monotonic() < limit:
                self.problem = self.problem or f"{self._name}: connecting"
                return False
            if not attempt.abandon():
                self._hung.append(attempt)
                self._attempt = None
                self.problem = f"{self._name}: no answer within {self._timeout_seconds:g} s"
                self._delay()
                return False
        self._attempt = None
        if attempt.error is None:
            self._client = attempt.client
            self.problem = None
            self._backoff.reset()
            return True
        if isinstance(attempt.error, self._fatal):
            raise StreamError(
                f"{self._name}: {attempt.error}", remedy="check the address and the client options"
            ) from attempt.error
        self.problem = f"{self._name}: {type(attempt.error).__name__}: {attempt.error}"
        self._delay()
        return False

    def _delay(self) -> None:
        self._next_attempt = time.monotonic() + self._backoff.seconds()

    def _dispose_in_thread(self, client: Client) -> threading.Thread:
        thread = threading.Thread(target=self._dispose_safely, args=(client,), name="flexd-disconnect", daemon=True)
        thread.start()
        return thread

    def _dispose_safely(self, client: Client) -> None:
        try:
            self._dispose(client)
        except Exception as error:
            _log.info("%s: closing the client failed: %s", self._name, error)


class _Attempt(Generic[Client]):
    """One run of ``make`` in its own thread."""

    def __init__(self, make: Callable[[], Client], dispose: Callable[[Client], None]) -> None:
        self.started = time.monotonic()
        self.done = threading.Event()
        self.client: Client | None = None
        self.error: Exception | None = None
        self._make = make
        self._dispose = dispose
        self._lock = threading.Lock()
        self._abandoned = False
        threading.Thread(target=self._run, name="flexd-connect", daemon=True).start()

    def abandon(self) -> bool:
        """Dispose of a client that is built later. Return True if the attempt had ended before: its client is kept."""
        with self._lock:
            if self.done.is_set():
                return True
            self._abandoned = True
            return False

    def _run(self) -> None:
        client: Client | None = None
        try:
            client = self._make()
        except Exception as error:
            self.error = error
        with self._lock:
            self.client = client
            self.done.set()
            unwanted = client if self._abandoned else None
        if unwanted is not None:
            self._dispose(unwanted)
