"""The outbox of a rank's counted accesses: each payload waits until a snapshot of the daemon holds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class EncodedCounts:
    """One payload of counted accesses.

    Attributes:
        sequence: counts the payloads of this process from 0.
        payload: encoded ``TapCounts``.
    """

    sequence: int
    payload: bytes


class TapOutbox:
    """Holds at most one payload. ``put`` and ``free`` belong to the tap's thread, the rest to the agent's.

    A payload leaves only when the daemon has reported that a snapshot holds it; until then the same bytes with the same
    sequence number are offered again, to any daemon that connects. So each is counted exactly once: a daemon that has
    it in its snapshot recognises the number.

    Attributes:
        acknowledged, acknowledged_bytes: payloads that snapshots hold, and their bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._counts: EncodedCounts | None = None
        self._next = 0
        self._urgent = False
        self._problem = ""
        self.on_change: Callable[[], None] | None = None
        """Called, from any thread, when there is something to offer."""
        self.acknowledged = 0
        self.acknowledged_bytes = 0

    @property
    def free(self) -> bool:
        return self._counts is None

    @property
    def problem(self) -> str:
        """The reason why the daemon accepts nothing; empty if it does, or has not answered yet."""
        return self._problem

    @property
    def urgent(self) -> bool:
        """True while a caller waits for the acknowledgement."""
        return self._urgent

    def put(self, payload: bytes) -> int:
        """Store the next payload and return its sequence number. Call it only while ``free``."""
        with self._lock:
            if self._counts is not None:
                raise ValueError("the outbox holds a payload")
            self._counts = EncodedCounts(self._next, payload)
            sequence = self._next
            self._next += 1
        self._notify()
        return sequence

    def current(self) -> EncodedCounts | None:
        return self._counts

    def acknowledge(self, sequence: int) -> None:
        """Drop the payload that a snapshot holds. A repeated older number changes nothing."""
        with self._lock:
            if self._counts is not None and self._counts.sequence == sequence:
                self.acknowledged += 1
                self.acknowledged_bytes += len(self._counts.payload)
                self._counts = None
                self._lock.notify_all()

    def set_problem(self, problem: str) -> bool:
        """Record why the daemon accepts nothing, "" if it does; True if that is another reason than before."""
        changed = problem != self._problem
        self._problem = problem
        return changed

    def wait_until_free(self, timeout_seconds: float, *, urgent: bool = False) -> bool:
        """Wait for the acknowledgement; ``urgent`` makes the daemon write a snapshot before its next regular one."""
        deadline = time.monotonic() + timeout_seconds
        self._urgent = self._urgent or urgent
        self._notify()
        with self._lock:
            while self._counts is not None and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            return self._counts is None

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()
