"""Waits between attempts that fail."""

from __future__ import annotations

import random


class Backoff:
    """Waits of ``first`` seconds, doubling to ``longest``.

    Args:
        spread: largest share by which each wait is shortened at random, so that many waiters do not meet.
    """

    def __init__(self, first: float, longest: float, spread: float = 0.0) -> None:
        self._first = first
        self._longest = longest
        self._spread = spread
        self._next = first

    def seconds(self) -> float:
        """Return the next wait."""
        wait, self._next = self._next, min(self._longest, self._next * 2)
        return wait * (1.0 - self._spread * random.random())

    def reset(self) -> None:
        """Begin with ``first`` again."""
        self._next = self._first
