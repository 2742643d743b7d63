"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """Seconds, moved by the test or by ``sleep``."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
