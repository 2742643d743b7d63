"""Share one shutdown deadline among the parts of a daemon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

MIN_SHARE = 0.02
"""Share of the deadline that a part gets even if earlier parts have used all of it: it may need almost nothing."""


class Share:
    """Shares of ``shutdown_seconds`` reserved for each part of a daemon; the channel has the rest. Unused time goes to
    later parts."""

    INGEST = 0.5
    DRIFT = 0.05
    HISTORY = 0.05
    SERVER = 0.1


class ShutdownBudget:
    """Stops parts one after another. Later parts get the time that earlier ones left unused.

    Args:
        seconds: deadline of all parts together.
        clock: monotonic seconds.

    Attributes:
        late: names of the parts that have not ended in time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._deadline = clock() + seconds
        self.late: list[str] = []

    @property
    def in_time(self) -> bool:
        """True while every part so far has ended in time."""
        return not self.late

    def stop_part(self, name: str, stop: Callable[[float], bool], reserve: float = 0.0) -> bool:
        """Call ``stop`` with the seconds left to this part. Returns its result: whether the part ended.

        Args:
            name: name of the part in ``late``.
            stop: stops the part within the given seconds.
            reserve: share (0 to 1) of the deadline reserved for later parts.
        """
        left = self._deadline - self._clock() - reserve * self._seconds
        try:
            ended = stop(max(left, MIN_SHARE * self._seconds))
        except Exception:
            # The parts after it must be stopped all the same.
            _log.exception("stopping %s failed", name)
            ended = False
        if not ended:
            self.late.append(name)
        return ended
