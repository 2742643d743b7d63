"""The record format of segment files."""

from __future__ import annotations

import os

import pytest

from flexd.stream.file_log import segments


def framed(*payloads: bytes, first: int = 0) -> bytes:
    return b"".join(b"".join(segments.frame(first + n, payload)) for n, payload in enumerate(payloads))


@pytest.fixture
def segment(tmp_path):
    """Write a segment and return its file descriptor."""
    opened = []

    def write(content: bytes) -> int:
        path = segments.segment_path(tmp_path, len(opened))
        path.write_bytes(content)
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    yield write
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize("size", range(10))
def test_a_record_is_padded_and_reads_back(size):
    payload = bytes(range(size))
    record = framed(payload, first=7)
    assert len(record) == segments.record_bytes(size)
    assert len(record) % 8 == 0
    payload_bytes, offset, crc = segments.read_header(record, 0)
    assert (payload_bytes, offset) == (size, 7)
    assert segments.payload_is_intact(record[segments.HEADER_BYTES :][:size], crc)
    assert not segments.payload_is_intact(payload + b"x", crc)


@pytest.mark.parametrize("at", range(segments.HEADER_BYTES))
def test_every_damaged_header_byte_is_noticed(at):
    record = bytearray(framed(b"payload"))
    record[at] ^= 1
    assert segments.read_header(record, 0) is None


def test_segments_are_listed_by_their_first_offset(tmp_path):
    assert segments.base_offsets(tmp_path / "missing") == []
    for base in (10**12, 0, 40):
        segments.segment_path(tmp_path, base).touch()
    (tmp_path / "5.log").touch()
    (tmp_path / ".lock").touch()
    assert segments.base_offsets(tmp_path) == [0, 40, 10**12]


@pytest.mark.parametrize("chunk_bytes", [32, 40, 2**20])
def test_the_next_intact_record_is_found(segment, chunk_bytes):
    """A damaged payload, a magic number inside a payload and a record below the wanted offset are all skipped."""
    damaged = bytearray(framed(b"damaged"))
    damaged[segments.HEADER_BYTES] ^= 1
    decoy = framed(segments.MAGIC * 8, first=1)
    content = bytes(damaged) + decoy + framed(b"wanted", first=2)
    fd = segment(content)
    assert segments.find_record(fd, 0, 2, chunk_bytes)[1] == len(damaged) + len(decoy)
    assert segments.find_record(fd, 0, 0, chunk_bytes)[1] == len(damaged)
    assert segments.find_record(fd, 0, 3, chunk_bytes)[1] is None


def test_an_incomplete_record_is_waited_for(segment):
    record = framed(b"incomplete")
    fd = segment(record[:-8])
    assert segments.find_record(fd, 0, 0) == (0, None), "the search continues at the record"
    assert segments.end_of_segment(fd, 5) == (5, 0)


def test_the_end_of_a_segment_is_after_its_last_intact_record(segment):
    first, second = framed(b"a", b"b"), framed(b"c", first=3)
    fd = segment(first + second + b"torn")
    assert segments.end_of_segment(fd, 0) == (4, len(first) + len(second))
    damaged = bytearray(second)
    damaged[4] ^= 1
    fd = segment(first + bytes(damaged) + framed(b"d", first=4))
    assert segments.end_of_segment(fd, 0) == (2, len(first))
    assert segments.last_offset_after(fd, 0) == 5
