"""The typical time of a training step, to compare two ways to run it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

CLEAR_MARGIN = 0.03
"""Share of a step that another way must save to be used instead: less is within what medians of 30 steps differ by."""


def is_clearly_less(seconds: float, usual_seconds: float, margin: float = CLEAR_MARGIN) -> bool:
    """Return whether steps of ``seconds`` save at least ``margin`` of steps of ``usual_seconds``."""
    return seconds < usual_seconds * (1 - margin)


class StepTimes:
    """Times of the newest steps that count.

    Args:
        steps: how many make a median.
        leave_out: first steps that do not count.
        clock: seconds.
    """

    def __init__(self, steps: int, *, leave_out: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._times: deque[float] = deque(maxlen=steps)
        self._left_out = leave_out
        self._clock = clock
        self._last: float | None = None

    def step(self, *, counts: bool = True) -> None:
        """Count a step; call it after each one.

        Args:
            counts: False: this one is neither counted nor one of those to leave out.
        """
        now, last = self._clock(), self._last
        self._last = now
        if not counts:
            return
        if self._left_out > 0:
            self._left_out -= 1
        elif last is not None:
            self._times.append(now - last)

    def leave_out(self, steps: int) -> None:
        """Begin anew after ``steps`` further ones, or more if more were to be left out already."""
        self._times.clear()
        self._left_out = max(self._left_out, steps)

    def interrupt(self) -> None:
        """Do not count the time until the next step, which is none of training."""
        self._last = None

    @property
    def begun(self) -> bool:
        """True if a step has been counted since the last beginning."""
        return bool(self._times)

    @property
    def median_seconds(self) -> float | None:
        """Median of the newest steps; None until there are enough."""
        return median(self._times) if len(self._times) == self._times.maxlen else None
