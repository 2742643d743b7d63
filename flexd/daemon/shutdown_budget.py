"""The end of a daemon: its parts one after another, within one deadline that they share."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SHARE = 0.02
"""Of the seconds, that a part gets even if those before it have taken all: it may need next to nothing."""


class ShutdownBudget:
    """What a part does not need of its time, the parts after it have; what they leave, those that were late have.

    Args:
        seconds: for all parts together.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._deadline = clock() + seconds
        self._late: dict[str, Callable[[float], bool]] = {}

    @property
    def in_time(self) -> bool:
        """Whether every part so far has ended in time."""
        return not self._late

    @property
    def late(self) -> list[str]:
        """Names of the parts that have not ended in time."""
        return list(self._late)

    def stop_part(self, name: str, stop: Callable[[float], bool], reserve: float = 0.0) -> bool:
        """Calls ``stop`` with the seconds that this part has; returns what it does, which is whether it ended.

        Args:
            reserve: share (0 to 1) of all seconds that is kept for the parts after it.
        """
        left = self._deadline - self._clock() - reserve * self._seconds
        ended = stop(max(left, LEAST_SHARE * self._seconds))
        if not ended:
            self._late[name] = stop
        return ended

    def retry_late(self, reserve: float = 0.0) -> None:
        """Gives the parts that were late what is left now; ``stop`` is called again."""
        late, self._late = self._late, {}
        for name, stop in late.items():
            self.stop_part(name, stop, reserve)
