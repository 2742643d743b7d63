"""Polling with a deadline, and a clock that a test moves."""

import time
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds, moved by the test or by ``sleep``."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def until(condition: Callable[[], object], seconds: float = 60.0, what: Callable[[], object] | str = "") -> Any:
    """Call ``condition`` until it is true and return its value; the interval grows from 2 to 50 ms.

    Args:
        what: described in the error; a callable is called at the deadline.

    Raises:
        AssertionError: ``condition`` is still false after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    interval = 0.002
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(interval)
        interval = min(1.5 * interval, 0.05)
    return value
