"""The file log: writers, and readers while a log is written."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.stream.file_log import segments
from flexd.stream.file_log.log import FileLogSink
from tests.support.reading import read_all, segment_files, source_of, write


@settings(max_examples=40, deadline=None)
@given(
    payloads=st.lists(st.binary(max_size=200), max_size=30),
    segment_bytes=st.integers(1, 2000),
    flush_bytes=st.integers(1, 2000),
    poll_bytes=st.integers(1, 500),
    restarts=st.sets(st.integers(0, 30)),
)
def test_round_trip(tmp_path_factory, payloads, segment_bytes, flush_bytes, poll_bytes, restarts):
    path = tmp_path_factory.mktemp("log")
    options = {"segment_bytes": segment_bytes, "flush_bytes": flush_bytes}
    sink = FileLogSink(path, "p", **options)
    for i, payload in enumerate(payloads):
        assert sink.next_offset == i
        sink.send(payload)
        if i in restarts:
            sink.close()
            sink = FileLogSink(path, "p", **options)
    sink.close()
    source = source_of(path, max_poll_bytes=poll_bytes, max_poll_messages=7)
    assert source.lag() == (len(payloads) if len(segment_files(path)) == 1 else source.lag())
    assert read_all(source) == list(enumerate(payloads))
    assert (source.lag(), source.losses().messages, source.losses().positions) == (0, {}, {})
    assert source.problem is None
    source.close()


@pytest.mark.parametrize("kept", range(1, 56, 7))
def test_an_incomplete_record_of_a_dead_writer_loses_nothing(tmp_path, kept):
    write(tmp_path, [b"zero", b"x" * 25])
    (path,) = segment_files(tmp_path)
    path.write_bytes(path.read_bytes()[: segments.record_bytes(4) + kept])
    source = source_of(tmp_path)
    assert read_all(source) == [(0, b"zero")]
    write(tmp_path, [b"one", b"two"])
    assert read_all(source) == [(1, b"one"), (2, b"two")]
    assert (source.losses().messages, source.problem) == ({}, None)


def test_partitions_that_appear_later_and_fairness(tmp_path):
    source = source_of(tmp_path / "log", max_poll_bytes=1000)
    assert source.poll(0.0) == []
    assert "No such file" in source.problem
    write(tmp_path / "log", [b"x" * 200] * 500, partition="long")
    assert len(source.poll(0.0)) > 0
    write(tmp_path / "log", [b"y"] * 3, partition="short")
    (tmp_path / "log" / ".hidden").mkdir()
    (tmp_path / "log" / "a file").touch()
    parts = {m.partition for _ in range(2) for m in source.poll(0.0)}
    assert parts == {"long", "short"}, "a backlog does not starve another partition"
    assert (source.problem, set(source.positions())) == (None, {"long", "short"})


def test_a_partition_that_no_poll_has_reached_has_no_position(tmp_path):
    """Restored as 0 it would be a lost position, of messages that were deleted before this log was read at all."""
    write(tmp_path, [b"x" * 90] * 5, segment_bytes=100, flush_bytes=1)
    for segment in segment_files(tmp_path)[:2]:
        segment.unlink()
    source = source_of(tmp_path)
    assert (source.lag(), source.positions()) == (3, {})
    assert [offset for offset, _ in read_all(source)] == [2, 3, 4]
    assert (source.positions(), source.losses().positions) == ({"p": 5}, {})


def test_one_writer_a_partition(tmp_path):
    first = FileLogSink(tmp_path, "p")
    with pytest.raises(StreamError, match="another process"):
        FileLogSink(tmp_path, "p")
    FileLogSink(tmp_path, "q").close()
    first.close()
    FileLogSink(tmp_path, "p").close()


def test_a_full_disk_is_reported_and_nothing_is_lost_or_repeated(tmp_path, monkeypatch):
    """Writes fail partially and completely: accepted messages arrive once, refused ones do not."""
    sink = FileLogSink(tmp_path, "p", flush_bytes=64)
    real = os.write
    budget = [0]

    def short_write(fd, data):
        if budget[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, bytes(data)[: budget[0]])
        budget[0] -= written
        return written

    monkeypatch.setattr(os, "write", short_write)
    taken, refused = [], 0
    for i in range(60):
        budget[0] = [0, 37, 500, 5, 0, 0][i % 6]
        payload = b"message %d" % i
        try:
            sink.send(payload)
            taken.append(payload)
        except StreamError:
            refused += 1
    monkeypatch.setattr(os, "write", real)
    sink.close()
    assert refused > 0
    source = source_of(tmp_path)
    assert read_all(source) == list(enumerate(taken))
    assert source.losses().messages == {}
