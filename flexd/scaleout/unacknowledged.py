"""What a follower has counted and the leader has not acknowledged: at most one delta on its way and one being filled.

The rules, which make a follower exact whatever is lost, repeated or restarted (the argument is in docs/scale-out.md):

1. A delta begins where the previous one ended. Only one is on its way; it is repeated until an answer comes.
2. An answer settles it: counted, or refused for good. Either way it is forgotten, and the leader's positions are known.
3. What is being filled goes on only if it begins exactly there. Else it is dropped, and the source is put back to the
   leader's positions.
4. Before a partition comes or leaves, everything counted is sent and settled (as far as the leader answers), and a
   partition that has come is read from where the leader stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexd.core.errors import ScaleOutError
from flexd.scaleout.count_delta import Stretch


class Chain:
    """Positions only: no counters, no source, no clock. Belongs to one thread.

    ``begin`` first: before it there is nothing to go on from.
    """

    def __init__(self) -> None:
        self._base: dict[str, int] | None = None
        """Where the source stood when what is being filled was begun. A partition that is not in it: at its earliest
        message."""
        self._sent: Mapping[str, Stretch] | None = None
        self._broken = False

    @property
    def begun(self) -> bool:
        return self._base is not None

    @property
    def broken(self) -> bool:
        """What is being filled cannot be counted any more: it is to be dropped (``begin``)."""
        return self._broken

    @property
    def waiting(self) -> bool:
        """A delta is on its way."""
        return self._sent is not None

    def begin(self, leader: Mapping[str, int]) -> None:
        """Nothing is counted here, and reading starts at the leader's positions. A delta on its way stays so."""
        self._base = dict(leader)
        self._broken = False

    def filled(self, reached: Mapping[str, int]) -> dict[str, Stretch]:
        """What is being filled, if the source has ``reached`` these positions.

        Args:
            reached: of every partition that was read; those that did not move are no part of it.
        """
        base = self._base or {}
        return {
            name: Stretch(base.get(name), position) for name, position in reached.items() if base.get(name) != position
        }

    def send(self, stretches: Mapping[str, Stretch]) -> None:
        """What was filled is on its way from now on; the next delta begins at its end. Nothing else may be on its
        way; before ``begin`` it must be empty: a question for the positions."""
        if self._sent is not None or (self._base is None and stretches):
            raise ScaleOutError("one delta at a time, and none before the first answer", reason="internal_error")
        self._sent = dict(stretches)
        if self._base is not None:
            self._base.update({name: stretch.end for name, stretch in stretches.items()})

    def settle(self, leader: Mapping[str, int], reached: Mapping[str, int], mine: Iterable[str] | None) -> None:
        """The delta on its way has an answer.

        Args:
            leader: its positions after it.
            reached: of the source now.
            mine: partitions that are read here; None: all that were reached.
        """
        self._sent = None
        if self._base is None:
            self._broken = True
            return
        base = self._base
        # A partition that is neither read here nor counted in what is being filled goes on elsewhere.
        concerned = self.filled(reached).keys() | set(reached if mine is None else mine)
        if any(base.get(name) != leader.get(name) for name in concerned):
            self._broken = True

    def assigned(self, names: Iterable[str], leader: Mapping[str, int], reached: Mapping[str, int]) -> dict[str, int]:
        """Partitions have come, while nothing is on its way and nothing is counted.

        Returns:
            where to read them. One that is not named is read from its earliest message; if the source has been
            elsewhere in it, that is ``broken``.
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
