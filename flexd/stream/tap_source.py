"""The stream without any log: counted accesses that ranks ship over the control channel, as a ``Source``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum

from flexd.core.errors import StreamError
from flexd.stream.types import Message, Positions

FORGET_SECONDS = 3600.0
"""A partition of a process that others have replaced is dropped after so long."""


def partition_of(attempt: str, rank: int, session: str) -> str:
    """One partition a training process: its deltas are numbered from 0."""
    return f"tap/{attempt}/{rank}/{session}"


class DeltaState(Enum):
    """What has become of a delta that a rank offers."""

    WANTED = "wanted"
    TAKEN = "taken"
    """It is here, counted perhaps, but in no snapshot: the rank must keep it."""
    DURABLE = "durable"
    """The rank may forget it."""
    NOT_YET = "not yet"
    """The saved positions are not restored: nobody can tell."""


class TapSource:
    """See ``Source``; ``poll``, ``restore``, ``positions``, ``lag``, ``commit`` and ``close`` belong to its reader.

    Nothing is kept here that a rank does not keep too: a rank forgets a delta only when ``commit`` has named a later
    position. A delta is therefore counted once: one that the restored positions have passed is never asked for
    again, and one that they have not is offered again by its rank, as the same bytes under the same number.

    After ``restore`` to older positions the deltas in between are asked for again, as far as their ranks have them;
    where a rank has forgotten some (an older snapshot had to be used), they are counted in ``messages_lost``.

    The other methods are called by the control channel, from any thread.

    Args:
        forget_seconds: a partition whose process was replaced is dropped from the positions after so long.
    """

    def __init__(self, forget_seconds: float = FORGET_SECONDS) -> None:
        self._forget_seconds = forget_seconds
        self._changed = threading.Condition()
        self._next: Positions = {}
        self._durable: Positions = {}
        self._offered: Positions = {}
        """Newest delta that each rank says it holds."""
        self._queue: deque[Message] = deque()
        self._queued: Positions = {}
        self._live: frozenset[str] = frozenset()
        self._live_at: dict[str, float] = {}
        self._open = False
        self._closed = False
        self._lost = 0

    @property
    def problem(self) -> str | None:
        return None

    @property
    def messages_lost(self) -> int:
        return self._lost

    @property
    def queued_bytes(self) -> int:
        """Delivered and not polled yet."""
        with self._changed:
            return sum(len(message.payload) for message in self._queue)

    # ---- the reader ----

    def poll(self, timeout_seconds: float) -> list[Message]:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._check_open()
            self._open = True
            while not self._queue and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                self._check_open()
            if not self._queue:
                return []
            # One at a time: a delta stands for a whole interval of a rank.
            message = self._queue.popleft()
            del self._queued[message.partition]
            self._next[message.partition] = message.offset + 1
            return [message]

    def restore(self, positions: Mapping[str, int]) -> None:
        with self._changed:
            self._next, self._durable = dict(positions), dict(positions)
            self._queue.clear()
            self._queued.clear()
            now = time.monotonic()
            self._live_at = dict.fromkeys(positions, now)
            self._open = False

    def positions(self) -> Positions:
        with self._changed:
            self._forget()
            return dict(self._next)

    def lag(self) -> int:
        with self._changed:
            return sum(offset >= self._next.get(partition, 0) for partition, offset in self._offered.items())

    def commit(self, positions: Mapping[str, int]) -> str | None:
        with self._changed:
            for partition, offset in positions.items():
                if partition in self._next:
                    self._durable[partition] = max(offset, self._durable.get(partition, 0))
        return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._queued.clear()
            self._changed.notify_all()

    # ---- the control channel ----

    def alive(self, partitions: Collection[str]) -> None:
        """These processes train now; all others have been replaced or have ended."""
        with self._changed:
            self._live = frozenset(partitions)
            now = time.monotonic()
            self._live_at.update(dict.fromkeys(self._live, now))
            self._offered = {name: offset for name, offset in self._offered.items() if name in self._live}

    def offered(self, partition: str, sequence: int) -> DeltaState:
        """A rank says that it holds this delta, and nothing older."""
        with self._changed:
            if self._closed or not self._open:
                return DeltaState.NOT_YET
            self._offered[partition] = sequence
            if sequence < self._durable.get(partition, 0):
                return DeltaState.DURABLE
            if sequence < self._next.get(partition, 0) or self._queued.get(partition) == sequence:
                return DeltaState.TAKEN
            return DeltaState.WANTED

    def durable(self, partition: str) -> int:
        """All deltas with a smaller number are in a snapshot."""
        with self._changed:
            return self._durable.get(partition, 0)

    def deliver(self, partition: str, sequence: int, payload: bytes) -> bool:
        """Queues one delta; False (and nothing happens) unless it is ``WANTED`` by now."""
        with self._changed:
            wanted = self._next.get(partition, 0)
            if self._closed or not self._open or sequence < wanted or partition in self._queued:
                return False
            self._lost += sequence - wanted
            self._next[partition] = sequence
            self._live_at.setdefault(partition, time.monotonic())
            self._queued[partition] = sequence
            self._queue.append(Message(partition, sequence, payload))
            self._changed.notify_all()
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("tap: the source is closed")

    def _forget(self) -> None:
        # Without live ranks nobody has been replaced: a silent process may still come back with a delta.
        if not self._live:
            return
        limit = time.monotonic() - self._forget_seconds
        for partition in [name for name, at in self._live_at.items() if at < limit and name not in self._live]:
            for known in (self._next, self._durable, self._offered):
                known.pop(partition, None)
            del self._live_at[partition]
