"""Where a member of a consumer group reads each partition, and what happens when a position is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Literal

from flexd.errors import PositionLostError
from flexd.stream.partition_reader import OnPositionLost
from flexd.stream.types import Positions

_log = logging.getLogger(__name__)

Start = int | Literal["beginning", "end"]


class GroupPositions:
    """Positions by partition name (``topic/number``). Belongs to the polling thread, but for ``start``.

    Args:
        name: of the source, for messages.
        policy: what to do about a lost position.
    """

    def __init__(self, name: str, policy: OnPositionLost) -> None:
        self._name = name
        self._policy = policy
        self._lock = threading.Lock()
        """Restoring against a rebalance, which may run on the client's own thread."""
        self._next: Positions = {}
        self._lost_at: Positions = {}
        self.messages_lost = 0
        self.positions_lost = 0

    def all(self) -> Positions:
        return dict(self._next)

    def get(self, key: str) -> int | None:
        return self._next.get(key)

    def restore(self, positions: Mapping[str, int]) -> None:
        with self._lock:
            self._next = dict(positions)
            self._lost_at = {}

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
