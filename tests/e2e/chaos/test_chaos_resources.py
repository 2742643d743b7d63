"""The limits of a soak: a metric that is missing does not pass for one within its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.api.rank import TopologyStatus
from flexd.api.status import Status
from flexd.api.stream import StreamStatus
from flexd.server.metrics import Metrics
from tests.e2e.chaos.chaos_resources import LIMITS, Maxima, is_within_limit, queued_bytes, resource_table
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture(scope="module")
def page() -> str:
    topology = TopologyStatus(queued_bytes=5_000_000, unread_bytes=700)
    status = Status(job="ads", version="1", stream=StreamStatus(source="tap"), topology=topology)
    return Metrics(FakeDaemon(shown=status)).render()[0].decode()


def test_bytes_that_wait_are_read_from_the_page_of_the_daemon(page: str) -> None:
    assert queued_bytes(page) == 5_000_700


@pytest.mark.parametrize("missing", ["flexd_control_queued_bytes", "flexd_control_unread_bytes"])
def test_a_missing_metric_is_not_measured_and_fails_the_check(page: str, missing: str) -> None:
    without = "\n".join(line for line in page.splitlines() if not line.startswith(missing))
    maxima = replace(LIMITS, queued_bytes=queued_bytes(without))
    assert maxima.queued_bytes == -1
    assert not is_within_limit(maxima, "queued_bytes")
    assert "queued, MiB | not measured" in resource_table(maxima)


def test_the_limit_itself_is_within_it_and_one_more_is_not() -> None:
    assert is_within_limit(LIMITS, "queued_bytes")
    assert not is_within_limit(replace(LIMITS, queued_bytes=LIMITS.queued_bytes + 1), "queued_bytes")


def test_maxima_merge_to_the_largest_of_each() -> None:
    first, second = Maxima(daemon_threads=3, queued_bytes=9), Maxima(daemon_threads=2, rank_bytes=4)
    first.merge(second)
    assert (first.daemon_threads, first.rank_bytes, first.queued_bytes) == (3, 4, 9)
