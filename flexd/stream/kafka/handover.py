"""How partitions of a consumer group change hands between daemons without an access lost or counted twice."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

_log = logging.getLogger(__name__)

PositionOf = Callable[[Sequence[str]], Mapping[str, int]]
OnPartitions = Callable[[Sequence[str]], None]

_BACKOFF_SECONDS = (0.1, 5.0)


class Handover:
    """The questions and announcements of one group member. Every callback runs while the polling thread is inside
    ``poll`` (or ``close``), in that thread or in another that it waits for: whatever ``poll`` returned before has been
    taken, and the callback may count, save and send as if it were the polling thread.

    - **Assigned.** With ``position_of`` an assigned partition stays paused until the callback has said where to read
      it. It is asked again after every assignment, since the partition may have been read elsewhere meanwhile. A
      partition that the answer leaves out starts as without the callback. If it raises, that is the source's
      ``problem`` and it is asked again with back-off; partitions that need no answer are read on.
    - **Revoked.** ``on_revoked`` runs while this member still owns the partitions; the group waits for it, at most
      ``wait_seconds``. No message of them is returned afterwards. An error of it is logged and counted, and the
      partitions leave all the same: what it did not hand over, the next owner reads again from the position that
      ``position_of`` tells there.
    - **Lost.** The group has already given the partitions away (this member was silent for too long): nothing may be
      handed over any more. ``on_lost`` says so, after the fact.

    Callbacks must be bounded in time: the caller's own deadlines apply, none can be enforced from here.

    Args:
        wait_seconds: how long a rebalance waits for ``on_revoked``.
    """

    def __init__(
        self,
        position_of: PositionOf | None,
        on_revoked: OnPartitions | None,
        on_lost: OnPartitions | None,
        *,
        wait_seconds: float,
    ) -> None:
        self._position_of = position_of
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self.wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        """Held while a callback runs, so that a poll that was let go does not run beside it."""
        self._unanswered: set[str] = set()
        self._leaving: list[str] | None = None
        self._gone: list[str] = []
        self._left = threading.Event()
        self._next_ask = 0.0
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        self.problem: str | None = None
        self.failures = 0
        """Callbacks that raised."""

    def unanswered(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that must not be read yet. Any thread."""
        with self._lock:
            return self._unanswered.intersection(keys)

    def assigned(self, keys: Sequence[str]) -> None:
        """Partitions have come. Any thread."""
        if self._position_of is None:
            return
        with self._lock:
            self._unanswered.update(keys)
            self._next_ask, self._backoff_seconds = 0.0, _BACKOFF_SECONDS[0]

    def announce_revoked(self, keys: Sequence[str]) -> threading.Event | None:
        """Partitions are about to leave. Any thread; returns what is set once ``tell`` has run the callback,
        or None if nobody wants to know."""
        with self._lock:
            self._unanswered.difference_update(keys)
            if self._on_revoked is None or not keys:
                return None
            self._left = threading.Event()
            self._leaving = sorted(keys)
            return self._left

    def announce_lost(self, keys: Sequence[str]) -> None:
        """Partitions are gone. Any thread."""
        with self._lock:
            self._unanswered.difference_update(keys)
            if self._on_lost is not None:
                self._gone.extend(sorted(keys))

    def tell(self) -> None:
        """Runs the callbacks that are due, and waits for those that run already."""
        with self._telling:
            with self._lock:
                leaving, self._leaving = self._leaving, None
                gone, self._gone = self._gone, []
                left = self._left
            if leaving is not None:
                if self._on_revoked is not None:
                    self._run(self._on_revoked, leaving, "on_revoked")
                left.set()
            if gone and self._on_lost is not None:
                self._run(self._on_lost, gone, "on_lost")

    def ask(self) -> tuple[set[str], Mapping[str, int]]:
        """(partitions that may be read now, the positions given for some of them). Polling thread, between two
        polls; nothing while there is no question or the back-off of a failed one lasts."""
        with self._lock:
            asked = sorted(self._unanswered)
        if not asked or self._position_of is None or time.monotonic() < self._next_ask:
            return set(), {}
        try:
            answer = {key: int(position) for key, position in self._position_of(asked).items() if key in asked}
            if any(position < 0 for position in answer.values()):
                raise ValueError(f"negative position in {answer}")
        except Exception as error:
            self.failures += 1
            self.problem = f"no position for {', '.join(asked)[:200]}: {error}"
            self._next_ask = time.monotonic() + self._backoff_seconds
            self._backoff_seconds = min(2 * self._backoff_seconds, _BACKOFF_SECONDS[1])
            return set(), {}
        self.problem = None
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        with self._lock:
            # One that was taken away during the question is no longer ours to read.
            ours = self._unanswered.intersection(asked)
            self._unanswered -= ours
        return ours, answer

    def _run(self, callback: OnPartitions, keys: Sequence[str], name: str) -> None:
        try:
            callback(keys)
        except Exception:
            self.failures += 1
            _log.exception("%s of partitions %s", name, ", ".join(keys)[:200])
