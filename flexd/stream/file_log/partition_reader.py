"""Read one partition of a file log across segments, bad records and lost positions."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from flexd.core.arrays import UInt8Array
from flexd.stream.file_log import segments
from flexd.stream.types import Losses, StreamMessage

_log = logging.getLogger(__name__)


class PartitionReader:
    """Read one partition: tracks the open segment, the byte position in it and the next offset.

    Args:
        offset: of the first message to read; None for the earliest.
        buffers: shared by the readers of a source.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        offset: int | None,
        buffers: BufferPool,
    ) -> None:
        self._directory = directory
        self._name = name
        self._buffers = buffers
        self._from_earliest = offset is None
        self.next_offset = offset or 0
        self.losses = Losses()
        self.problem: str | None = None
        self._fd = -1
        self._base = 0
        self._position = 0
        self._segment_end = 0
        """Offset after the last record seen in this segment."""
        self._reached = offset is None
        """True once the log is known to have held everything before ``next_offset``."""
        self._search_from: int | None = None
        """After a corrupt header: the byte position from which to search for an intact record."""
        self._end = (-1, 0, 0)
        """Newest segment: base offset, offset after the last header walked, position after its record."""

    def read(self, max_bytes: int, max_messages: int) -> list[StreamMessage]:
        """Return the next messages, none if there are none yet."""
        if max_messages <= 0:
            return []
        try:
            return self._read(max_bytes, max_messages)
        except OSError as error:
            self.problem = f"file log {self._directory}: {error.strerror or error}"
            return []

    def lag(self) -> int:
        """Count the messages between the position and the end of the newest segment. Each header is walked once."""
        try:
            bases = segments.base_offsets(self._directory)
            if not bases:
                return 0
            return max(0, self._end_offset(bases[-1]) - (bases[0] if self._from_earliest else self.next_offset))
        except OSError:
            return 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, max_bytes: int, max_messages: int) -> list[StreamMessage]:
        if self._fd < 0 and not self._open():
            return []
        while True:
            messages, progressed = self._read_records(max_bytes, max_messages)
            if messages:
                self.problem = None
                return messages
            if not progressed and not self._advance():
                return []

    def _open(self) -> bool:
        """Open the segment that holds ``next_offset``. Return False if the partition is empty."""
        bases = segments.base_offsets(self._directory)
        if not bases:
            return False
        if self._from_earliest:
            self.next_offset = bases[0]
            self._from_earliest = False
        elif self.next_offset < bases[0]:
            self._lose_position(f"the log now starts at {bases[0]}", bases)
        self._open_segment(max(base for base in bases if base <= self.next_offset))
        return True

    def _open_segment(self, base: int) -> None:
        fd = os.open(segments.segment_path(self._directory, base), os.O_RDONLY | os.O_CLOEXEC)
        self.close()
        self._fd = fd
        self._base = base
        self._position = 0
        self._segment_end = base
        self._search_from = None

    def _read_records(self, max_bytes: int, max_messages: int) -> tuple[list[StreamMessage], bool]:
        """Read the open segment once. Return (messages, True if the position moved)."""
        if self._search_from is not None and not self._resynchronise():
            return [], False
        view = self._pread(max(max_bytes, segments.HEADER_BYTES))
        messages: list[StreamMessage] = []
        at = 0
        while at + segments.HEADER_BYTES <= len(view) and len(messages) < max_messages:
            header = segments.read_header(view, at)
            if header is None:
                self._search_from = self._position + at
                break
            payload_bytes, offset, payload_crc = header
            start = at + segments.HEADER_BYTES
            end = at + segments.record_bytes(payload_bytes)
            if end > len(view):
                if at > 0:
                    break
                view = self._pread(end)
                if end > len(view):
                    break
            if offset >= self.next_offset:
                payload = view[start : start + payload_bytes]
                # A jump of the offset means that the records in between were skipped as corrupt.
                self.losses.add(self._name, self.next_offset, offset, "corrupt")
                if segments.payload_is_intact(payload, payload_crc):
                    messages.append(StreamMessage(self._name, offset, payload))
                else:
                    self.losses.add(self._name, offset, offset + 1, "corrupt")
                self.next_offset = offset + 1
            self._segment_end = offset + 1
            self._reached = self._reached or self._segment_end >= self.next_offset
            at = end
        self._position += at
        return messages, at > 0 or (self._search_from is not None and self._resynchronise())

    def _pread(self, size_bytes: int) -> memoryview:
        """Read from the position on; the read-only view is shorter at the end of the file."""
        # Not more than the file holds: at the end of a slowly growing log the buffer would be mostly empty.
        available_bytes = max(os.fstat(self._fd).st_size - self._position, 0)
        buffer = self._buffers.acquire(min(size_bytes, available_bytes))
        return buffer[: os.preadv(self._fd, [buffer], self._position)].toreadonly()

    def _resynchronise(self) -> bool:
        """Move to the next intact record after a corrupt header. Return False while there is none."""
        start = self._position if self._search_from is None else self._search_from
        self._search_from, found = segments.find_record(self._fd, start, self.next_offset)
        if found is None:
            return False
        self._position = found
        self._search_from = None
        return True

    def _advance(self) -> bool:
        """Move to the next segment at the end of this one. Return False if there is nothing more to read yet."""
        bases = segments.base_offsets(self._directory)
        newer = [base for base in bases if base > self._base]
        if newer:
            # The writer may have completed this segment between the read and the listing.
            if os.fstat(self._fd).st_size > self._position and self._has_next_record():
                return True
            if newer[0] > self.next_offset:
                self._skip_to(newer[0], bases)
            self._open_segment(max(base for base in bases if base <= self.next_offset))
            return True
        if bases and not self._is_current(bases):
            self._lose_position("the log was created anew", bases)
            self._open_segment(max(base for base in bases if base <= self.next_offset))
            return True
        if bases and not self._reached and self._segment_end < self.next_offset and self._search_from is None:
            self._lose_position(f"the log now ends at {self._segment_end}", bases)
            self._open_segment(max(base for base in bases if base <= self.next_offset))
            return True
        if self._search_from is not None:
            path = segments.segment_path(self._directory, self._base)
            self.problem = f"{path}: corrupt or unfinished record at byte {self._position}"
        return False

    def _has_next_record(self) -> bool:
        """Return whether an intact record starts at the position; called after a newer segment was seen."""
        if self._search_from is not None:
            return self._resynchronise()
        data = os.pread(self._fd, segments.HEADER_BYTES, self._position)
        header = segments.read_header(data, 0) if len(data) == segments.HEADER_BYTES else None
        return header is not None and self._position + segments.record_bytes(header[0]) <= os.fstat(self._fd).st_size

    def _skip_to(self, base: int, bases: list[int]) -> None:
        """Move to a segment beyond the next offset: one in between was deleted, or this one has a corrupt end."""
        if self._base in bases:
            self.losses.add(self._name, self.next_offset, base, "corrupt")
            self.next_offset = base
        else:
            self._lose_position(f"the log now starts at {bases[0]}", bases)

    def _is_current(self, bases: list[int]) -> bool:
        if self._base not in bases:
            return False
        there = segments.segment_path(self._directory, self._base).stat()
        return os.fstat(self._fd).st_ino == there.st_ino and there.st_size >= self._position

    def _lose_position(self, cause: str, bases: list[int]) -> None:
        """Move ``next_offset`` to the earliest message."""
        lost = f"file log partition {self._directory}: position {self.next_offset} is lost: {cause}"
        self._reached = True
        target = bases[0]
        reason = "retention" if bases[0] > self.next_offset else "truncated"
        self.losses.add_position(reason)
        self.losses.add(self._name, self.next_offset, target, reason)
        _log.warning("%s; continuing at the earliest message, %d", lost, target)
        self.next_offset = target

    def _end_offset(self, newest_base: int) -> int:
        base, offset, position = self._end
        if base != newest_base:
            base, offset, position = newest_base, newest_base, 0
        fd = os.open(segments.segment_path(self._directory, base), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < position:
                offset, position = base, 0
            offset, position = segments.end_of_segment(fd, offset, position)
        finally:
            os.close(fd)
        self._end = (base, offset, position)
        return offset


class BufferPool:
    """Provide buffers for reads. Fresh memory for each would cost a page fault every 4 KiB, more than the read itself.

    A buffer is free again when the last view of it is gone, including views of views: its bytes stay valid for as long
    as any view exists. If no buffer is free, memory is allocated that the pool does not keep.

    Args:
        kept: number of buffers that the pool keeps.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._buffers: list[tuple[UInt8Array, weakref.ref[Any]]] = []

    def acquire(self, size_bytes: int) -> memoryview:
        """Return a writable view of ``size_bytes`` bytes of arbitrary content."""
        free = [i for i, (_, window) in enumerate(self._buffers) if window() is None]
        fitting = [i for i in free if self._buffers[i][0].nbytes >= size_bytes]
        memory = self._buffers[fitting[0]][0] if fitting else np.empty(size_bytes, dtype=np.uint8)
        # Views refer to this array object, and through it to the memory; nothing else does.
        window = memory[:size_bytes]
        entry = (memory, weakref.ref(window))
        if fitting:
            self._buffers[fitting[0]] = entry
        elif free:
            self._buffers[free[0]] = entry
        elif len(self._buffers) < self._kept:
            self._buffers.append(entry)
        return window.data
