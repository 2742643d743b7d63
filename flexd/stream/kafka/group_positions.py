"""Read positions of a consumer group's member, and the policy for positions that the broker no longer has."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from flexd.core.errors import PositionLostError
from flexd.stream.types import Losses, OnPositionLost, Positions

_log = logging.getLogger(__name__)

Start = int | Literal["beginning", "end"]

GAP_SECONDS = 0.25
"""Offsets missing for so long are taken to hold no message."""
TRUSTED_GAPS = 8
"""After so many lasting gaps a partition is known to have them (transactions, compaction), and no gap delays it."""


class GroupPositions:
    """Positions by partition name (``topic/number``). Belongs to the polling thread, except ``start``.

    Args:
        name: of the source, for messages.
        policy: for positions that the broker no longer has.
        clock: monotonic seconds.

    Attributes:
        losses: messages known to have existed between a lost position and the first message read after it, and
            positions that the broker no longer had.
    """

    def __init__(self, name: str, policy: OnPositionLost, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._policy = policy
        self._lock = threading.Lock()
        """Guards against a rebalance, which may run on the client's own thread."""
        self._next: Positions = {}
        self._lost_at: Positions = {}
        self._clock = clock
        self._gaps: dict[str, tuple[int, float]] = {}
        """By partition: the first missing offset, and when it was first seen missing."""
        self._lasting_gaps: Counter[str] = Counter()
        self.losses = Losses()

    def all(self) -> Positions:
        return dict(self._next)

    def get(self, key: str) -> int | None:
        return self._next.get(key)

    def restore(self, positions: Mapping[str, int]) -> None:
        """Replace all positions."""
        with self._lock:
            self._next = dict(positions)
            self._lost_at, self._gaps = {}, {}

    def start(self, key: str) -> Start:
        """Return where to begin reading a partition. Any thread."""
        with self._lock:
            if key in self._next:
                return self._next[key]
            return "end" if key in self._lost_at and self._policy == "latest" else "beginning"

    def count_to_gap(self, key: str, offsets: Sequence[int]) -> int:
        """Count the fetched messages that can be delivered now; the others must be fetched again.

        Kafka leaves offsets out where transactions ended or keys were compacted. A broker that shows a message before
        one with a lower offset (tansu 0.6 does, with several producers) looks the same, and the message with the lower
        offset would be lost for good. So missing offsets are fetched again for ``GAP_SECONDS``.

        Args:
            offsets: rising, none below the position.
        """
        expected = self._next.get(key, offsets[0])
        count, gap = 0, self._gaps.pop(key, None)
        if offsets[-1] - expected == len(offsets) - 1 or self._lasting_gaps[key] >= TRUSTED_GAPS:
            return len(offsets)
        for offset in offsets:
            if offset != expected:
                break
            count, expected = count + 1, expected + 1
        since = self._clock() if gap is None or gap[0] != expected else gap[1]
        if self._clock() - since < GAP_SECONDS:
            self._gaps[key] = (expected, since)
            return count
        self._lasting_gaps[key] += 1
        log = _log.info if self._lasting_gaps[key] == 1 else _log.debug
        log("%s: %s: no messages at offsets %d to %d", self._name, key, expected, offsets[count] - 1)
        # A further gap behind this one is examined once its first offset is the expected one.
        behind = offsets[count]
        return count + next(
            (n for n, offset in enumerate(offsets[count:]) if offset != behind + n), len(offsets) - count
        )

    def accept(self, key: str, first_offset: int, last_offset: int) -> None:
        """Move the position past delivered messages."""
        position = self._next.get(key, 0)
        if last_offset >= position:
            lost_at = self._lost_at.pop(key, None)
            if lost_at is not None:
                self.losses.add(key, lost_at, max(first_offset, position), "retention")
            self._next[key] = last_offset + 1

    def apply_policy(self, keys: Iterable[str], reason: str, cause: str, ends: Mapping[str, int] | None = None) -> None:
        """Apply the policy to positions that the broker no longer has; the caller then seeks to ``start``.

        Args:
            reason: one of ``POSITION_REASONS``.
            ends: end of the log of each partition, where it is known.

        Raises:
            PositionLostError: the policy is ``fail``.
        """
        keys = list(keys)
        text = f"{self._name}: position lost: {cause}: { {key: self._next.get(key) for key in keys} }"
        if ends is not None:
            text += f", ends {dict(ends)}"
        if self._policy == "fail":
            raise PositionLostError(
                text, remedy="restore a matching snapshot, or set on_position_lost to earliest or latest"
            )
        with self._lock:
            for key in keys:
                position = self._next.pop(key, 0)
                self.losses.add_position(reason)
                self._lost_at[key] = position
                if ends is not None and self._policy == "latest":
                    # "end", resolved after every rebalance, would move past messages produced meanwhile.
                    self._next[key] = ends[key]
        _log.warning("%s; continuing at the %s message", text, self._policy)
