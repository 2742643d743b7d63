"""Types of the stream: access batches, messages, positions, losses, and the ``Source`` and ``Sink`` protocols; and the
offsets in work, of which those at which the daemon died twice are skipped: a message that kills its reader must not
stop its partition for ever."""

from __future__ import annotations

import logging
import mmap
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from flexd.core.arrays import Int32Array, Int64Array, RowArray

_log = logging.getLogger(__name__)


# Partition -> offset of the next message to read. A name with an at sign is the log's own id, with 0.
Positions = dict[str, int]


@dataclass(frozen=True, eq=False)
class AccessBatch:
    """Rows of one table that one rank looked up, in the order of the look-ups.

    Attributes:
        table: name of the table.
        rows: int32[n] or int64[n] row ids; may be read-only and may share memory with the message it came from.
        source_rank: rank whose training samples made the accesses; -1, in no message of flexd's columns, if unknown.
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
        timestamp_seconds: Unix time that the message has itself, given by its producer or the broker; None without.
    """

    partition: str
    offset: int
    payload: bytes | memoryview
    appended_seconds: float | None = None
    timestamp_seconds: float | None = None

    @property
    def last_offset(self) -> int:
        return self.offset


class Decoder(Protocol):
    """Collects the accesses of messages, and returns those of several messages together. Belongs to one thread.

    Attributes:
        unread: values of events that could not be read, by reason (of ``codec.REASONS``) and path (any thread).
        filtered: events that are not wanted (any thread).
    """

    unread: Mapping[tuple[str, str], int]
    filtered: int

    def add(self, message: StreamMessage, arrival_seconds: float) -> None:
        """Collect the accesses of one message.

        Raises:
            CodecError: nothing of it could be read; nothing was collected.
        """

    def drain(self) -> list[AccessBatch]:
        """Return what was collected since the last call, as few batches as there are tables and seconds."""


# Reasons for which a source refuses messages before they can be decoded.
# ``tombstone``: a message without a value is passed over, and is no fault.
TOMBSTONE = "tombstone"
REFUSAL_REASONS = (
    "batch_too_large",
    "batch_too_many_records",
    "corrupt_batch",
    "poison_offset",
    "unsupported_codec",
)


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


# Of messages. ``corrupt``: damaged in a file log. ``not_kept``: a tap's rank has counts no more that an older snapshot
# lacks. ``retention``: deleted before they were read. ``truncated``: the log ended before the position.
LOSS_REASONS = ("corrupt", "not_kept", "retention", "truncated")
# Of positions. ``out_of_range``: a broker no longer has it. ``recreated``: they were those of a topic of the same name.
POSITION_REASONS = ("out_of_range", "recreated", "retention", "truncated")


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

    Attributes:
        read_share: share of the stream that is read; 1 for all of it (any thread).
        missing_partitions: partitions that go to another reader of the consumer group, each with the Unix time since
            when (any thread).
    """

    read_share: float = 1.0
    missing_partitions: Mapping[str, float] = MappingProxyType({})

    @property
    def problem(self) -> str | None:
        """Current reason why messages do not arrive (unreachable broker, corrupt record, failed commit), or None."""
        return None

    def losses(self) -> Losses:
        """Return the messages known to have existed that could not be delivered, and lost positions (any thread)."""
        return Losses()

    def poll(self, timeout_seconds: float) -> Sequence[StreamMessage | RefusedMessages]:
        """Wait up to the deadline for at least one message; the result is bounded in messages and bytes.

        What the source refuses to read is in the result too, in the place of its messages.

        A temporary outage is no error: the call returns an empty list and sets ``problem``, and later calls retry.

        Raises:
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


DEATHS_UNTIL_SKIPPED = 2
FILE_NAME = "poison-offsets.txt"
_LINE_BYTES, _LONGEST_BYTES, _MAX_RECORDED = 512, 480, 64
# A recorded offset may belong to another message after the topic was deleted and created again.
_FORGET_SECONDS = 7 * 86400.0


