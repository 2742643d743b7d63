"""Parts that end one after another, by a clock of the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexd.daemon.shutdown_budget import MIN_SHARE, ShutdownBudget


class Parts:
    def __init__(self) -> None:
        self.now = 100.0
        self.given: list[float] = []
        self.budget = ShutdownBudget(20.0, lambda: self.now)

    def part(self, needs: float) -> Callable[[float], bool]:
        """It takes so many seconds, or all that it gets."""

        def stop(seconds: float) -> bool:
            self.given.append(seconds)
            self.now += min(needs, seconds)
            return needs <= seconds

        return stop


def test_what_a_part_leaves_over_the_next_ones_have() -> None:
    it = Parts()
    assert it.budget.stop_part("first", it.part(1.0), reserve=0.6)
    assert it.budget.stop_part("second", it.part(2.0), reserve=0.1)
    assert it.budget.stop_part("third", it.part(15.0))
    assert it.given == pytest.approx([8.0, 17.0, 17.0])
    assert it.budget.in_time


def test_a_part_that_hangs_leaves_what_is_kept_for_the_others() -> None:
    it = Parts()
    assert not it.budget.stop_part("first", it.part(1e9), reserve=0.6)
    assert it.budget.stop_part("second", it.part(1.0), reserve=0.1)
    assert not it.budget.stop_part("third", it.part(1e9))
    assert it.budget.stop_part("fourth", it.part(0.0))
    assert it.given == pytest.approx([8.0, 10.0, 11.0, 20.0 * MIN_SHARE])
    assert (it.budget.in_time, it.budget.late) == (False, ["first", "third"])


def test_what_the_others_leave_is_given_to_those_that_were_late() -> None:
    it = Parts()
    needs = [1e9, 3.0]
    assert not it.budget.stop_part("slow", lambda seconds: it.part(needs.pop(0))(seconds), reserve=0.6)
    assert it.budget.stop_part("next", it.part(1.0), reserve=0.1)
    assert it.budget.late == ["slow"]
    it.budget.retry_late(reserve=0.1)
    assert it.budget.in_time
    assert it.given == pytest.approx([8.0, 10.0, 9.0])
