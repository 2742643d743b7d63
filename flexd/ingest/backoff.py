"""Exponential back-off between attempts."""

from __future__ import annotations

import threading

_BACKOFF_SECONDS = (0.1, 5.0)


class Backoff:
    """Doubles the wait after every failure in a row, up to a bound. Setting ``stop`` ends a wait."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._seconds = _BACKOFF_SECONDS[0]

    def wait(self) -> None:
        self._stop.wait(self._seconds)
        self._seconds = min(2 * self._seconds, _BACKOFF_SECONDS[1])

    def reset(self) -> None:
        self._seconds = _BACKOFF_SECONDS[0]
