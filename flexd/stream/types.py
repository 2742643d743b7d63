"""Types of the stream: access batches, messages, positions, losses, and the ``Source`` and ``Sink`` protocols."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from flexd.core.arrays import Int32Array, Int64Array, RowArray

_log = logging.getLogger(__name__)


Positions = dict[str, int]
"""Partition -> offset of the next message to read."""

OnPositionLost = Literal["earliest", "latest", "fail"]
"""Policy of a source for a position that the log no longer holds; ``fail`` raises PositionLostError."""


@dataclass(frozen=True, eq=False)
class AccessBatch:
    """Rows of one table that one rank looked up, in the order of the look-ups.

    Attributes:
        table: name of the table.
        rows: int32[n] or int64[n] row ids; may be read-only and may share memory with the message it came from.
        source_rank: rank whose training samples made the accesses.
        event_time_seconds: time of the accesses, Unix seconds (or any clock common to the stream that starts at 0).
        sequence_lengths: int32[s] or None: lengths of the sequences of s samples that ``rows`` consists of; sums to n.
        step: number of the forward pass, equal on all ranks and below 2^62; None if unknown.
        sample_ids: int64[s] or None: sequences of several tables with the same id are of one training sample. Without
            ids, those at the same place of a rank's batches with the same step number are.
        user_ids: int64[s] or None: whose samples they are.

    A batch of unchecked arrays is checked with ``flexd.stream.codec.check``.
    """

    table: str
    rows: RowArray
    source_rank: int
    event_time_seconds: float
    sequence_lengths: Int32Array | None = None
    step: int | None = None
    sample_ids: Int64Array | None = None
    user_ids: Int64Array | None = None


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One undecoded message. Offsets of a partition increase, not necessarily by one.

    Attributes:
        appended_seconds: Unix time at which the broker appended it; None if the log has no such time.
    """

    partition: str
    offset: int
    payload: bytes | memoryview
    appended_seconds: float | None = None

    @property
    def last_offset(self) -> int:
        return self.offset


REFUSAL_REASONS = (
    "batch_too_large",
    "batch_too_many_records",
    "corrupt_batch",
    "poison_offset",
    "unsupported_codec",
)
"""Reasons for which a source refuses messages before they can be decoded."""


@dataclass(frozen=True, slots=True)
class RefusedMessages:
    """Messages that a source has passed over, because they cannot be read within its bounds.

    Attributes:
        offset, last_offset: the range, both inclusive.
        reason: one of ``REFUSAL_REASONS``.
        detail: for the dead letters.
        payload: the first bytes, for the dead letters.
        size_bytes: size of the messages as they were stored.
    """

    partition: str
    offset: int
    last_offset: int
    reason: str
    detail: str
    payload: bytes
    size_bytes: int

    @property
    def messages(self) -> int:
        """Offsets in the range: what the partition loses at most."""
        return self.last_offset - self.offset + 1


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
        self.messages: Counter[str] = Counter()
        self.positions: Counter[str] = Counter()
        for part in parts:
            self.messages += part.messages
            self.positions += part.positions

    def add(self, partition: str, first_offset: int, next_offset: int, reason: str) -> None:
        """Add the messages from ``first_offset`` to before ``next_offset``; nothing if there are none."""
        if next_offset > first_offset:
            # A new mapping each time: another thread may be reading the one before.
            self.messages = self.messages + Counter({reason: next_offset - first_offset})
            _log.warning("messages lost (%s): %s, offsets %d to %d", reason, partition, first_offset, next_offset - 1)

    def add_position(self, reason: str) -> None:
        """Add a position that the log no longer has. Its messages are added apart, once they are known."""
        self.positions = self.positions + Counter({reason: 1})


@runtime_checkable
class Source(Protocol):
    """A stream that the daemon reads. Belongs to one thread; ``problem`` and the counters may be read from any.

    A source delivers every message of a partition in offset order and exactly once, from the restored position on. It
    stores nothing itself: the caller saves ``positions`` and restores them after a restart.

    Sources inherit the answers of one that reads all, loses nothing and has nowhere to commit to.
    """

    @property
    def problem(self) -> str | None:
        """Current reason why messages do not arrive (unreachable broker, corrupt record, failed commit), or None."""
        return None

    @property
    def read_share(self) -> float:
        """Share of the stream that is read; 1 for all of it (any thread)."""
        return 1.0

    def losses(self) -> Losses:
        """Return the messages known to have existed that could not be delivered, and lost positions (any thread)."""
        return Losses()

    def poll(self, timeout_seconds: float) -> Sequence[StreamMessage | RefusedMessages]:
        """Wait up to the deadline for at least one message; the result is bounded in messages and bytes.

        What the source refuses to read is in the result too, in the place of its messages.

        A temporary outage is no error: the call returns an empty list and sets ``problem``, and later calls retry.

        Raises:
            PositionLostError: the log no longer holds the position and the policy is ``fail``.
            StreamError: the source cannot be used at all.
        """

    def restore(self, positions: Mapping[str, int]) -> None:
        """Continue from these positions; partitions not named start at their earliest message."""

    def positions(self) -> Positions:
        """Return the restored positions, moved past every message that ``poll`` has returned."""

    def lag(self) -> int:
        """Return the number of messages known to exist that were not returned yet."""

    def commit(self, positions: Mapping[str, int]) -> str | None:
        """Report saved positions to the broker, for its lag displays only; return None or the error."""
        return None

    def close(self) -> None:
        """Release files and connections within a bounded time. Further calls do nothing."""


@runtime_checkable
class Sink(Protocol):
    """A stream that a publisher writes. Belongs to one thread."""

    @property
    def messages_failed(self) -> int:
        """Messages that ``send`` accepted and that could not be delivered afterwards."""

    def send(self, payload: bytes) -> None:
        """Accept one message; return within a bounded time, before the message is necessarily durable.

        Raises:
            StreamError: the message was not accepted.
        """

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all messages have left this process.

        Raises:
            StreamError: some did not within the deadline.
        """

    def close(self) -> None:
        """Flush within a bounded time and release files and connections. Further calls do nothing."""
