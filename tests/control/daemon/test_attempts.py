"""Which attempt holds the job: the first complete one, until it is silent or an operator prefers another one."""

from __future__ import annotations

import pytest

from flexd.control.daemon.attempts import ENDED_SECONDS, MAX_LISTED, Attempts
from flexd.control.protocol.messages import Hello
from flexd.core.errors import TopologyError


def hello(attempt: str, rank: int = 0) -> Hello:
    return Hello("job", "i", attempt, rank, 2, 1, 2, (1,), "d", f"{attempt}-{rank}", "n", 1, 0, 0, True, (), 1)


@pytest.fixture
def attempts() -> Attempts:
    """Return attempts of which the first holds the job since second 0."""
    made = Attempts("ads", 10.0, lambda: 1_700_000_000.0)
    made.check(hello("first"), 0.0)
    made.hold([hello("first", 0), hello("first", 1)], 0.0)
    return made


def listed(attempts: Attempts, now: float) -> list[tuple[str, str]]:
    return [(each.name, each.state.name) for each in attempts.listed(2, now)]


def test_another_attempt_waits_and_is_told_who_holds_the_job(attempts: Attempts) -> None:
    with pytest.raises(TopologyError, match="attempt 'first' holds job 'ads'"):
        attempts.check(hello("second"), 1.0)
    assert attempts.holder == "first"
    assert listed(attempts, 1.0) == [("first", "HOLDS"), ("second", "WAITING")]


def test_a_silent_holder_ends_and_the_next_complete_attempt_gets_the_job(attempts: Attempts) -> None:
    attempts.expire(1, 30.0)
    assert attempts.holder == "first", "one of its ranks is registered"
    attempts.expire(0, 30.0)
    assert attempts.holder is None
    attempts.check(hello("second"), 31.0)
    attempts.hold([hello("second")], 31.0)
    assert listed(attempts, 31.0) == [("second", "HOLDS"), ("first", "ENDED")]
    attempts.expire(1, 31.0 + ENDED_SECONDS)
    assert listed(attempts, 31.0) == [("second", "HOLDS")]


def test_an_operator_ends_the_holder_and_the_job_is_kept_for_the_preferred_one(attempts: Attempts) -> None:
    with pytest.raises(TopologyError):
        attempts.check(hello("second"), 1.0)
    assert attempts.prefer("second", 2.0)
    with pytest.raises(TopologyError, match="an operator keeps job 'ads' for attempt 'second'"):
        attempts.check(hello("third"), 3.0)
    attempts.check(hello("second"), 3.0)
    attempts.hold([hello("second")], 3.0)
    assert attempts.holder == "second"
    assert not attempts.prefer("second", 4.0)
    with pytest.raises(KeyError):
        attempts.prefer("unknown", 4.0)


def test_the_holder_of_an_earlier_daemon_has_time_to_come_back() -> None:
    attempts = Attempts("ads", 10.0, lambda: 0.0)
    attempts.expect("old", 0.0)
    with pytest.raises(TopologyError, match="its ranks have 6 s to come back"):
        attempts.check(hello("new"), 4.0)
    attempts.expire(0, 9.0)
    assert attempts.holder == "old"
    attempts.expire(0, 11.0)
    assert attempts.holder is None


def test_an_attempt_that_is_forgotten_is_not_listed_and_unknown_names_are_errors(attempts: Attempts) -> None:
    attempts.forget("first")
    assert listed(attempts, 1.0) == []
    with pytest.raises(KeyError):
        attempts.forget("first")


def test_excused_time_is_no_silence(attempts: Attempts) -> None:
    with pytest.raises(TopologyError):
        attempts.check(hello("second"), 1.0)
    attempts.excuse_silence(100.0)
    attempts.expire(2, 105.0)
    assert listed(attempts, 105.0) == [("first", "HOLDS"), ("second", "WAITING")]
    attempts.expire(2, 112.0)
    assert listed(attempts, 112.0) == [("first", "HOLDS")]


def test_the_list_of_waiting_attempts_is_bounded_and_the_quietest_goes(attempts: Attempts) -> None:
    for number in range(MAX_LISTED + 3):
        with pytest.raises(TopologyError):
            attempts.check(hello(f"w{number}"), 1.0 + number / 100)
    waiting = [name for name, state in listed(attempts, 2.0) if state == "WAITING"]
    assert len(waiting) == MAX_LISTED
    assert {"w0", "w1", "w2"}.isdisjoint(waiting)
