"""What became of the messages that were read: plain counts that add up over threads and daemons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flexd.core.errors import StreamError
from flexd.sketch.set_types import IngestCounts

MAX_REASONS = 64
"""Different reasons for rejecting a message that are told apart; the rest is ``other``."""
_MAX_REASON_CHARS = 64
_MAX_COUNT = 2**62


@dataclass(frozen=True)
class Tally:
    """Counts of some messages.

    Attributes:
        messages, bytes: read, with the rejected ones.
        batches: of the accepted messages.
        counts: of their accesses.
        rejected: messages not counted, by reason.
    """

    messages: int = 0
    bytes: int = 0
    batches: int = 0
    counts: IngestCounts = field(default_factory=IngestCounts)
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        return self._combined(other, 1)

    def __sub__(self, other: Tally) -> Tally:
        """What was counted since ``other``, an earlier tally of the same counter."""
        return self._combined(other, -1)

    def _combined(self, other: Tally, sign: int) -> Tally:
        mine, theirs = asdict(self.counts), asdict(other.counts)
        rejected = dict(self.rejected)
        for reason, number in other.rejected.items():
            known = reason if reason in rejected or len(rejected) < MAX_REASONS else "other"
            rejected[known] = rejected.get(known, 0) + sign * number
        return Tally(
            self.messages + sign * other.messages,
            self.bytes + sign * other.bytes,
            self.batches + sign * other.batches,
            IngestCounts(**{name: mine[name] + sign * theirs[name] for name in mine}),
            {reason: number for reason, number in rejected.items() if number},
        )

    def document(self) -> dict[str, Any]:
        """JSON-able; ``from_document`` reads it."""
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "batches": self.batches,
            "counts": asdict(self.counts),
            "rejected": dict(self.rejected),
        }

    @classmethod
    def from_document(cls, document: Any) -> Tally:
        """Raises StreamError if it is not what ``document`` gave."""
        try:
            counts = {item.name: _count(document["counts"][item.name]) for item in fields(IngestCounts)}
            rejected = {str(reason): _count(number) for reason, number in document["rejected"].items()}
            if len(rejected) > MAX_REASONS + 1 or any(len(reason) > _MAX_REASON_CHARS for reason in rejected):
                raise ValueError("too many or too long reasons")
            return cls(
                _count(document["messages"]),
                _count(document["bytes"]),
                _count(document["batches"]),
                IngestCounts(**counts),
                rejected,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StreamError(f"malformed counts: {error!r}", remedy="run the same flexd on both sides") from error


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"count {str(value)[:40]}")
    return value