class OffsetsInWork:
    """The range of offsets that is being read or counted now, and those at which processes died, in a file.

    ``begin`` writes the range into a page of shared memory (no system call); the kernel keeps the page when the process
    is killed, also for lack of memory. A process that finds a range begun and not ended knows that its predecessor died
    there. A death is forgotten when the same range is passed alive. A crash of the whole machine leaves no reliable
    mark, and messages do not cause one.

    Ranges are compared as a whole: a batch by its first and last offset, a message by its own. Reading a batch and
    counting a message of the same offset are different work, so that success of one does not hide a death in the other.

    The file is text. The range in work is in the first ``_LINE_BYTES``: its first byte is written last, and is 0 while
    there is none. A line of "deaths seconds range" follows for each range at which there was a death.

    ``begin`` and ``end`` belong to one thread.

    Args:
        directory: of the file; None keeps and skips nothing. An unwritable one is logged and treated so.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._page: mmap.mmap | None = None
        # By range: deaths in a row, and the time of the newest.
        self._deaths: dict[str, tuple[int, float]] = {}
        self._current = ""
        if directory is None:
            return
        try:
            self._page = _open_page(directory / FILE_NAME)
        except OSError as error:
            _log.warning("offsets in work cannot be recorded in %s: %s", directory, error)
            return
        for line in self._page[_LINE_BYTES:].decode(errors="replace").split("\n"):
            if recorded := re.fullmatch(r"([0-9]{1,9}) ([0-9]{1,12}) (.+)", line):
                deaths, seconds, name = recorded.groups()
                if int(seconds) >= time.time() - _FORGET_SECONDS:
                    self._deaths[name] = int(deaths), int(seconds)
        if self._page[0]:
            died_at = self._page[:_LINE_BYTES].split(b"\n")[0]
            self._page[0] = 0
            self._add_death(died_at.decode(errors="replace"))

    def begin(self, partition: str, first: int, last: int, *, counting: bool = False) -> bool:
        """Record that a range is read or counted from now on. Return False if it must be skipped instead."""
        if self._page is None:
            return True
        # Clear until the next range is written whole: a range that is half written is none, nor is a skipped one.
        self._page[0] = 0
        self._forget_current()
        name = f"{partition} {first} {last} {'counted' if counting else 'read'}"
        if self._deaths and self._deaths.get(name, (0, 0))[0] >= DEATHS_UNTIL_SKIPPED:
            return False
        text = f"{name}\n".encode()
        if len(text) <= _LONGEST_BYTES:
            self._page[1 : len(text)] = text[1:]
            self._page[0] = text[0]
        self._current = name
        return True

    def end(self) -> None:
        """Record that nothing is in work."""
        if self._page is not None:
            self._page[0] = 0
            self._forget_current()

    def close(self) -> None:
        """End, and release the file."""
        self.end()
        if self._page is not None:
            self._page.close()
            self._page = None

    def _forget_current(self) -> None:
        # What was in work is passed alive now.
        if self._current in self._deaths:
            del self._deaths[self._current]
            self._save()

    def _add_death(self, name: str) -> None:
        deaths = self._deaths.pop(name, (0, 0))[0] + 1
        self._deaths[name] = deaths, time.time()
        skipped = ": they are skipped" if deaths >= DEATHS_UNTIL_SKIPPED else ""
        _log.warning("the last process died at offsets %s, %d times in a row%s", name, deaths, skipped)
        self._save()

    def _save(self) -> None:
        newest = list(self._deaths.items())[-_MAX_RECORDED:]
        text = "".join(f"{deaths} {seconds:.0f} {name}\n" for name, (deaths, seconds) in newest).encode()
        if self._page is not None:
            room = len(self._page) - _LINE_BYTES
            self._page[_LINE_BYTES:] = text[:room].ljust(room, b"\0")


def _open_page(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    size = _LINE_BYTES * (1 + _MAX_RECORDED)
    try:
        # Space is reserved now: a write to a page of a full disk would end the process.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
