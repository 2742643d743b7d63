"""The segments of a file log's partition: format of their records, and reading across them.

A partition is a directory of segments named by the offset of their first record, ``%020d.log``. A record is a header
(little endian: magic u32, payload bytes u32, offset u64, CRC-32C of the payload u32, CRC-32C of the 20 bytes before
u32), the payload, and zeros up to a multiple of 8, so that payloads stay aligned within a read.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from flexd.core.arrays import UInt8Array
from flexd.stream.types import Losses, StreamMessage

_log = logging.getLogger(__name__)

MAGIC = b"FXR1"
# Longest payload of a record.
MAX_RECORD_BYTES = 64 * 2**20

_MAGIC_NUMBER = int.from_bytes(MAGIC, "little")
_HEADER = struct.Struct("<IIQII")
_HEADER_BODY = struct.Struct("<IIQI")
HEADER_BYTES = _HEADER.size
_SEGMENT_NAME = re.compile(r"^(\d{20})\.log$")
_PARTITION_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_CHUNK_BYTES = 2**20


def is_partition_name(name: str) -> bool:
    return _PARTITION_NAME.match(name) is not None


def segment_path(directory: Path, base_offset: int) -> Path:
    return directory / f"{base_offset:020d}.log"


def base_offsets(directory: Path) -> list[int]:
    """Return the first offsets of the existing segments, ascending; empty if the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _SEGMENT_NAME.match(name)))


def record_bytes(payload_bytes: int) -> int:
    """Return the size of a record in the file, with header and padding."""
    return HEADER_BYTES + payload_bytes + (-payload_bytes & 7)


