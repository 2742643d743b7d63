"""Track counts that the leader has not acknowledged: at most one delta in flight and one being filled.

The rules, which make a follower exact whatever is lost, repeated or restarted (the argument is in docs/scale-out.md):

1. A delta begins where the previous one ended. Only one is in flight; it is repeated until an answer arrives.
2. An answer settles it: counted, or finally refused. Either way it is dropped, and the leader's positions are known.
3. The delta being filled continues only if it begins exactly there. Otherwise it is dropped, and the source returns to
   the leader's positions.
4. Before a partition is assigned or revoked, everything counted is sent and settled (if the leader answers), and a new
   partition is read from the leader's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexd.core.errors import ScaleOutError
from flexd.scaleout.count_delta import OffsetRange


class UnacknowledgedDeltas:
    """Positions only: no counters, no source, no clock. Not thread-safe.

    Call ``begin`` first.
    """

    def __init__(self) -> None:
        self._base: dict[str, int] | None = None
        """Positions at which the delta being filled begins. A partition that is missing begins at its earliest
        message."""
        self._sent: Mapping[str, OffsetRange] | None = None
        self._broken = False

    @property
    def begun(self) -> bool:
        return self._base is not None

    @property
    def broken(self) -> bool:
        """True if the delta being filled does not follow the leader's positions: drop it (``begin``)."""
        return self._broken

    @property
    def waiting(self) -> bool:
        """True while a delta is in flight."""
        return self._sent is not None

    def begin(self, leader: Mapping[str, int]) -> None:
        """Start an empty delta at the leader's positions. A delta in flight is kept."""
        self._base = dict(leader)
        self._broken = False

    def filled(self, reached: Mapping[str, int]) -> dict[str, OffsetRange]:
        """Return the offset ranges of the delta being filled.

        Args:
            reached: position of the source in every partition that was read; partitions that did not move are left out.
        """
        base = self._base or {}
        return {
            name: OffsetRange(base.get(name), position)
            for name, position in reached.items()
            if base.get(name) != position
        }

    def send(self, ranges: Mapping[str, OffsetRange]) -> None:
        """Mark the filled delta as in flight; the next one begins at its end.

        Args:
            ranges: of the delta; empty before ``begin``, to request the leader's positions.

        Raises:
            ScaleOutError: another delta is in flight, or ``ranges`` are given before ``begin``.
        """
        if self._sent is not None or (self._base is None and ranges):
            raise ScaleOutError("one delta at a time, and none before the first answer", reason="internal_error")
        self._sent = dict(ranges)
        if self._base is not None:
            self._base.update({name: offsets.end for name, offsets in ranges.items()})

    def settle(self, leader: Mapping[str, int], reached: Mapping[str, int], owned: Iterable[str] | None) -> None:
        """Settle the delta in flight by the leader's answer.

        Args:
            leader: the leader's positions after it.
            reached: positions of the source now.
            owned: partitions that this follower reads; None: all in ``reached``.
        """
        self._sent = None
        if self._base is None:
            self._broken = True
            return
        base = self._base
        # A partition that is neither read here nor part of the delta being filled belongs to another follower.
        concerned = self.filled(reached).keys() | set(reached if owned is None else owned)
        if any(base.get(name) != leader.get(name) for name in concerned):
            self._broken = True

    def assigned(self, names: Iterable[str], leader: Mapping[str, int], reached: Mapping[str, int]) -> dict[str, int]:
        """Take over partitions while nothing is in flight and nothing is counted.

        Returns:
            the position to read each from. One that is missing is read from its earliest message; if the source has
            already moved in it, ``broken`` becomes true.

        Raises:
            ScaleOutError: a delta is in flight, or ``begin`` was not called.
        """
        if self._sent is not None or self._base is None:
            raise ScaleOutError("assigned before everything is settled", reason="internal_error")
        places: dict[str, int] = {}
        for name in names:
            if name in leader:
                places[name] = self._base[name] = leader[name]
            else:
                self._base.pop(name, None)
                self._broken |= name in reached
        return places
