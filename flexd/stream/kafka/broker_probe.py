"""Send requests to a silent broker in a separate thread, to tell a quiet topic from a dead broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SILENT_SECONDS = 2.0
"""Time without messages after which a source probes the broker."""
ANSWER_SECONDS = 3.0
"""Deadline of a probe. A broker answers the requests of a connection in order, so a probe waits for the fetch before
it, which the broker holds back for half a second when nothing is new."""
SPACING_SECONDS = 1.0
"""Least time between the starts of two probes."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe.

    Attributes:
        started: when the probe was started, by ``time.monotonic``.
        error: the exception that the request raised, None if the broker answered.
    """

    started: float
    error: Exception | None


class BrokerProbe:
    """Run at most one probe at a time, each in a thread with a deadline.

    A poll must not probe by itself: with the little time that it has left, a slow answer would look like none.

    ``join`` may be called from any thread, the other methods only from the polling one.

    Args:
        expected: exceptions that are a result; any other is a bug, and ``poll`` raises it.
    """

    def __init__(self, expected: tuple[type[Exception], ...]) -> None:
        self._expected = expected
        self._thread: threading.Thread | None = None
        self._result: ProbeResult | None = None
        self._started = float("-inf")

    def start(self, request: Callable[[float], object]) -> None:
        """Start a probe, unless one is running or the last one was started less than ``SPACING_SECONDS`` ago.

        Args:
            request: called with the deadline (``time.monotonic``), which it must keep; raises if there is no answer.
        """
        now = time.monotonic()
        if self._thread is not None or now - self._started < SPACING_SECONDS:
            return
        self._started = now
        self._thread = threading.Thread(target=self._run, args=(request, now), name="flexd-broker-probe", daemon=True)
        self._thread.start()

    def poll(self) -> ProbeResult | None:
        """Return the result of a probe that has ended, once; None if there is none."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        result, self._result = self._result, None
        if result is not None and result.error is not None and not isinstance(result.error, self._expected):
            raise result.error
        return result

    def join(self) -> None:
        """Wait for a running probe, slightly longer than its deadline at most."""
        thread = self._thread
        if thread is not None:
            thread.join(ANSWER_SECONDS + 0.5)

    def _run(self, request: Callable[[float], object], started: float) -> None:
        try:
            request(started + ANSWER_SECONDS)
            self._result = ProbeResult(started, None)
        except Exception as error:
            self._result = ProbeResult(started, error)
