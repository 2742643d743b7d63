"""Where a rank's counted accesses wait until the daemon has them for good: one delta at a time, in order."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Delta:
    """``sequence`` counts the deltas of this process from 0; ``payload`` is encoded ``CountedAccesses``."""

    sequence: int
    payload: bytes


class TapOutbox:
    """Holds at most one delta. ``put`` and ``free`` belong to the tap's thread, the rest to the agent's.

    A delta leaves only when the daemon has said that a snapshot holds it; until then the same bytes under the same
    sequence number are offered again, to any daemon that comes. So each is counted exactly once: a daemon that has
    it in its snapshot recognises the number.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._delta: Delta | None = None
        self._next = 0
        self._urgent = False
        self._problem = ""
        self.acknowledged = 0
        """Deltas that the daemon has for good."""
        self.acknowledged_bytes = 0

    @property
    def free(self) -> bool:
        return self._delta is None

    @property
    def problem(self) -> str:
        """Why the daemon takes nothing; empty if it does, or was not asked yet."""
        return self._problem

    @property
    def urgent(self) -> bool:
        """Somebody waits for what is held to be acknowledged."""
        return self._urgent

    def put(self, payload: bytes) -> int:
        """Takes the next delta and returns its sequence number. The caller has seen ``free``."""
        with self._lock:
            if self._delta is not None:
                raise ValueError("the outbox holds a delta")
            self._delta = Delta(self._next, payload)
            self._next += 1
            return self._delta.sequence

    def current(self) -> Delta | None:
        return self._delta

    def acknowledge(self, sequence: int) -> None:
        """The daemon has this delta for good. An older number, said twice, changes nothing."""
        with self._lock:
            if self._delta is not None and self._delta.sequence == sequence:
                self.acknowledged += 1
                self.acknowledged_bytes += len(self._delta.payload)
                self._delta = None
                self._lock.notify_all()

    def refuse(self, problem: str) -> bool:
        """The daemon takes nothing, or (empty) does; True if that is news."""
        changed = problem != self._problem
        self._problem = problem
        return changed

    def wait_until_free(self, timeout_seconds: float, *, urgent: bool = False) -> bool:
        """Waits for the acknowledgement; ``urgent`` asks the daemon not to wait for its next regular snapshot."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._urgent = self._urgent or urgent
            while self._delta is not None and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            return self._delta is None
