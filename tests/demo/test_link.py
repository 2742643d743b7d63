"""The emulated link: bytes take their time in both directions, and only those that leave the node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from flexd.demo.link import EmulatedLink
from tests.support import link_jobs
from tests.support.rank_pool import RankPool


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def times(link: EmulatedLink, clock: Clock, sent: float, received: float) -> tuple[float, float]:
    """When a collective begins and ends, after now."""
    start = clock.now
    with link.carry(sent, received):
        begun = clock.now - start
    return begun, clock.now - start


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> EmulatedLink:
    return EmulatedLink(1000.0, clock, clock.sleep)


def test_both_directions_run_at_the_same_time(link: EmulatedLink, clock: Clock) -> None:
    assert times(link, clock, 200, 200) == pytest.approx((0.2, 0.2))
    assert times(link, clock, 100, 300) == pytest.approx((0.1, 0.3))
    assert times(link, clock, 300, 100) == pytest.approx((0.3, 0.3))
    assert times(link, clock, 0, 0) == pytest.approx((0.0, 0.0))


def test_time_that_passes_inside_is_not_counted_again(link: EmulatedLink, clock: Clock) -> None:
    start = clock.now
    with link.carry(100, 300):
        clock.now += 0.25  # others were late
    assert clock.now - start == pytest.approx(0.35)
    clock.now += 5.0
    assert times(link, clock, 100, 100) == pytest.approx((0.1, 0.1)), "an idle link saves nothing up"


def test_collectives_of_two_threads_share_the_link(link: EmulatedLink, clock: Clock) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def beside() -> None:
        with link.carry(400, 400):
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=beside)
    thread.start()
    assert inside.wait(10)
    assert clock.now == pytest.approx(100.4)
    clock.now = 100.0
    assert times(link, clock, 0, 0) == pytest.approx((0.0, 0.0)), "a collective inside the node does not wait for them"
    assert times(link, clock, 100, 0) == pytest.approx((0.5, 0.5)), "after the bytes that left before"
    go_on.set()
    thread.join(10)


@pytest.mark.parametrize("exchange", ["chain", "direct_no_dedup"])
def test_what_a_rank_is_charged_is_what_it_counts_as_sent(ranks: Callable[[int], RankPool], exchange: str) -> None:
    found: list[dict[str, Any]] = ranks(4).run(link_jobs.charged, exchange)
    for counted in found:
        assert counted["sent_bytes"] == pytest.approx(counted["inter_bytes"])
        assert counted["inter_bytes"] > 0
        assert counted["after_undo"] == counted["sent_bytes"], "undone"
    assert sum(one["received_bytes"] for one in found) == pytest.approx(sum(one["sent_bytes"] for one in found))
