"""Time shares of parts that stop one after another, with a fake clock."""

from __future__ import annotations

from collections.abc import Callable

from flexd.daemon.shutdown_budget import ShutdownBudget


class FakeParts:
    def __init__(self) -> None:
        self.now = 100.0
        self.given: list[float] = []
        self.budget = ShutdownBudget(20.0, lambda: self.now)

    def part(self, needs: float) -> Callable[[float], bool]:
        """Return a stop that takes ``needs`` seconds, or all of its share."""

        def stop(seconds: float) -> bool:
            self.given.append(seconds)
            self.now += min(needs, seconds)
            return needs <= seconds

        return stop
