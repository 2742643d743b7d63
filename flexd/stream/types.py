"""What travels in the stream and who reads and writes it: batches, messages, positions, Source and Sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from flexd.core.errors import StreamError

Int32Array = npt.NDArray[np.int32]
RowArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]

Positions = dict[str, int]
"""Partition -> offset of the next message to read."""


@dataclass(frozen=True, eq=False)
class AccessBatch:
    """The rows of one table that one rank looked up, in the order of the look-ups.

    Attributes:
        table: name of the table.
        rows: int32[n] or int64[n] row ids; may be read-only and may share memory with the message it came from.
        source_rank: rank whose training samples made the accesses.
        event_time_seconds: when they were made, Unix seconds (or any clock common to the stream that starts at 0).
        sequence_lengths: int32[s] or None: how ``rows`` splits into the sequences of s samples; sums to n.

    Raises:
        StreamError: an array is of another dtype or shape, or the lengths do not sum to n.
    """

    table: str
    rows: RowArray
    source_rank: int
    event_time_seconds: float
    sequence_lengths: Int32Array | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 1 or self.rows.dtype not in (np.int32, np.int64):
            raise StreamError(
                f"accesses of table {self.table!r}: rows are {self.rows.dtype}{list(self.rows.shape)}",
                remedy="give a one-dimensional int32 or int64 array",
            )
        lengths = self.sequence_lengths
        if lengths is None:
            return
        if lengths.ndim != 1 or lengths.dtype != np.int32:
            raise StreamError(
                f"accesses of table {self.table!r}: sequence lengths are {lengths.dtype}{list(lengths.shape)}",
                remedy="give a one-dimensional int32 array",
            )
        if (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum(dtype=np.int64)) != len(self.rows):
            raise StreamError(
                f"accesses of table {self.table!r}: sequence lengths do not sum to the {len(self.rows)} rows",
                remedy="give one non-negative length a sample",
            )


@dataclass(frozen=True)
class Message:
    """One undecoded message. Offsets of a partition increase, not necessarily by one."""

    partition: str
    offset: int
    payload: bytes | memoryview


@runtime_checkable
class Source(Protocol):
    """Where the daemon reads from. Belongs to one thread; ``problem`` and the counters may be read from any.

    A source delivers every message of a partition in offset order and exactly once, counted from the restored
    position. What survives a restart is what the caller saved of ``positions``; a source keeps nothing itself.
    """

    @property
    def problem(self) -> str | None:
        """What keeps messages from arriving right now (unreachable broker, corrupt record, failed commit), or None."""

    @property
    def messages_lost(self) -> int:
        """Messages known to have existed between positions that could not be delivered (dropped or corrupt)."""

    def poll(self, timeout_seconds: float) -> list[Message]:
        """Waits up to the deadline for at least one message; bounded in messages and bytes.

        An outage that may end is no error: it returns an empty list, sets ``problem`` and tries again on later calls.

        Raises:
            PositionLostError: the log no longer holds the position and the policy is ``fail``.
            StreamError: the source cannot be used at all.
        """

    def restore(self, positions: Mapping[str, int]) -> None:
        """Continues from these positions; partitions not named start at their earliest message."""

    def positions(self) -> Positions:
        """The restored positions, moved past every message that ``poll`` has returned."""

    def lag(self) -> int:
        """Messages that exist but were not returned yet, as far as is known."""

    def commit(self, positions: Mapping[str, int]) -> str | None:
        """Tells the broker what is safely saved (for its own lag displays; never read back). None, or what failed."""

    def close(self) -> None:
        """Releases files and connections within a bounded time. Further calls do nothing."""


@runtime_checkable
class Sink(Protocol):
    """Where a publisher writes to. Belongs to one thread."""

    @property
    def messages_failed(self) -> int:
        """Messages that ``send`` took and that could not be delivered afterwards."""

    def send(self, payload: bytes) -> None:
        """Hands one message over; returns within a bounded time, before it is necessarily durable.

        Raises:
            StreamError: the message was not taken.
        """

    def flush(self, timeout_seconds: float) -> None:
        """Waits until all that was sent has left this process.

        Raises:
            StreamError: it did not within the deadline.
        """

    def close(self) -> None:
        """Flushes within a bounded time and releases files and connections. Further calls do nothing."""
