"""Reports of followers: lag, silence, the problem of all of them, refusals by reason."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from flexd.scaleout import follower_registry
from flexd.scaleout.count_delta import OffsetRange
from flexd.scaleout.follower_registry import FORGET_SECONDS, FollowerRegistry
from flexd.scaleout.push_answer import PushAnswer
from tests.support.scaleout_world import count_delta_of

ACCEPTED = PushAnswer("accepted", {})
DELTA = count_delta_of([3, 3], {"p": OffsetRange(None, 4)}, lag_messages=5)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1_000.0)


@pytest.fixture
def registry(clock: SimpleNamespace) -> FollowerRegistry:
    return FollowerRegistry(10.0, lambda: clock.now)


def test_outcomes_bytes_and_accesses_are_added_up_by_follower(registry: FollowerRegistry) -> None:
    registry.record(DELTA, 100, ACCEPTED)
    registry.record(DELTA, 100, PushAnswer("repeated", {}))
    registry.record(DELTA, 100, PushAnswer("refused", {}, reason="position"))
    registry.record(dataclasses.replace(DELTA, ranges={}), 30, ACCEPTED)
    (report,) = registry.reports()
    assert (report.name, report.accepted, report.repeated, report.refused) == ("one", 1, 1, {"position": 1})
    assert (report.bytes, report.accesses, report.lag_messages) == (330, 2, 5)
    assert registry.refused() == {"position": 1}


def test_refusals_of_unknown_reasons_are_internal_errors(registry: FollowerRegistry) -> None:
    for reason in ("stale", "stale", "brand new"):
        registry.count_refusal(reason)
    assert registry.refused() == {"stale": 2, "internal_error": 1}


def test_the_lag_of_a_silent_follower_is_not_counted(registry: FollowerRegistry, clock: SimpleNamespace) -> None:
    registry.record(DELTA, 1, ACCEPTED)
    clock.now += 8.0
    registry.record(dataclasses.replace(DELTA, follower="two", lag_messages=7), 1, ACCEPTED)
    assert registry.lag_messages() == 12
    clock.now += 8.0
    assert [(each.name, each.silent, each.last_push_seconds) for each in registry.reports()] == [
        ("one", True, 16.0), ("two", False, 8.0),
    ]  # fmt: skip
    assert registry.lag_messages() == 7


def test_followers_that_left_or_were_silent_for_an_hour_are_not_listed(
    registry: FollowerRegistry, clock: SimpleNamespace
) -> None:
    registry.record(DELTA, 1, ACCEPTED)
    registry.record(dataclasses.replace(DELTA, follower="two", leaving=True), 1, ACCEPTED)
    assert [each.name for each in registry.reports()] == ["one"]
    clock.now += FORGET_SECONDS + 1.0
    assert registry.reports() == ()


def test_the_problem_names_missing_followers_after_the_timeout(
    registry: FollowerRegistry, clock: SimpleNamespace
) -> None:
    assert registry.problem() is None
    clock.now += 10.0
    assert registry.problem() == "no follower has connected"
    registry.record(DELTA, 1, ACCEPTED)
    assert registry.problem() is None
    clock.now += 12.0
    assert registry.problem() == "no follower has pushed for 12 s"
    registry.record(dataclasses.replace(DELTA, follower="two"), 1, ACCEPTED)
    assert registry.problem() is None, "one silent follower is no problem"


def test_a_problem_of_the_local_reader_is_reported_first(registry: FollowerRegistry, clock: SimpleNamespace) -> None:
    stats = SimpleNamespace(problem="no broker")
    reader: Any = SimpleNamespace(stats=lambda: stats)
    registry.set_local_reader(reader)
    clock.now += 10.0
    assert registry.problem() == "no broker"
    stats.problem = None
    assert registry.problem() == "no follower has connected"


def test_followers_beyond_the_limit_are_not_listed(registry: FollowerRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_registry, "MAX_FOLLOWERS", 1)
    registry.record(DELTA, 1, ACCEPTED)
    registry.record(dataclasses.replace(DELTA, follower="two"), 1, ACCEPTED)
    assert [each.name for each in registry.reports()] == ["one"]
