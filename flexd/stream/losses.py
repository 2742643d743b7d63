"""Messages that a source could not deliver: how many, for which reason, and which offsets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LOSS_REASONS = ("corrupt", "not_kept", "retention", "truncated")
"""Of messages. ``corrupt``: damaged in a file log. ``not_kept``: a tap's rank has counts no more that an older snapshot
lacks. ``retention``: deleted before they were read. ``truncated``: the log ended before the position."""
POSITION_REASONS = ("out_of_range", "retention", "truncated")
"""Of positions. ``out_of_range``: a broker no longer has it, by retention or because the topic was created anew."""
KEPT_RANGES = 16


@dataclass(frozen=True)
class LostRange:
    """Offsets of a partition that were not read.

    Attributes:
        last_offset: inclusive; one less than ``first_offset`` if it is unknown how many messages were lost.
        reason: one of ``LOSS_REASONS`` or ``POSITION_REASONS``.
    """

    partition: str
    first_offset: int
    last_offset: int
    reason: str

    @property
    def messages(self) -> int:
        return self.last_offset - self.first_offset + 1


class Losses:
    """Counts and newest ranges of lost messages. One thread adds, any thread reads."""

    def __init__(self, parts: Iterable[Losses] = ()) -> None:
        self._messages: Mapping[str, int] = {}
        self._positions: Mapping[str, int] = {}
        self._ranges: deque[LostRange] = deque(maxlen=KEPT_RANGES)
        for part in parts:
            self._messages = _sum(self._messages, part.messages())
            self._positions = _sum(self._positions, part.positions())
            self._ranges.extend(part.ranges())

    def add(self, partition: str, first_offset: int, next_offset: int, reason: str) -> None:
        """Add the messages from ``first_offset`` to before ``next_offset``; nothing if there are none."""
        if next_offset > first_offset:
            self._messages = _sum(self._messages, {reason: next_offset - first_offset})
            self._ranges.append(LostRange(partition, first_offset, next_offset - 1, reason))

    def add_position(self, partition: str, position: int, reason: str) -> None:
        """Add a position that the log no longer has. Its messages are added apart, once they are known."""
        self._positions = _sum(self._positions, {reason: 1})
        if reason == "truncated":
            self._ranges.append(LostRange(partition, position, position - 1, reason))

    def messages(self) -> Mapping[str, int]:
        """Return the number of messages by reason."""
        return self._messages

    def positions(self) -> Mapping[str, int]:
        """Return the number of positions that the log no longer had, by reason."""
        return self._positions

    def ranges(self) -> tuple[LostRange, ...]:
        """Return the newest ranges, oldest first."""
        return tuple(self._ranges.copy())


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {reason: first.get(reason, 0) + second.get(reason, 0) for reason in sorted({*first, *second})}
