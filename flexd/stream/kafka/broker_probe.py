"""Asks a silent broker for something it must answer, beside the polling thread: a slow answer is not a missing one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

SILENT_SECONDS = 2.0
"""Nothing came for so long: ask."""
ANSWER_SECONDS = 3.0
"""Brokers answer a connection's requests in their order, so a question waits for the fetch before it to end, which
they hold back for half a second when nothing is new."""
SPACING_SECONDS = 1.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Outcome(Generic[Answer]):
    """What one question brought: ``error``, or ``answer``. began: by ``time.monotonic``."""

    began: float
    answer: Answer | None
    error: Exception | None


class BrokerProbe(Generic[Answer]):
    """At most one question at a time, each in a thread with a deadline. ``finish`` may be called from any thread, the
    rest belongs to the polling one.

    A client must not ask with the little time that a poll has left: librdkafka takes requests that time out for a
    broken connection and closes it, so a topic that is only quiet would never be read again.

    Args:
        expected: exceptions that are an answer of sorts; others are a bug, and are raised by ``take``.
    """

    def __init__(self, expected: tuple[type[Exception], ...]) -> None:
        self._expected = expected
        self._thread: threading.Thread | None = None
        self._outcome: Outcome[Answer] | None = None
        self._began = float("-inf")

    def begin(self, ask: Callable[[float], Answer]) -> None:
        """Asks, unless a question is still out or the last one was only just asked.

        Args:
            ask: takes the deadline (``time.monotonic``) and keeps it.
        """
        now = time.monotonic()
        if self._thread is not None or now - self._began < SPACING_SECONDS:
            return
        self._began = now
        self._thread = threading.Thread(target=self._run, args=(ask, now), name="flexd-broker-probe", daemon=True)
        self._thread.start()

    def take(self) -> Outcome[Answer] | None:
        """The outcome of a question that has ended, once; None if there is none."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if outcome is not None and outcome.error is not None and not isinstance(outcome.error, self._expected):
            raise outcome.error
        return outcome

    def finish(self) -> None:
        """Waits for a question that is out: no longer than its deadline and a little."""
        thread = self._thread
        if thread is not None:
            thread.join(ANSWER_SECONDS + 0.5)

    def _run(self, ask: Callable[[float], Answer], began: float) -> None:
        try:
            self._outcome = Outcome(began, ask(began + ANSWER_SECONDS), None)
        except Exception as error:
            self._outcome = Outcome(began, None, error)
