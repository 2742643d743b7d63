"""Counts of stream messages by outcome; they add up over daemons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flexd.core.errors import StreamError
from flexd.sketch.types import AccessCounts

MAX_REASONS = 64
"""Distinct rejection reasons that are counted by name; the rest is counted as ``other``."""
_MAX_REASON_CHARS = 64
_MAX_COUNT = 2**62


@dataclass(frozen=True)
class MessageCounts:
    """Counts of some messages.

    Attributes:
        messages, bytes: read, including the rejected ones.
        batches: of the accepted messages.
        accesses: of the accepted messages, by outcome.
        rejected: messages not counted, by reason.
    """

    messages: int = 0
    bytes: int = 0
    batches: int = 0
    accesses: AccessCounts = field(default_factory=AccessCounts)
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: MessageCounts) -> MessageCounts:
        return self._combined(other, 1)

    def __sub__(self, other: MessageCounts) -> MessageCounts:
        """Return what was counted since ``other``, an earlier value of the same counter."""
        return self._combined(other, -1)

    def _combined(self, other: MessageCounts, sign: int) -> MessageCounts:
        mine, theirs = asdict(self.accesses), asdict(other.accesses)
        rejected = dict(self.rejected)
        for reason, number in other.rejected.items():
            known = reason if reason in rejected or len(rejected) < MAX_REASONS else "other"
            rejected[known] = rejected.get(known, 0) + sign * number
        return MessageCounts(
            self.messages + sign * other.messages,
            self.bytes + sign * other.bytes,
            self.batches + sign * other.batches,
            AccessCounts(**{name: mine[name] + sign * theirs[name] for name in mine}),
            {reason: number for reason, number in rejected.items() if number},
        )

    def document(self) -> dict[str, Any]:
        """Return JSON-able values that ``from_document`` reads."""
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "batches": self.batches,
            "accesses": asdict(self.accesses),
            "rejected": dict(self.rejected),
        }

    @classmethod
    def from_document(cls, document: Any) -> MessageCounts:
        """Read the values that ``document`` returned.

        Raises:
            StreamError: they are anything else.
        """
        try:
            # An older or newer daemon may know fewer outcomes.
            accesses = {item.name: _count(document["accesses"].get(item.name, 0)) for item in fields(AccessCounts)}
            rejected = {str(reason): _count(number) for reason, number in document["rejected"].items()}
            if len(rejected) > MAX_REASONS + 1 or any(len(reason) > _MAX_REASON_CHARS for reason in rejected):
                raise ValueError("too many or too long reasons")
            return cls(
                _count(document["messages"]),
                _count(document["bytes"]),
                _count(document["batches"]),
                AccessCounts(**accesses),
                rejected,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StreamError(f"malformed counts: {error!r}", remedy="run the same flexd on both sides") from error


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"count {str(value)[:40]}")
    return value
