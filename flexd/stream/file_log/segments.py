"""The record format of segment files.

A partition is a directory of segments named by the offset of their first record, ``%020d.log``. A record is a header
(little endian: magic u32, payload bytes u32, offset u64, CRC-32C of the payload u32, CRC-32C of the 20 bytes before
u32), the payload, and zeros up to a multiple of 8, so that payloads stay aligned within a read.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from crc32c import crc32c

MAGIC = b"FXR1"
MAX_RECORD_BYTES = 64 * 2**20
"""Longest payload of a record."""

_MAGIC_NUMBER = int.from_bytes(MAGIC, "little")
_HEADER = struct.Struct("<IIQII")
_HEADER_BODY = struct.Struct("<IIQI")
HEADER_BYTES = _HEADER.size
_SEGMENT_NAME = re.compile(r"^(\d{20})\.log$")
_PARTITION_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_CHUNK_BYTES = 2**20
_PADDING = tuple(b"\0" * n for n in range(8))


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
    return body + crc32c(body).to_bytes(4, "little"), payload, _PADDING[-len(payload) & 7]


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


def payload_is_intact(payload: bytes | memoryview, payload_crc: int) -> bool:
    return bool(crc32c(payload) == payload_crc)


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
                    if payload_is_intact(memoryview(rest)[: header[0]], header[2]):
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
