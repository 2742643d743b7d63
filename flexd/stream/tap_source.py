"""A source without a log: the counts of the ranks' taps, received over the control channel."""

import threading
import time
from collections.abc import Collection, Mapping
from enum import Enum

from flexd.core.errors import StreamError
from flexd.stream.types import Losses, Positions, Source, StreamMessage


def partition_of(attempt: str, rank: int, session: str) -> str:
    """Name the partition of a training process. Its counts are numbered from 0."""
    return f"tap/{attempt}/{rank}/{session}"


class TapCountsState(Enum):
    """State of counts that a rank offers."""

    # Not received: the daemon requests them.
    MISSING = "missing"
    # Queued or counted, but in no snapshot: the rank must keep them.
    RECEIVED = "received"
    # In a snapshot: the rank may delete them.
    DURABLE = "durable"
    # The saved positions are not restored yet.
    UNKNOWN = "unknown"


class TapSource(Source):
    """A ``Source`` of ``TapCounts`` messages, one partition a training process.

    ``poll``, ``restore``, ``positions``, ``lag``, ``commit`` and ``close`` belong to the reader. The control channel
    calls the other methods, from any thread.

    A rank keeps its counts until ``commit`` has passed them. So all are counted once: those before the restored
    positions are never requested again, and the rank offers the later ones again, as the same bytes under the same
    number.

    After ``restore`` to older positions, the counts in between are requested again from the ranks that keep them.
    Where a rank has deleted some (an older snapshot had to be used), they are added to ``losses``.

    Args:
        forget_seconds: time after which the partition of a replaced process is dropped from the positions.
    """

    def __init__(self, forget_seconds: float = 3600.0) -> None:
        self._forget_seconds = forget_seconds
        self._changed = threading.Condition()
        self._next: Positions = {}
        self._durable: Positions = {}
        # Number of the newest counts that each rank offered.
        self._offered: Positions = {}
        # Delivered and not polled yet: one of a partition at most, in order of delivery.
        self._queue: dict[str, StreamMessage] = {}
        self._live: frozenset[str] = frozenset()
        self._live_at: dict[str, float] = {}
        self._open = False
        self._closed = False
        self._losses = Losses()

    def losses(self) -> Losses:
        return self._losses

    @property
    def queued_bytes(self) -> int:
        """Size of the payloads that were delivered and not polled yet."""
        with self._changed:
            return sum(len(message.payload) for message in self._queue.values())

    # ---- the reader ----

    def poll(self, timeout_seconds: float) -> list[StreamMessage]:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._check_open()
            self._open = True
            while not self._queue and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                self._check_open()
            if not self._queue:
                return []
            # One message at a time: it has the counts of a whole interval of a rank.
            message = self._queue.pop(next(iter(self._queue)))
            self._next[message.partition] = message.offset + 1
            return [message]

    def restore(self, positions: Mapping[str, int]) -> None:
        with self._changed:
            self._next, self._durable = dict(positions), dict(positions)
            self._queue.clear()
            self._live_at = dict.fromkeys(positions, time.monotonic())
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
            self._changed.notify_all()

    # ---- the control channel ----

    def set_live(self, partitions: Collection[str]) -> None:
        """Set the partitions of the processes that train now; all others have been replaced or have ended."""
        with self._changed:
            self._live = frozenset(partitions)
            self._live_at.update(dict.fromkeys(self._live, time.monotonic()))
            self._offered = {name: offset for name, offset in self._offered.items() if name in self._live}

    def record_offer(self, partition: str, sequence: int) -> TapCountsState:
        """Record that a rank offers counts of this number and has none older; return their state."""
        with self._changed:
            if self._closed or not self._open:
                return TapCountsState.UNKNOWN
            self._offered[partition] = sequence
            if sequence < self._durable.get(partition, 0):
                return TapCountsState.DURABLE
            queued = self._queue.get(partition)
            if sequence < self._next.get(partition, 0) or (queued is not None and queued.offset == sequence):
                return TapCountsState.RECEIVED
            return TapCountsState.MISSING

    def durable_before(self, partition: str) -> int:
        """Return the number before which all counts are in a snapshot."""
        with self._changed:
            return self._durable.get(partition, 0)

    def deliver(self, partition: str, sequence: int, payload: bytes) -> bool:
        """Queue a payload. Return False and do nothing unless its state is ``MISSING``."""
        with self._changed:
            expected = self._next.get(partition, 0)
            if self._closed or not self._open or sequence < expected or partition in self._queue:
                return False
            self._losses.add(partition, expected, sequence, "not_kept")
            self._next[partition] = sequence
            self._live_at.setdefault(partition, time.monotonic())
            self._queue[partition] = StreamMessage(partition, sequence, payload)
            self._changed.notify_all()
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("tap: the source is closed")

    def _forget(self) -> None:
        # Without live ranks no process was replaced: a silent one may still return with its counts.
        if not self._live:
            return
        limit = time.monotonic() - self._forget_seconds
        for partition in [name for name, at in self._live_at.items() if at < limit and name not in self._live]:
            for known in (self._next, self._durable, self._offered):
                known.pop(partition, None)
            del self._live_at[partition]