def frame(offset: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Return header, payload and padding of a record, to be written one after another."""
    body = _HEADER_BODY.pack(_MAGIC_NUMBER, len(payload), offset, crc32c(payload))
    return body + crc32c(body).to_bytes(4, "little"), payload, bytes(-len(payload) & 7)


def read_header(data: bytes | memoryview, at: int) -> tuple[int, int, int] | None:
    """Return (payload bytes, offset, payload CRC) of the record header at ``at``, or None if it is not intact.

    ``data`` must hold at least ``HEADER_BYTES`` from there.
    """
    magic, payload_bytes, offset, payload_crc, header_crc = _HEADER.unpack_from(data, at)
    if magic != _MAGIC_NUMBER or payload_bytes > MAX_RECORD_BYTES:
        return None
    if crc32c(data[at : at + _HEADER_BODY.size]) != header_crc:
        return None
    return payload_bytes, offset, payload_crc


def find_record(fd: int, start: int, least_offset: int) -> tuple[int, int | None]:
    """Search from byte ``start`` for the next intact record whose offset is ``least_offset`` or higher.

    Returns:
        The position to search from next time, and the position of the record, None if there is none yet.
    """
    position = start + (-start & 7)
    while True:
        chunk = os.pread(fd, _CHUNK_BYTES, position)
        at = chunk.find(MAGIC)
        while at >= 0:
            if at % 8 == 0:
                if at + HEADER_BYTES > len(chunk):
                    break
                header = read_header(chunk, at)
                if header is not None and header[1] >= least_offset:
                    rest_bytes = record_bytes(header[0]) - HEADER_BYTES
                    rest = os.pread(fd, rest_bytes, position + at + HEADER_BYTES)
                    if len(rest) < rest_bytes:
                        return position + at, None
                    if crc32c(memoryview(rest)[: header[0]]) == header[2]:
                        return position + at, position + at
            at = chunk.find(MAGIC, at + 1)
        if len(chunk) < HEADER_BYTES:
            return position, None
        # The last bytes may be the start of a header that the next chunk completes.
        position += (len(chunk) - HEADER_BYTES + 8) & ~7


def end_of_segment(fd: int, base_offset: int, position: int = 0) -> tuple[int, int]:
    """Walk headers from ``position``; return the offset after the last intact one and the position after its record.

    Payloads are not checked; the walk stops at the first record that is incomplete or whose header is not intact.
    """
    offset = base_offset
    size = os.fstat(fd).st_size
    chunk, chunk_start = b"", position
    while position + HEADER_BYTES <= size:
        if position + HEADER_BYTES > chunk_start + len(chunk):
            chunk, chunk_start = os.pread(fd, 2**16, position), position
            if len(chunk) < HEADER_BYTES:
                break
        header = read_header(chunk, position - chunk_start)
        if header is None or position + record_bytes(header[0]) > size:
            break
        offset = header[1] + 1
        position += record_bytes(header[0])
    return offset, position


def last_offset_after(fd: int, base_offset: int) -> int:
    """Return the offset after the segment's last intact record, skipping corrupt ones."""
    offset, position = base_offset, 0
    while True:
        offset, position = end_of_segment(fd, offset, position)
        _, found = find_record(fd, position, offset)
        if found is None:
            return offset
        position = found


class PartitionReader:
    """Read one partition: tracks the open segment, the byte position in it and the next offset.

    Args:
        offset: of the first message to read; None for the earliest.
        buffers: shared by the readers of a source.
    """

    def __init__(self, directory: Path, name: str, offset: int | None, buffers: BufferPool) -> None:
        self._directory = directory
        self._name = name
        self._buffers = buffers
        # True while ``next_offset`` is unknown: that of the earliest message, which was not looked up yet.
        self.from_earliest = offset is None
        self.next_offset = offset or 0
        self.losses = Losses()
        self.problem: str | None = None
        self._fd = -1
        self._base = 0
        self._position = 0
        # Offset after the last record seen in this segment.
        self._segment_end = 0
        # True once the log is known to have held everything before ``next_offset``.
        self._reached = offset is None
        # True if this segment was read since a newer one was seen.
        self._read_again = False
        # After a corrupt header: the byte position from which to search for an intact record.
        self._search_from: int | None = None
        # Newest segment: base offset, offset after the last header walked, position after its record.
        self._end = (-1, 0, 0)

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
            bases = base_offsets(self._directory)
            if not bases:
                return 0
            return max(0, self._end_offset(bases[-1]) - (bases[0] if self.from_earliest else self.next_offset))
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
        bases = base_offsets(self._directory)
        if not bases:
            return False
        if self.from_earliest:
            self.next_offset = bases[0]
            self.from_earliest = False
        elif self.next_offset < bases[0]:
            self._lose_position(f"the log now starts at {bases[0]}", bases)
        self._open_segment(bases)
        return True

    def _open_segment(self, bases: list[int]) -> None:
        base = max(base for base in bases if base <= self.next_offset)
        fd = os.open(segment_path(self._directory, base), os.O_RDONLY | os.O_CLOEXEC)
        self.close()
        self._fd = fd
        self._base = base
        self._position = 0
        self._segment_end = base
        self._search_from = None
        self._read_again = False

    def _read_records(self, max_bytes: int, max_messages: int) -> tuple[list[StreamMessage], bool]:
        if self._search_from is not None and not self._resynchronise():
            return [], False
        view = self._pread(max(max_bytes, HEADER_BYTES))
        messages: list[StreamMessage] = []
        at = 0
        while at + HEADER_BYTES <= len(view) and len(messages) < max_messages:
            header = read_header(view, at)
            if header is None:
                self._search_from = self._position + at
                break
            payload_bytes, offset, payload_crc = header
            start = at + HEADER_BYTES
            end = at + record_bytes(payload_bytes)
            if end > len(view):
                if at > 0:
                    break
                view = self._pread(end)
                if end > len(view):
                    break
            if offset >= self.next_offset:
                payload = view[start : start + payload_bytes]
                if offset > self.next_offset:
                    # The records in between were skipped as corrupt.
                    self.losses.add(self._name, self.next_offset, offset, "corrupt")
                if crc32c(payload) == payload_crc:
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
        # Read from the position on; the read-only view is shorter at the end of the file.
        # Not more than the file holds: at the end of a slowly growing log the buffer would be mostly empty.
        available_bytes = max(os.fstat(self._fd).st_size - self._position, 0)
        buffer = self._buffers.acquire(min(size_bytes, available_bytes))
        return buffer[: os.preadv(self._fd, [buffer], self._position)].toreadonly()

    def _resynchronise(self) -> bool:
        start = self._position if self._search_from is None else self._search_from
        self._search_from, found = find_record(self._fd, start, self.next_offset)
        if found is None:
            return False
        self._position = found
        self._search_from = None
        return True

    def _advance(self) -> bool:
        # Move to the next segment at the end of this one. Return False if there is nothing more to read yet.
        bases = base_offsets(self._directory)
        newer = [base for base in bases if base > self._base]
        if newer:
            if not self._read_again:
                # The writer may have completed this segment between the read and the listing.
                self._read_again = True
                return True
            if newer[0] > self.next_offset:
                self._skip_to(newer[0], bases)
            self._open_segment(bases)
            return True
        anew = bool(bases)
        if self._base in bases:
            there = segment_path(self._directory, self._base).stat()
            anew = os.fstat(self._fd).st_ino != there.st_ino or there.st_size < self._position
        short = not self._reached and self._segment_end < self.next_offset and self._search_from is None
        if bases and (anew or short):
            self._lose_position(
                "the log was created anew" if anew else f"the log now ends at {self._segment_end}", bases
            )
            self._open_segment(bases)
            return True
        if self._search_from is not None:
            path = segment_path(self._directory, self._base)
            self.problem = f"{path}: corrupt or unfinished record at byte {self._position}"
        return False

    def _skip_to(self, base: int, bases: list[int]) -> None:
        # Move to a segment beyond the next offset: one in between was deleted, or this one has a corrupt end.
        if self._base in bases:
            self.losses.add(self._name, self.next_offset, base, "corrupt")
            self.next_offset = base
        else:
            self._lose_position(f"the log now starts at {bases[0]}", bases)

    def _lose_position(self, cause: str, bases: list[int]) -> None:
        self._reached = True
        reason = "retention" if bases[0] > self.next_offset else "truncated"
        self.losses.add_position(reason)
        self.losses.add(self._name, self.next_offset, bases[0], reason)
        _log.warning(
            "file log partition %s: position %d is lost: %s; continuing at the earliest message, %d",
            self._directory, self.next_offset, cause, bases[0],
        )  # fmt: skip
        self.next_offset = bases[0]

    def _end_offset(self, newest_base: int) -> int:
        base, offset, position = self._end
        with segment_path(self._directory, newest_base).open("rb") as file:
            if base != newest_base or os.fstat(file.fileno()).st_size < position:
                offset, position = newest_base, 0
            offset, position = end_of_segment(file.fileno(), offset, position)
        self._end = (newest_base, offset, position)
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
