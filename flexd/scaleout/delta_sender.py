"""Send one count delta at a time to the leader, in a thread of its own, and repeat it until an answer arrives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from flexd.core.errors import FlexdError, ScaleOutError
from flexd.core.fault_points import fault_point
from flexd.core.supervision import Supervisor
from flexd.scaleout.follower_registry import REASONS
from flexd.scaleout.push_answer import PushAnswer

_log = logging.getLogger(__name__)

FAILURE_REASONS = (*REASONS, "unreachable", "other")
"""Every label of an attempt without a final answer."""

_BACKOFF_SECONDS = (0.1, 5.0)


class Link(Protocol):
    """Connection to the leader."""

    def offer(self, data: bytes) -> PushAnswer:
        """Send once, within a bounded time.

        Raises:
            ScaleOutError: no valid answer: the leader is unreachable or refused the request.
        """

    def close(self) -> None:
        """Release connections."""


class DeltaSender:
    """Call ``send`` and ``poll_answer`` from one thread.

    A refusal for another reason than ``position`` is not final: an operator has to act, and the delta is sent again.

    Args:
        link: owned from now on; closed at ``stop``.
        supervisor: of the process; records the faults of the thread.
    """

    def __init__(self, link: Link, supervisor: Supervisor | None = None) -> None:
        self._link = link
        self._changed = threading.Condition()
        self._make: Callable[[], bytes] | None = None
        self._answer: PushAnswer | None = None
        self._stopping = threading.Event()
        self._retry_now = threading.Event()
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-delta-sender")
        self._thread = supervisor.thread("flexd-delta-sender", self._run, self._stopping, self._link.close)
        self.problem: str | None = None
        """Reason why the last attempt got no final answer, or None."""
        self.refusal: PushAnswer | None = None
        """The leader's newest refusal of the delta in flight; None if there is none."""
        self.attempts = 0
        self.failures: dict[str, int] = {}
        """Attempts without a final answer, by reason of ``FAILURE_REASONS``."""
        self.bytes_sent = 0
        self.answered_at: float | None = None
        """Monotonic seconds of the newest final answer."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Drop the delta in flight; return True if the thread ended within the deadline."""
        self._stopping.set()
        self._retry_now.set()
        with self._changed:
            self._changed.notify_all()
        return self._thread.join(timeout_seconds)

    def send(self, make: Callable[[], bytes]) -> None:
        """Queue a delta.

        Args:
            make: encodes it; called once, in the sender's thread.

        Raises:
            ScaleOutError: the previous delta is not settled.
        """
        with self._changed:
            if self._make is not None or self._answer is not None:
                raise ScaleOutError("a delta is in flight already", reason="internal_error")
            self._make = make
            self._changed.notify_all()

    def retry_now(self) -> None:
        """End the wait between two attempts."""
        self._retry_now.set()

    def poll_answer(self, timeout_seconds: float = 0.0) -> PushAnswer | None:
        """Return the answer once; None if there is none within the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._stopping.is_set(), timeout_seconds)
            answer, self._answer = self._answer, None
            return answer

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._make is not None or self._stopping.is_set())
                make = self._make
            if make is None:
                break
            answer = self._deliver(make)
            with self._changed:
                if answer is not None:
                    self._make, self._answer = None, answer
                self._changed.notify_all()
            self._watch.progress()

    def _deliver(self, make: Callable[[], bytes]) -> PushAnswer | None:
        """Send until answered. Return None only when stopped."""
        data: bytes | None = None
        wait_seconds = _BACKOFF_SECONDS[0]
        while not self._stopping.is_set():
            self._retry_now.clear()
            self.attempts += 1
            try:
                fault_point("thread.delta_sender")
                data = make() if data is None else data
                self.bytes_sent += len(data)
                answer = self._link.offer(data)
                if answer.outcome != "refused" or answer.reason == "position":
                    self.problem, self.refusal, self.answered_at = None, None, time.monotonic()
                    return answer
                self.refusal = answer
                self._fail(answer.reason, f"refused: {answer.message}")
            except ScaleOutError as error:
                self._fail(error.reason, str(error))
            except Exception as error:
                text = str(error) if isinstance(error, FlexdError) else repr(error)
                self._fail("internal_error", text)
                self._watch.fault(error)
            self._retry_now.wait(wait_seconds)
            wait_seconds = min(2 * wait_seconds, _BACKOFF_SECONDS[1])
        return None

    def _fail(self, reason: str, text: str) -> None:
        # A leader of another release may name reasons of its own.
        known = reason if reason in FAILURE_REASONS else "other"
        self.failures[known] = self.failures.get(known, 0) + 1
        if self.problem is None:
            _log.warning("leader: %s", text)
        self.problem = text
