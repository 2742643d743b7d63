"""Messages that a source could not deliver: how many, and for which reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

_log = logging.getLogger(__name__)

LOSS_REASONS = ("corrupt", "not_kept", "retention", "truncated")
"""Of messages. ``corrupt``: damaged in a file log. ``not_kept``: a tap's rank has counts no more that an older snapshot
lacks. ``retention``: deleted before they were read. ``truncated``: the log ended before the position."""
POSITION_REASONS = ("out_of_range", "retention", "truncated")
"""Of positions. ``out_of_range``: a broker no longer has it, by retention or because the topic was created anew."""


class Losses:
    """Counts of lost messages and positions, by reason. One thread adds, any thread reads.

    Attributes:
        messages: number of lost messages.
        positions: number of positions that the log no longer had.
    """

    def __init__(self, parts: Iterable[Losses] = ()) -> None:
        self.messages: Mapping[str, int] = {}
        self.positions: Mapping[str, int] = {}
        for part in parts:
            self.messages = _sum(self.messages, part.messages)
            self.positions = _sum(self.positions, part.positions)

    def add(self, partition: str, first_offset: int, next_offset: int, reason: str) -> None:
        """Add the messages from ``first_offset`` to before ``next_offset``; nothing if there are none."""
        if next_offset > first_offset:
            self.messages = _sum(self.messages, {reason: next_offset - first_offset})
            _log.warning("messages lost (%s): %s, offsets %d to %d", reason, partition, first_offset, next_offset - 1)

    def add_position(self, reason: str) -> None:
        """Add a position that the log no longer has. Its messages are added apart, once they are known."""
        self.positions = _sum(self.positions, {reason: 1})


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {reason: first.get(reason, 0) + second.get(reason, 0) for reason in sorted({*first, *second})}
