"""Positions of the counted messages: fitting, repeated and other offset ranges; durable positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexd.scaleout.count_delta import OffsetRange
from flexd.scaleout.ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    followers: Any = SimpleNamespace(lag_messages=lambda: 9, problem=lambda: "no follower has connected")
    return Ledger(followers)


def test_a_range_fits_where_it_begins_at_the_position_of_every_partition(ledger: Ledger) -> None:
    ledger.restore({"p": 4})
    assert ledger.judge({"p": OffsetRange(4, 9), "q": OffsetRange(None, 2)}) == "fits"
    assert ledger.judge({"p": OffsetRange(1, 4)}) == "repeated"
    assert ledger.judge({"p": OffsetRange(5, 9)}) == "elsewhere"
    assert ledger.judge({"p": OffsetRange(4, 9), "q": OffsetRange(1, 2)}) == "elsewhere"
    ledger.advance({"p": OffsetRange(4, 9), "q": OffsetRange(None, 2)})
    assert ledger.positions() == {"p": 9, "q": 2}
    assert ledger.judge({"p": OffsetRange(4, 9), "q": OffsetRange(None, 2)}) == "repeated"


def test_positions_are_durable_once_a_snapshot_holds_them(ledger: Ledger) -> None:
    ledger.restore({"p": 4})
    assert ledger.durable() == {"p": 4}
    ledger.advance({"p": OffsetRange(4, 9)})
    assert ledger.durable() == {"p": 4}
    ledger.commit({"p": 9})
    assert ledger.durable() == {"p": 9}


def test_it_is_open_from_the_first_poll_until_it_is_closed(ledger: Ledger) -> None:
    assert not ledger.open
    assert ledger.poll(0.0) == []
    assert ledger.open
    ledger.close()
    assert not ledger.open
    assert ledger.poll(60.0) == [], "a closed ledger does not wait"


def test_lag_and_problem_are_those_of_the_followers(ledger: Ledger) -> None:
    assert (ledger.lag(), ledger.problem) == (9, "no follower has connected")
