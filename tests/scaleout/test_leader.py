"""Deltas that the leader counts, repeats and refuses."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from flexd.core.errors import ScaleOutError
from flexd.scaleout import count_delta, push_answer
from flexd.scaleout.count_delta import NO_TABLES, CountDelta, OffsetRange
from flexd.scaleout.leader import LeaderWithoutTables
from flexd.scaleout.transport import HttpLink, listener
from flexd.sketch.sketch_set import SketchSet
from tests.support.scaleout_world import KEYSPACE, SETTINGS, LeaderProcess, MemoryStore, count_delta_of


@pytest.fixture
def leader() -> LeaderProcess:
    made = LeaderProcess(MemoryStore())
    made.open()
    return made


def _offer(leader: LeaderProcess, delta: CountDelta) -> push_answer.PushAnswer:
    return leader.leader.offer(count_delta.encode(delta))


def test_the_leader_counts_a_delta_once_and_only_at_its_positions(leader: LeaderProcess) -> None:
    first = count_delta_of([3, 3], {"p": OffsetRange(None, 4)})
    assert _offer(leader, first).outcome == "accepted"
    again = _offer(leader, first)
    assert (again.outcome, again.positions, again.durable) == ("repeated", {"p": 4}, {})
    for ranges in (
        {"p": OffsetRange(5, 9)},
        {"p": OffsetRange(4, 9), "q": OffsetRange(1, 2)},
        {"q": OffsetRange(0, 2)},
    ):
        refused = _offer(leader, count_delta_of([7], ranges))
        assert (refused.outcome, refused.reason, refused.positions) == ("refused", "position", {"p": 4})
    assert leader.totals()[3] == 2
    assert sum(leader.totals()) == 2
    assert leader.ingestor._read_stats().accesses == 2
    leader.save()
    assert _offer(leader, count_delta_of([], {}, sketch_meta={}, arrays={})).durable == {"p": 4}
    (report,) = leader.leader.followers.reports()
    assert (report.accepted, report.repeated, report.refused) == (1, 1, {"position": 3})


def test_deltas_of_another_job_tables_or_sketches_are_refused_with_what_to_do(leader: LeaderProcess) -> None:
    other = SketchSet.of(KEYSPACE.tables, dataclasses.replace(SETTINGS, max_hot_rows=17))
    ranges = {"p": OffsetRange(None, 4)}
    for delta, reason, word in (
        (count_delta_of([1], ranges, job="another"), "other_job", "another"),
        (count_delta_of([1], ranges, tables="abcd"), "other_tables", "`tables`"),
        (count_delta_of([1], ranges, tables=NO_TABLES), "other_tables", "continues with the leader's"),
        (count_delta_of([1], ranges, other), "other_sketches", "`sketch`"),
    ):
        answer = _offer(leader, delta)
        assert (answer.outcome, answer.reason) == ("refused", reason)
        assert word in answer.message
        # Only a follower of this job gets them.
        assert answer.tables == (KEYSPACE.tables if reason == "other_tables" else ())
    assert sum(leader.totals()) == 0
    assert leader.ledger.positions() == {}


def test_nothing_is_judged_before_the_snapshot_is_restored() -> None:
    starting = LeaderProcess(MemoryStore())
    with pytest.raises(ScaleOutError) as caught:
        _offer(starting, count_delta_of([1], {"p": OffsetRange(None, 1)}))
    assert caught.value.reason == "starting"
    assert starting.leader.followers.refused() == {"starting": 1}


def test_a_leader_without_tables_says_what_is_missing() -> None:
    leader = LeaderWithoutTables(SETTINGS, lambda: "no tables yet: no rank has registered")
    http = listener(leader, None, "127.0.0.1", 0)
    http.start()
    try:
        with pytest.raises(ScaleOutError, match="no tables yet: no rank has registered") as caught:
            HttpLink("127.0.0.1", http.port, None).offer(
                count_delta.encode(count_delta_of([], {}, sketch_meta={}, arrays={}))
            )
    finally:
        assert http.stop(5.0)
    assert (caught.value.reason, leader.followers.refused()) == ("starting", {"starting": 1})


def test_of_concurrent_equal_deltas_one_is_counted(leader: LeaderProcess) -> None:
    """Twenty equal deltas arrive at the same time."""
    data = count_delta.encode(count_delta_of([9], {"p": OffsetRange(None, 1)}))
    outcomes: list[str] = []
    threads = [threading.Thread(target=lambda: outcomes.append(leader.leader.offer(data).outcome)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["accepted"] + ["repeated"] * 19
    assert leader.totals()[9] == 1
