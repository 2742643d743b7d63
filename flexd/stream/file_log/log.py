"""Source and sink of the file log: append-only segment files with offsets, one directory a partition."""

import fcntl
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from flexd.core.errors import StreamError
from flexd.core.supervision import Backoff
from flexd.stream.file_log import segments
from flexd.stream.file_log.segments import BufferPool, PartitionReader
from flexd.stream.types import Losses, Positions, Source, StreamMessage

_log = logging.getLogger(__name__)


class FileLogSink:
    """Append to one partition. One writer a partition, enforced with a file lock.

    Records are buffered and written when the buffer holds ``flush_bytes``, when the oldest has waited ``flush_seconds``
    (checked on every ``send``) or on ``flush``. Written records survive a crash of the process. A new writer starts a
    new segment after the last intact record, so it never continues a record that another writer left unfinished.

    Args:
        directory: the log; created if missing.
        partition: letters, digits, dot, dash, underscore.
        segment_bytes: size after which a new segment starts.

    Attributes:
        next_offset: of the next message.

    Raises:
        StreamError: the name is invalid, another writer has the partition, or the directory cannot be written.
    """

    # An accepted message stays buffered until it is written.
    messages_failed = 0

    def __init__(
        self,
        directory: Path,
        partition: str,
        *,
        segment_bytes: int = 64 * 2**20,
        flush_bytes: int = 256 * 2**10,
        flush_seconds: float = 0.05,
    ) -> None:
        if not segments.is_partition_name(partition):
            raise StreamError(
                f"file log {directory}: partition name {partition!r}",
                remedy="use at most 128 letters, digits, dots, dashes and underscores",
            )
        self._directory = Path(directory) / partition
        self._segment_bytes = segment_bytes
        self._flush_bytes = flush_bytes
        self._flush_seconds = flush_seconds
        self._buffer = bytearray()
        self._buffered_since = 0.0
        self._written_bytes = 0
        self._fd = -1
        self._closed = False
        self._lock_fd = -1
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._lock()
            self.next_offset = self._recover()
            self._begin_segment()
        except OSError as error:
            raise StreamError(
                f"file log {self._directory}: cannot be written: {error}", remedy="check the path, its owner and space"
            ) from error
        finally:
            if self._fd < 0:
                self._release()

    def send(self, payload: bytes) -> None:
        """Append one message. See ``Sink``. While the disk is full, this raises and accepts nothing."""
        if self._closed:
            raise StreamError(f"file log {self._directory}: the writer is closed")
        if len(payload) > segments.MAX_RECORD_BYTES:
            raise StreamError(
                f"file log {self._directory}: message of {len(payload)} bytes",
                remedy=f"send at most {segments.MAX_RECORD_BYTES}",
            )
        now = time.monotonic()
        if len(self._buffer) >= self._flush_bytes:
            self._write()
        if not self._buffer:
            self._buffered_since = now
        for piece in segments.frame(self.next_offset, payload):
            self._buffer += piece
        self.next_offset += 1
        if len(self._buffer) >= self._flush_bytes or now - self._buffered_since >= self._flush_seconds:
            # The message is accepted already: if the disk is full, the next send raises.
            try:
                self._write()
            except StreamError as error:
                _log.warning("%s", error)

    def flush(self, timeout_seconds: float = 0.0) -> None:
        """Write the buffer. The deadline is not used: local files have none."""
        self._write()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._write()
        finally:
            self._release()

    def _lock(self) -> int:
        fd = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise StreamError(
                f"file log {self._directory}: another process writes this partition",
                remedy="give each writer its own partition",
            ) from error
        return fd

    def _recover(self) -> int:
        bases = segments.base_offsets(self._directory)
        if not bases:
            return 0
        with segments.segment_path(self._directory, bases[-1]).open("rb") as file:
            return segments.last_offset_after(file.fileno(), bases[-1])

    def _begin_segment(self) -> None:
        # Open the segment that starts at ``next_offset``. The buffer must be empty.
        # An existing segment of that name has no complete record, so no reader has read from it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(segments.segment_path(self._directory, self.next_offset), flags, 0o644)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._written_bytes = 0

    def _write(self) -> None:
        # Write the buffer; on failure keep exactly the bytes that were not written.
        if not self._buffer:
            return
        try:
            while self._buffer:
                written = os.write(self._fd, self._buffer)
                del self._buffer[:written]
                self._written_bytes += written
            if self._written_bytes >= self._segment_bytes:
                self._begin_segment()
        except OSError as error:
            raise StreamError(
                f"file log {self._directory}: cannot be written: {error}",
                remedy="free some space; sending continues then",
            ) from error

    def _release(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1


class FileLogSource(Source):
    """Read all partitions of a file log while they are written. See ``Source`` for the contract.

    Bad records: an incomplete one at the end of the newest segment is still being written. At the end of an older
    segment it was never completed and its offset is used again, so nothing is lost. A corrupt record anywhere else is
    skipped: the reader searches for the next intact header, and counts the offsets in between in ``losses``.

    If the log no longer holds the position (its segments were deleted, or the log is shorter than it was), it continues
    at the earliest message, and counts the position as lost.

    Args:
        directory: the log; it and its partitions may be created later.
        max_poll_bytes: maximum size of the records of a poll; a larger record is returned alone.
        discovery_seconds: time between scans for new partitions.

    Raises:
        StreamError: ``directory`` is a file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_poll_bytes: int = 2 * 2**20,
        max_poll_messages: int = 4096,
        discovery_seconds: float = 0.5,
    ) -> None:
        self._directory = Path(directory)
        if self._directory.exists() and not self._directory.is_dir():
            raise StreamError(f"file log {directory}: not a directory", remedy="give the directory of the log")
        self._max_poll_bytes = max_poll_bytes
        self._max_poll_messages = max_poll_messages
        self._discovery_seconds = discovery_seconds
        self._next_discovery = 0.0
        self._buffers = BufferPool(4)
        self._restored: Positions = {}
        self._readers: dict[str, PartitionReader] = {}
        self._turn = 0
        # Shortest and longest wait between two reads of a log without new messages; each wait doubles the one before.
        self._pauses = Backoff(0.001, 0.05)
        self._problem: str | None = None
        self._closed = False

    @property
    def problem(self) -> str | None:
        return self._problem or next((r.problem for r in self._readers.values() if r.problem is not None), None)

    def losses(self) -> Losses:
        return Losses(reader.losses for reader in list(self._readers.values()))

    def poll(self, timeout_seconds: float) -> list[StreamMessage]:
        if self._closed:
            raise StreamError(f"file log {self._directory}: the source is closed")
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._discover()
            messages = self._read()
            if messages:
                self._pauses.reset()
                return messages
            left = deadline - time.monotonic()
            if left <= 0:
                return messages
            time.sleep(min(self._pauses.seconds(), left))

    def restore(self, positions: Mapping[str, int]) -> None:
        self._restored = dict(positions)
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._next_discovery = 0.0

    def positions(self) -> Positions:
        known = {name: reader.next_offset for name, reader in self._readers.items() if not reader.from_earliest}
        return {**self._restored, **known}

    def lag(self) -> int:
        self._discover()
        return sum(reader.lag() for reader in self._readers.values())

    def close(self) -> None:
        self._closed = True
        for reader in self._readers.values():
            reader.close()

    def _discover(self) -> None:
        now = time.monotonic()
        if now < self._next_discovery:
            return
        self._next_discovery = now + self._discovery_seconds
        try:
            with os.scandir(self._directory) as entries:
                names = sorted(e.name for e in entries if segments.is_partition_name(e.name) and e.is_dir())
            self._problem = None
        except OSError as error:
            self._problem = f"file log {self._directory}: {error.strerror or error}"
            return
        for name in names:
            if name not in self._readers:
                offset = self._restored.get(name)
                self._readers[name] = PartitionReader(self._directory / name, name, offset, self._buffers)

    def _read(self) -> list[StreamMessage]:
        readers = list(self._readers.values())
        messages: list[StreamMessage] = []
        bytes_left = self._max_poll_bytes
        self._turn += 1
        for i in range(len(readers)):
            reader = readers[(self._turn + i) % len(readers)]
            # Every partition gets a share, so that one long backlog does not starve the others.
            share = max(bytes_left // (len(readers) - i), 2**16)
            part = reader.read(share, self._max_poll_messages - len(messages))
            messages += part
            bytes_left -= sum(len(m.payload) for m in part)
            if bytes_left <= 0 or len(messages) >= self._max_poll_messages:
                break
        return messages
