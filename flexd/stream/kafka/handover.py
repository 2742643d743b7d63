"""Hand partitions of a consumer group from one daemon to another without losing or repeating an access."""

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
    """The rebalance callbacks of one group member.

    Every callback runs while the polling thread is inside ``poll`` (or ``close``), in that thread or in another that it
    waits for. The messages of earlier polls have been processed by then, so a callback may count, save and send as if
    it were the polling thread.

    - **Assigned.** With ``position_of`` an assigned partition stays paused until the callback has returned the position
      to read from. Every assignment calls it again, since another member may have read the partition meanwhile. A
      partition that the result omits starts as without the callback. If the callback raises, the source reports that as
      its ``problem`` and retries with back-off; other partitions are read on.
    - **Revoked.** ``on_revoked`` runs while this member still owns the partitions; the group waits for it, at most
      ``wait_seconds``. No message of them is returned afterwards. An error is logged and counted, and the partitions
      leave all the same: what was not handed over, the next owner reads again from the position that its
      ``position_of`` returns.
    - **Lost.** The group has already given the partitions away, because this member was silent for too long. Nothing
      may be handed over any more; ``on_lost`` is called afterwards.

    Callbacks must bound their own time; no deadline can be enforced here.

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
        self._callback_lock = threading.Lock()
        """Held while a callback runs, so that a poll does not run beside one that the rebalance no longer waits for."""
        self._unresolved: set[str] = set()
        self._revoked: list[str] | None = None
        self._lost: list[str] = []
        self._handed_over = threading.Event()
        self._next_attempt = 0.0
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        self.problem: str | None = None
        self.failures = 0
        """Callbacks that raised."""

    def unresolved(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` whose position is not known yet: they must not be read. Any thread."""
        with self._lock:
            return self._unresolved.intersection(keys)

    def add_assigned(self, keys: Sequence[str]) -> None:
        """Record partitions that were assigned. Any thread."""
        if self._position_of is None:
            return
        with self._lock:
            self._unresolved.update(keys)
            self._next_attempt, self._backoff_seconds = 0.0, _BACKOFF_SECONDS[0]

    def add_revoked(self, keys: Sequence[str]) -> threading.Event | None:
        """Record partitions that are about to leave. Any thread.

        Returns:
            The event that ``run_callbacks`` sets after ``on_revoked``; None if no callback is due.
        """
        with self._lock:
            self._unresolved.difference_update(keys)
            if self._on_revoked is None or not keys:
                return None
            self._handed_over = threading.Event()
            self._revoked = sorted(keys)
            return self._handed_over

    def add_lost(self, keys: Sequence[str]) -> None:
        """Record partitions that the group has given away. Any thread."""
        with self._lock:
            self._unresolved.difference_update(keys)
            if self._on_lost is not None:
                self._lost.extend(sorted(keys))

    def run_callbacks(self) -> None:
        """Run ``on_revoked`` and ``on_lost`` if they are due, after any that is running in another thread."""
        with self._callback_lock:
            with self._lock:
                revoked, self._revoked = self._revoked, None
                lost, self._lost = self._lost, []
                handed_over = self._handed_over
            if revoked is not None:
                if self._on_revoked is not None:
                    self._run(self._on_revoked, revoked, "on_revoked")
                handed_over.set()
            if lost and self._on_lost is not None:
                self._run(self._on_lost, lost, "on_lost")

    def resolve(self) -> tuple[set[str], Mapping[str, int]]:
        """Call ``position_of`` for the unresolved partitions. Polling thread, between two polls.

        Returns:
            The partitions that may be read now, and the positions of those that have one. Both are empty if no
            partition is unresolved, the callback failed, or its back-off lasts.
        """
        with self._lock:
            keys = sorted(self._unresolved)
        if not keys or self._position_of is None or time.monotonic() < self._next_attempt:
            return set(), {}
        try:
            positions = {key: int(position) for key, position in self._position_of(keys).items() if key in keys}
            if any(position < 0 for position in positions.values()):
                raise ValueError(f"negative position in {positions}")
        except Exception as error:
            self.failures += 1
            self.problem = f"no position for {', '.join(keys)[:200]}: {error}"
            self._next_attempt = time.monotonic() + self._backoff_seconds
            self._backoff_seconds = min(2 * self._backoff_seconds, _BACKOFF_SECONDS[1])
            return set(), {}
        self.problem = None
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        with self._lock:
            # A partition that was revoked during the call must not be read here any more.
            resolved = self._unresolved.intersection(keys)
            self._unresolved -= resolved
        return resolved, positions

    def _run(self, callback: OnPartitions, keys: Sequence[str], name: str) -> None:
        try:
            callback(keys)
        except Exception:
            self.failures += 1
            _log.exception("%s of partitions %s", name, ", ".join(keys)[:200])
