"""When messages arrived, by clocks that no publisher sets, and how far their event times are from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from flexd.stream.types import Message

WINDOW_SECONDS = 10.0
_MAX_PARTITIONS = 65_536


class ArrivalClock:
    """The arrival of messages: the broker's time of append where there is one, else the daemon's time.

    A broker's time is used up to the daemon's own: what was appended was appended before now, so a broker that is ahead
    lets nobody date accesses further ahead. Within a partition it never goes back: after a change to a broker that is
    behind, accesses that are dated right are not taken for future ones.

    Belongs to the ingest thread.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._newest: dict[str, float] = {}

    def now(self) -> float:
        """Return the time, Unix seconds."""
        return self._clock()

    def arrival(self, message: Message) -> float:
        """Return when a message arrived, Unix seconds."""
        now = self.now()
        appended = message.appended_seconds
        if appended is None:
            return now
        newest = self._newest.get(message.partition)
        if newest is None or appended > newest:
            if newest is None and len(self._newest) >= _MAX_PARTITIONS:
                self._newest.clear()
            self._newest[message.partition] = newest = appended
        return min(now, newest)


class EventTimeSkew:
    """Event time minus arrival of the accesses of the last whole window of ``WINDOW_SECONDS``.

    Attributes:
        least_seconds, most_seconds: NaN if the window had no access.
    """

    def __init__(self) -> None:
        self.least_seconds = self.most_seconds = math.nan
        self._least, self._most = math.inf, -math.inf
        self._until = -math.inf

    def add(self, skew_seconds: float) -> None:
        """Add the accesses of one event time."""
        if skew_seconds < self._least:
            self._least = skew_seconds
        if skew_seconds > self._most:
            self._most = skew_seconds

    def update(self, now: float) -> None:
        """End the window if it is over; ``now`` is monotonic."""
        if now < self._until:
            return
        known = self._least <= self._most
        self.least_seconds, self.most_seconds = (self._least, self._most) if known else (math.nan, math.nan)
        self._least, self._most = math.inf, -math.inf
        self._until = now + WINDOW_SECONDS
