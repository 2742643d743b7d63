"""The leader's positions: the only authority on which messages have been counted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal

from flexd.scaleout.count_delta import OffsetRange
from flexd.scaleout.follower_registry import FollowerRegistry
from flexd.stream.losses import Losses
from flexd.stream.types import Message, Positions

Fit = Literal["fits", "repeated", "elsewhere"]


class Ledger:
    """The counted position of each partition, as a ``Source`` of the leader's ingest that never delivers a message.

    As a source its positions are saved and restored with the counters in the ordinary snapshot, which also reports the
    durable ones (``commit``). Deltas must not be checked before ``open``: the snapshot may not be restored yet.

    Args:
        followers: reports the messages that they have not read, and their fault as a whole.
    """

    def __init__(self, followers: FollowerRegistry) -> None:
        self._followers = followers
        self._lock = threading.Lock()
        self._positions: Positions = {}
        self._durable: Positions = {}
        self._open = threading.Event()
        self._closed = threading.Event()

    def losses(self) -> Losses:
        """Return none: each follower reports its own."""
        return Losses()

    @property
    def open(self) -> bool:
        """True once the positions are restored, until ``close``."""
        return self._open.is_set() and not self._closed.is_set()

    def judge(self, ranges: Mapping[str, OffsetRange]) -> Fit:
        """Check whether a delta of these offset ranges may be counted.

        ``fits``: each begins at the ledger's position. ``repeated``: each ends there, so its messages are counted
        already, by any follower. ``elsewhere``: anything else.
        """
        with self._lock:
            at = self._positions
            if all(at.get(name) == offsets.start for name, offsets in ranges.items()):
                return "fits"
            if all(at.get(name) == offsets.end for name, offsets in ranges.items()):
                return "repeated"
        return "elsewhere"

    def advance(self, ranges: Mapping[str, OffsetRange]) -> None:
        """Advance to the ends of the ranges. Called under the lock of the counts: a snapshot holds both or neither."""
        with self._lock:
            self._positions.update({name: offsets.end for name, offsets in ranges.items()})

    def durable(self) -> Positions:
        """Return the positions in the newest snapshot."""
        with self._lock:
            return dict(self._durable)

    @property
    def problem(self) -> str | None:
        return self._followers.problem()

    def poll(self, timeout_seconds: float) -> list[Message]:
        """Return no message. The first call follows the restoring of a snapshot."""
        self._open.set()
        self._closed.wait(timeout_seconds)
        return []

    def restore(self, positions: Mapping[str, int]) -> None:
        with self._lock:
            self._positions = dict(positions)
            self._durable = dict(positions)

    def positions(self) -> Positions:
        with self._lock:
            return dict(self._positions)

    def lag(self) -> int:
        return self._followers.lag_messages()

    def commit(self, positions: Mapping[str, int]) -> str | None:
        with self._lock:
            self._durable = dict(positions)
        return None

    def close(self) -> None:
        self._closed.set()
