"""The reader of a partition: incomplete and corrupt records, deleted segments, lost positions."""

import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.stream.file_log import segments
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.file_log.segments import BufferPool
from tests.support.reading import read_all, segment_files, source_of, write


def test_an_incomplete_record_arrives_once_complete(tmp_path):
    """A record is written byte by byte: the reader returns it once its last byte is written, and not before."""
    write(tmp_path, [b"first"])
    (path,) = segment_files(tmp_path)[:1]
    record = b"".join(segments.frame(1, b"second message"))
    source = source_of(tmp_path)
    assert read_all(source) == [(0, b"first")]
    for i in range(len(record) - 1):
        with path.open("ab") as file:
            file.write(record[i : i + 1])
        assert source.poll(0.0) == [], f"after {i + 1} of {len(record)} bytes"
    with path.open("ab") as file:
        file.write(record[-1:])
    assert read_all(source) == [(1, b"second message")]
    assert source.losses().messages == {}


def test_a_record_completed_just_before_the_segment_rolls_is_read(tmp_path, monkeypatch):
    """The writer completes a segment and starts a new one between the reader's read and its listing."""
    write(tmp_path, [b"zero"])
    (path,) = segment_files(tmp_path)
    source = source_of(tmp_path)
    assert len(read_all(source)) == 1
    real = segments.base_offsets

    def roll_then_list(directory):
        monkeypatch.setattr(segments, "base_offsets", real)
        with path.open("ab") as file:
            file.write(b"".join(segments.frame(1, b"one")))
        segments.segment_path(directory, 2).write_bytes(b"".join(segments.frame(2, b"two")))
        return real(directory)

    monkeypatch.setattr(segments, "base_offsets", roll_then_list)
    assert read_all(source) == [(1, b"one"), (2, b"two")]
    assert source.losses().messages == {}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_corruption_is_skipped_and_counted(tmp_path_factory, data):
    """A damaged byte loses at most its record: the other records arrive, and missing ones are counted."""
    path = tmp_path_factory.mktemp("log")
    payloads = [bytes([i]) * data.draw(st.integers(0, 60)) for i in range(12)]
    write(path, payloads, segment_bytes=data.draw(st.sampled_from([150, 10**6])))
    damaged = data.draw(st.sampled_from([f for f in segment_files(path) if f.stat().st_size]))
    content = bytearray(damaged.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    damaged.write_bytes(bytes(content))
    # A later segment shows that the damaged one is complete.
    write(path, [b"after"])
    source = source_of(path)
    got = read_all(source)
    everything = dict(enumerate(payloads))
    end = max(offset for offset, _ in got)
    assert (got[-1][1], [offset for offset, _ in got]) == (b"after", sorted({offset for offset, _ in got}))
    for offset, payload in got[:-1]:
        assert payload == everything[offset]
    assert sum(source.losses().messages.values()) == end + 1 - len(got)
    assert len(got) >= len(payloads) + 1 - 3


def test_corruption_in_the_segment_being_written(tmp_path):
    sink = FileLogSink(tmp_path, "p", flush_bytes=1)
    for i in range(3):
        sink.send(b"message %d" % i)
    path = segment_files(tmp_path)[-1]
    source = source_of(tmp_path)
    with path.open("r+b") as file:
        file.seek(segments.record_bytes(9) + 4)
        file.write(b"\xff\xff\xff\x7f")
    assert read_all(source) == [(0, b"message 0"), (2, b"message 2")]
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
    sink.send(b"message 3")
    with path.open("r+b") as file:
        file.seek(end)
        file.write(b"????")
    assert read_all(source) == []
    assert "corrupt" in source.problem
    sink.send(b"message 4")
    assert read_all(source) == [(4, b"message 4")]
    assert (source.problem, source.losses().messages) == (None, {"corrupt": 2})
    sink.close()


def test_a_slow_reader_notices_that_the_oldest_segments_are_gone(tmp_path):
    sink = FileLogSink(tmp_path, "p", segment_bytes=100, flush_bytes=1)
    slow = source_of(tmp_path)
    sink.send(b"0" * 60)
    assert len(read_all(slow)) == 1
    for i in range(1, 40):
        sink.send(b"%02d" % i * 30)
    for old in segment_files(tmp_path)[:-3]:
        old.unlink()
    first = segments.base_offsets(tmp_path / "p")[0]
    assert first > 20
    # The segment that a reader has open stays readable to its end: record 1 is in it.
    assert [offset for offset, _ in read_all(slow)] == [1, *range(first, 40)]
    assert (slow.losses().messages, slow.losses().positions) == ({"retention": first - 2}, {"retention": 1})
    sink.close()


def test_a_position_beyond_the_end_is_noticed(tmp_path):
    write(tmp_path, [b"a", b"b", b"c"])
    source = source_of(tmp_path)
    source.restore({"p": 10})
    assert [offset for offset, _ in read_all(source)] == [0, 1, 2]
    assert (source.losses().messages, source.losses().positions) == ({}, {"truncated": 1})
    assert source.positions() == {"p": 3}


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


@pytest.mark.parametrize(
    "keep",
    [
        lambda view: view,
        lambda view: view[10:20][2:4],
        lambda view: view.toreadonly()[5:],
        lambda view: np.frombuffer(view, dtype=np.uint8)[3:5][1:],
        lambda view: np.frombuffer(view[8:24], dtype=np.int64),
        lambda view: pa.py_buffer(view[8:]).slice(3),
        lambda view: pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(view[:16])]).to_numpy(),
    ],
)
def test_a_view_of_a_view_keeps_its_bytes(keep):
    buffers = BufferPool(2)
    view = buffers.acquire(64)
    first = address(view)
    kept = keep(view)
    del view
    for _ in range(3):
        assert address(buffers.acquire(64)) != first
    del kept
    assert address(buffers.acquire(64)) == first


def test_memory_is_bounded_and_grows_with_the_largest_read():
    buffers = BufferPool(2)
    held = [buffers.acquire(10) for _ in range(5)]
    assert len({address(view) for view in held}) == 5
    assert len(buffers._buffers) == 2
    del held
    large = buffers.acquire(100)
    at = address(large)
    del large
    assert address(buffers.acquire(50)) == at
