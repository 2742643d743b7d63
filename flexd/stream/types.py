"""Types of the stream: access batches, messages, positions, and the ``Source`` and ``Sink`` protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from flexd.core.errors import StreamError
from flexd.stream.losses import Losses

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
RowArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_ROW_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))

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

    Raises:
        StreamError: an array is of another dtype or shape, the lengths do not sum to n, there are ids without lengths,
            or the step is out of range.
    """

    table: str
    rows: RowArray
    source_rank: int
    event_time_seconds: float
    sequence_lengths: Int32Array | None = None
    step: int | None = None
    sample_ids: Int64Array | None = None
    user_ids: Int64Array | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 1 or self.rows.dtype not in _ROW_DTYPES:
            raise StreamError(
                f"accesses of table {self.table!r}: rows are {self.rows.dtype}{list(self.rows.shape)}",
                remedy="give a one-dimensional int32 or int64 array",
            )
        if self.step is not None and not 0 <= self.step < 2**62:
            raise StreamError(
                f"accesses of table {self.table!r}: step {self.step}", remedy="give a number from 0 to 2^62 - 1"
            )
        lengths = self.sequence_lengths
        for name, ids in (("sample_ids", self.sample_ids), ("user_ids", self.user_ids)):
            if ids is not None and (lengths is None or ids.dtype != np.int64 or ids.shape != lengths.shape):
                raise StreamError(
                    f"accesses of table {self.table!r}: {name} are {ids.dtype}{list(ids.shape)}",
                    remedy="give sequence lengths, and one int64 id for each",
                )
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
                remedy="give one non-negative length per sample",
            )


@dataclass(frozen=True, slots=True)
class Message:
    """One undecoded message. Offsets of a partition increase, not necessarily by one.

    Attributes:
        appended_seconds: Unix time at which the broker appended it; None if the log has no such time.
    """

    partition: str
    offset: int
    payload: bytes | memoryview
    appended_seconds: float | None = None


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


@runtime_checkable
class Source(Protocol):
    """A stream that the daemon reads. Belongs to one thread; ``problem`` and the counters may be read from any.

    A source delivers every message of a partition in offset order and exactly once, from the restored position on. It
    stores nothing itself: the caller saves ``positions`` and restores them after a restart.
    """

    @property
    def problem(self) -> str | None:
        """Current reason why messages do not arrive (unreachable broker, corrupt record, failed commit), or None."""

    @property
    def read_share(self) -> float:
        """Share of the stream that is read; 1 for all of it (any thread)."""

    def losses(self) -> Losses:
        """Return the messages known to have existed that could not be delivered, and lost positions (any thread)."""

    def poll(self, timeout_seconds: float) -> Sequence[Message | RefusedMessages]:
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
