"""Time shares of parts that stop one after another, with a fake clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexd.daemon.components import MIN_SHARE, ShutdownBudget


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


def test_unused_time_is_given_to_later_parts() -> None:
    it = FakeParts()
    assert it.budget.stop_part("first", it.part(1.0), reserve=0.6)
    assert it.budget.stop_part("second", it.part(2.0), reserve=0.1)
    assert it.budget.stop_part("third", it.part(15.0))
    assert it.given == pytest.approx([8.0, 17.0, 17.0])
    assert it.budget.late == []


def test_a_part_that_hangs_leaves_the_reserve_to_later_parts() -> None:
    it = FakeParts()
    assert not it.budget.stop_part("first", it.part(1e9), reserve=0.6)
    assert it.budget.stop_part("second", it.part(1.0), reserve=0.1)
    assert not it.budget.stop_part("third", it.part(1e9))
    assert it.budget.stop_part("fourth", it.part(0.0))
    assert it.given == pytest.approx([8.0, 10.0, 11.0, 20.0 * MIN_SHARE])
    assert it.budget.late == ["first", "third"]
