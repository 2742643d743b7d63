"""Follows one partition of a file log: which segment, where in it, and what to do when records are bad or gone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flexd.core.errors import PositionLostError
from flexd.stream.buffers import ReusedBuffers
from flexd.stream.file_log import segments
from flexd.stream.types import Message, OnPositionLost

_log = logging.getLogger(__name__)


class PartitionReader:
    """Follows one partition: which segment, where in it, which offset comes next.

    Args:
        offset: where to start; None for the earliest message.
        buffers: shared by the readers of a source.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        offset: int | None,
        on_position_lost: OnPositionLost,
        buffers: ReusedBuffers | None = None,
    ) -> None:
        self._directory = directory
        self._name = name
        self._on_position_lost = on_position_lost
        self._buffers = buffers or ReusedBuffers(1)
        self._anywhere = offset is None
        self.next_offset = offset or 0
        self.messages_lost = 0
        self.positions_lost = 0
        self.problem: str | None = None
        self._fd = -1
        self._base = 0
        self._position = 0
        self._segment_end = 0
        """Offset after the last record seen in this segment."""
        self._reached = offset is None
        """Whether the log is known to have held everything before ``next_offset``."""
        self._searched_to: int | None = None
        """After a corrupt header: from here on an intact record is looked for."""
        self._end = (-1, 0, 0)
        """Of the newest segment: base, offset after the last header walked, position after it."""

    def read(self, max_bytes: int, max_messages: int) -> list[Message]:
        """Next messages, none if there are none yet. Raises PositionLostError under the policy ``fail``."""
        if max_messages <= 0:
            return []
        try:
            return self._read(max_bytes, max_messages)
        except OSError as error:
            self.problem = f"file log {self._directory}: {error.strerror or error}"
            return []

    def lag(self) -> int:
        """Messages between the position and the end of the newest segment (headers are walked, once)."""
        try:
            bases = segments.base_offsets(self._directory)
            if not bases:
                return 0
            return max(0, self._end_offset(bases[-1]) - (bases[0] if self._anywhere else self.next_offset))
        except OSError:
            return 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, max_bytes: int, max_messages: int) -> list[Message]:
        if self._fd < 0 and not self._open():
            return []
        while True:
            messages, progressed = self._take(max_bytes, max_messages)
            if messages:
                self.problem = None
                return messages
            if not progressed and not self._advance():
                return []

    def _open(self) -> bool:
        """Opens the segment that holds ``next_offset``. False if the partition is empty."""
        bases = segments.base_offsets(self._directory)
        if not bases:
            return False
        if self._anywhere:
            self.next_offset = bases[0]
            self._anywhere = False
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
        self._searched_to = None

    def _take(self, max_bytes: int, max_messages: int) -> tuple[list[Message], bool]:
        """(messages, whether the position moved at all), from one read of the open segment."""
        if self._searched_to is not None and not self._resynchronise():
            return [], False
        view = self._pread(max(max_bytes, segments.HEADER_BYTES))
        messages: list[Message] = []
        at = 0
        while at + segments.HEADER_BYTES <= len(view) and len(messages) < max_messages:
            header = segments.read_header(view, at)
            if header is None:
                self._searched_to = self._position + at
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
                # An offset beyond the expected one means that records between them were skipped as corrupt.
                self.messages_lost += offset - self.next_offset
                if segments.payload_is_intact(payload, payload_crc):
                    messages.append(Message(self._name, offset, payload))
                else:
                    self.messages_lost += 1
                    self._report_corrupt(self._position + at)
                self.next_offset = offset + 1
            self._segment_end = offset + 1
            self._reached = self._reached or self._segment_end >= self.next_offset
            at = end
        self._position += at
        return messages, at > 0 or (self._searched_to is not None and self._resynchronise())

    def _pread(self, size_bytes: int) -> memoryview:
        """Read-only, from the position on; shorter at the end of the file."""
        # Not more than there is: at the end of a log that grows slowly the buffer would be mostly empty.
        there_bytes = max(os.fstat(self._fd).st_size - self._position, 0)
        buffer = self._buffers.lend(min(size_bytes, there_bytes))
        return buffer[: os.preadv(self._fd, [buffer], self._position)].toreadonly()

    def _resynchronise(self) -> bool:
        """Moves to the next intact record after a corrupt header. False while there is none."""
        start = self._position if self._searched_to is None else self._searched_to
        self._searched_to, found = segments.find_record(self._fd, start, self.next_offset)
        if found is None:
            return False
        self._report_corrupt(self._position)
        self._position = found
        self._searched_to = None
        return True

    def _report_corrupt(self, position: int) -> None:
        path = segments.segment_path(self._directory, self._base)
        _log.warning("corrupt record skipped: %s at byte %d, before offset %d", path, position, self.next_offset)

    def _advance(self) -> bool:
        """At the end of what is there: goes to the next segment if there is one. False: wait for more."""
        bases = segments.base_offsets(self._directory)
        newer = [base for base in bases if base > self._base]
        if newer:
            # The writer may have completed this segment between our read and this look.
            if os.fstat(self._fd).st_size > self._position and self._grew():
                return True
            if newer[0] > self.next_offset:
                self._skip_to(newer[0], bases)
            self._open_segment(max(base for base in bases if base <= self.next_offset))
            return True
        if bases and not self._is_current(bases):
            self._lose_position("the log was made anew", bases)
            self._open_segment(max(base for base in bases if base <= self.next_offset))
            return True
        if bases and not self._reached and self._segment_end < self.next_offset and self._searched_to is None:
            self._lose_position(f"the log now ends at {self._segment_end}", bases)
            self._open_segment(max(base for base in bases if base <= self.next_offset))
            return True
        if self._searched_to is not None:
            path = segments.segment_path(self._directory, self._base)
            self.problem = f"{path}: corrupt or unfinished record at byte {self._position}"
        return False

    def _grew(self) -> bool:
        """Whether an intact record stands at the position (after a newer segment was seen)."""
        if self._searched_to is not None:
            return self._resynchronise()
        data = os.pread(self._fd, segments.HEADER_BYTES, self._position)
        header = segments.read_header(data, 0) if len(data) == segments.HEADER_BYTES else None
        return header is not None and self._position + segments.record_bytes(header[0]) <= os.fstat(self._fd).st_size

    def _skip_to(self, base: int, bases: list[int]) -> None:
        """The next segment starts beyond the next offset: one between was dropped, or this one's end is corrupt."""
        if self._base in bases:
            self.messages_lost += base - self.next_offset
            self._report_corrupt(self._position)
            self.next_offset = base
        else:
            self._lose_position(f"the log now starts at {bases[0]}", bases)

    def _is_current(self, bases: list[int]) -> bool:
        if self._base not in bases:
            return False
        there = segments.segment_path(self._directory, self._base).stat()
        return os.fstat(self._fd).st_ino == there.st_ino and there.st_size >= self._position

    def _lose_position(self, cause: str, bases: list[int]) -> None:
        """Applies the policy: moves ``next_offset``, or raises."""
        lost = f"file log partition {self._directory}: position {self.next_offset} is lost: {cause}"
        if self._on_position_lost == "fail":
            raise PositionLostError(lost, remedy="restore a matching snapshot, or set the policy to earliest or latest")
        self.positions_lost += 1
        self._reached = True
        target = bases[0] if self._on_position_lost == "earliest" else self._end_offset(bases[-1])
        self.messages_lost += max(0, target - self.next_offset)
        _log.warning("%s; going on at the %s message, %d", lost, self._on_position_lost, target)
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
