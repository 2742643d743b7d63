"""Counts of lost messages and positions."""

from __future__ import annotations

from flexd.stream.types import Losses


def test_messages_and_positions_are_counted_by_reason_and_parts_are_added():
    losses = Losses()
    losses.add("t/0", 5, 8, "retention")
    losses.add("t/0", 8, 8, "retention")
    losses.add("t/1", 0, 1, "corrupt")
    losses.add_position("out_of_range")
    both = Losses([losses, losses])
    assert (both.messages, both.positions) == ({"retention": 6, "corrupt": 2}, {"out_of_range": 2})
