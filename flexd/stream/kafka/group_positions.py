"""Where a member of a consumer group reads each partition, and what happens when a position is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from flexd.core.errors import PositionLostError
from flexd.stream.file_log.partition_reader import OnPositionLost
from flexd.stream.types import Positions

_log = logging.getLogger(__name__)

Start = int | Literal["beginning", "end"]

GAP_SECONDS = 0.25
"""Offsets that are not there for so long are taken for ones that hold no message."""
TRUSTED_GAPS = 8
"""A partition with so many such gaps is one that has them (transactions, compaction): none is waited for any more."""


class GroupPositions:
    """Positions by partition name (``topic/number``). Belongs to the polling thread, but for ``start``.

    Args:
        name: of the source, for messages.
        policy: what to do about a lost position.
        clock: monotonic seconds.

    Attributes:
        gaps_filled: times that offsets which were skipped were there at a later look.
    """

    def __init__(self, name: str, policy: OnPositionLost, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._policy = policy
        self._lock = threading.Lock()
        """Restoring against a rebalance, which may run on the client's own thread."""
        self._next: Positions = {}
        self._lost_at: Positions = {}
        self._clock = clock
        self._gaps: dict[str, tuple[int, float]] = {}
        """Where a partition skips offsets, and since when."""
        self._real_gaps: Counter[str] = Counter()
        self.gaps_filled = 0
        self.messages_lost = 0
        self.positions_lost = 0

    def all(self) -> Positions:
        return dict(self._next)

    def get(self, key: str) -> int | None:
        return self._next.get(key)

    def restore(self, positions: Mapping[str, int]) -> None:
        with self._lock:
            self._next = dict(positions)
            self._lost_at, self._gaps = {}, {}

    def move(self, positions: Mapping[str, int]) -> None:
        """Puts some partitions elsewhere: another member has read them meanwhile."""
        with self._lock:
            self._next.update(positions)
            for key in positions:
                self._lost_at.pop(key, None)

    def start(self, key: str) -> Start:
        """Where to begin reading a partition. Any thread."""
        with self._lock:
            if key in self._next:
                return self._next[key]
            return "end" if key in self._lost_at and self._policy == "latest" else "beginning"

    def up_to_gap(self, key: str, offsets: Sequence[int]) -> int:
        """How many of these messages can be taken now; the others have to be fetched again.

        Kafka leaves offsets out where transactions ended or keys were compacted. A broker that shows a message before
        the one that it had given the lower offset (tansu 0.6 does, with several producers) looks the same, and would
        lose that one for good: so what is skipped is looked at again for ``GAP_SECONDS``.

        Args:
            offsets: rising, none below the position.
        """
        expected = self._next.get(key, offsets[0])
        at, skipped_at = 0, self._gaps.pop(key, None)
        if skipped_at is not None and offsets[0] == expected == skipped_at[0]:
            self.gaps_filled += 1
        if offsets[-1] - expected == len(offsets) - 1 or self._real_gaps[key] >= TRUSTED_GAPS:
            return len(offsets)
        for offset in offsets:
            if offset != expected:
                break
            at, expected = at + 1, expected + 1
        since = self._clock() if skipped_at is None or skipped_at[0] != expected else skipped_at[1]
        if self._clock() - since < GAP_SECONDS:
            self._gaps[key] = (expected, since)
            return at
        self._real_gaps[key] += 1
        log = _log.info if self._real_gaps[key] == 1 else _log.debug
        log("%s: %s: no messages at offsets %d to %d", self._name, key, expected, offsets[at] - 1)
        # Whatever else is skipped behind this gap is looked at when it comes first.
        behind = offsets[at]
        return at + next((n for n, offset in enumerate(offsets[at:]) if offset != behind + n), len(offsets) - at)

    def accept(self, key: str, first_offset: int, last_offset: int) -> int:
        """Moves the position past messages that came. Returns the position before: those below it are repeats of a
        fetch that a rebalance overtook."""
        position = self._next.get(key, 0)
        if last_offset >= position:
            lost_at = self._lost_at.pop(key, None)
            if lost_at is not None:
                self.messages_lost += max(0, max(first_offset, position) - lost_at)
            self._next[key] = last_offset + 1
        return position

    def lose(self, keys: Iterable[str], cause: str, ends: Mapping[str, int] | None = None) -> str:
        """Applies the policy to positions that the broker no longer has; the caller then begins at ``start``.

        Args:
            ends: end of the log of each, where it is known.

        Returns:
            What happened, for logs.

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
                self.positions_lost += 1
                self._lost_at[key] = self._next.pop(key, 0)
                if ends is not None and self._policy == "latest":
                    # Asked again after every rebalance, "the end" would move past what is produced meanwhile.
                    self._next[key] = ends[key]
        _log.warning("%s; going on at the %s message", text, self._policy)
        return text
