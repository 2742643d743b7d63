"""Counts and ranges of lost messages."""

from __future__ import annotations

from flexd.stream.losses import KEPT_RANGES, Losses, LostRange


def test_messages_are_counted_by_reason_with_their_range():
    losses = Losses()
    losses.add("t/0", 5, 8, "retention")
    losses.add("t/0", 8, 8, "retention")
    losses.add("t/0", 9, 8, "retention")
    losses.add("t/1", 0, 1, "corrupt")
    assert losses.messages() == {"retention": 3, "corrupt": 1}
    assert losses.ranges() == (LostRange("t/0", 5, 7, "retention"), LostRange("t/1", 0, 0, "corrupt"))
    assert [lost.messages for lost in losses.ranges()] == [3, 1]


def test_a_truncated_log_loses_a_position_and_an_unknown_number_of_messages():
    losses = Losses()
    losses.add_position("t/0", 5, "out_of_range")
    losses.add_position("t/0", 9, "truncated")
    assert losses.positions() == {"out_of_range": 1, "truncated": 1}
    assert losses.messages() == {}
    (lost,) = losses.ranges()
    assert (lost.first_offset, lost.messages, lost.reason) == (9, 0, "truncated")


def test_the_newest_ranges_are_kept():
    losses = Losses()
    for offset in range(100):
        losses.add("t/0", offset, offset + 1, "corrupt")
    assert [lost.first_offset for lost in losses.ranges()] == list(range(100 - KEPT_RANGES, 100))
    assert sum(losses.messages().values()) == 100
