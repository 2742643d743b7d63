"""A follower without tables requests those of its leader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexd.core.errors import ScaleOutError
from flexd.core.supervision import Supervisor
from flexd.scaleout import count_delta
from flexd.scaleout.push_answer import PushAnswer
from flexd.scaleout.tables_request import TablesRequest
from tests.support.scaleout_world import TABLES, LeaderProcess, MemoryStore
from tests.support.until import until


class ReplaceableLink:
    """Forwards to ``answer``, which a test replaces."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def answer(self, data: bytes) -> PushAnswer:
        raise ScaleOutError("no route", reason="unreachable")

    def offer(self, data: bytes) -> PushAnswer:
        self.received.append(data)
        return self.answer(data)

    def close(self) -> None:
        pass


@pytest.fixture
def link() -> ReplaceableLink:
    return ReplaceableLink()


@pytest.fixture
def request_of_one(link: ReplaceableLink) -> Iterator[TablesRequest]:
    made = TablesRequest(link, "one", "s1", "job", Supervisor())
    assert made.missing() == "the leader has not answered yet"
    made.start()
    yield made
    assert made.stop(20.0)


def test_it_is_repeated_until_the_leader_has_tables(link: ReplaceableLink, request_of_one: TablesRequest) -> None:
    until(lambda: request_of_one.missing() == "no route", 20, request_of_one.missing)
    stats = request_of_one.stats()
    assert (stats.paused, stats.problem, stats.failures["unreachable"] > 0) == (True, "no route", True)
    leader = LeaderProcess(MemoryStore())
    link.answer = leader.leader.offer  # type: ignore[method-assign]
    until(lambda: "starting" in request_of_one.missing(), 20, request_of_one.missing)
    assert request_of_one.leader_tables() == ()
    leader.open()
    until(request_of_one.leader_tables, 20, request_of_one.missing)
    assert list(request_of_one.leader_tables()) == TABLES
    assert count_delta.decode(link.received[0], 2**20).ranges == {}
    (report,) = leader.leader.followers.reports()
    assert (report.name, sum(leader.totals())) == ("one", 0), "the leader lists the follower, and counts nothing of it"


def test_a_leader_of_an_older_release_sends_none(link: ReplaceableLink, request_of_one: TablesRequest) -> None:
    link.answer = lambda _: PushAnswer("refused", {}, reason="other_tables", message="not equal")  # type: ignore[method-assign]
    until(lambda: "the leader's flexd is older" in request_of_one.missing(), 20, request_of_one.missing)
    assert "list them under `tables`" in request_of_one.missing()


def test_a_leader_of_another_job_sends_none(link: ReplaceableLink) -> None:
    leader = LeaderProcess(MemoryStore(), job="another")
    leader.open()
    link.answer = leader.leader.offer  # type: ignore[method-assign]
    made = TablesRequest(link, "one", "s1", "job", Supervisor())
    made.start()
    try:
        until(lambda: "the leader's is 'another'" in made.missing(), 20, made.missing)
        assert made.leader_tables() == ()
    finally:
        assert made.stop(20.0)
