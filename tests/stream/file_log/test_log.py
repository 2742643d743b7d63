"""The file log: writers, and readers while a log is written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.stream.file_log import segments
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from tests.support.file_log import read_all, segment_files, source_of, write
from tests.support.reading import poll_until


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
    assert source.lag() == 0
    assert source.losses().total_messages == source.losses().total_positions == 0
    assert source.problem is None
    source.close()


def test_payloads_are_aligned(tmp_path):
    write(tmp_path, [b"a" * n for n in range(1, 20)])
    import numpy as np

    for message in source_of(tmp_path).poll(0.0):
        assert np.frombuffer(message.payload, dtype=np.uint8).ctypes.data % 8 == 0
        assert message.payload.readonly


@pytest.mark.parametrize("kept", range(1, 56, 7))
def test_an_incomplete_record_of_a_dead_writer_loses_nothing(tmp_path, kept):
    write(tmp_path, [b"zero", b"x" * 25])
    (path,) = segment_files(tmp_path)
    whole = path.read_bytes()
    first = segments.record_bytes(4)
    path.write_bytes(whole[: first + kept])
    source = source_of(tmp_path)
    assert read_all(source) == [(0, b"zero")]
    write(tmp_path, [b"one", b"two"])
    assert read_all(source) == [(1, b"one"), (2, b"two")]
    assert source.losses().total_messages == 0
    assert source.problem is None


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
    assert source.problem is None
    assert set(source.positions()) == {"long", "short"}


def test_one_writer_a_partition(tmp_path):
    first = FileLogSink(tmp_path, "p")
    with pytest.raises(StreamError, match="another process"):
        FileLogSink(tmp_path, "p")
    FileLogSink(tmp_path, "q").close()
    first.close()
    FileLogSink(tmp_path, "p").close()


@pytest.mark.parametrize("name", ["", "..", "a/b", ".x", "x" * 200])
def test_partition_names(tmp_path, name):
    with pytest.raises(StreamError):
        FileLogSink(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_messages_beyond_the_record_limit_are_refused(tmp_path):
    sink = FileLogSink(tmp_path, "p")
    with pytest.raises(StreamError):
        sink.send(bytes(segments.MAX_RECORD_BYTES + 1))
    sink.send(bytes(20 * 2**20))
    sink.close()
    (message,) = source_of(tmp_path).poll(0.0)
    assert len(message.payload) == 20 * 2**20


def test_a_log_that_is_a_file(tmp_path):
    (tmp_path / "log").touch()
    with pytest.raises(StreamError, match="not a directory"):
        FileLogSource(tmp_path / "log")
    with pytest.raises(StreamError, match="cannot be written"):
        FileLogSink(tmp_path / "log", "p")


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
    assert source.losses().total_messages == 0


def test_reading_while_another_thread_writes(tmp_path):
    count = 3000
    source = source_of(tmp_path, max_poll_bytes=5000)

    def produce():
        write(tmp_path, [b"%d" % i * (i % 50) for i in range(count)], segment_bytes=20_000, flush_bytes=700)

    writer = threading.Thread(target=produce)
    writer.start()
    got = poll_until(source, lambda messages: len(messages) >= count, 30, 0.05)
    writer.join()
    assert [(m.offset, bytes(m.payload)) for m in got] == [(i, b"%d" % i * (i % 50)) for i in range(count)]
    assert source.losses().total_messages == source.losses().total_positions == 0


WRITER = """
import sys
from pathlib import Path
from flexd.stream.file_log.log import FileLogSink
sink = FileLogSink(Path(sys.argv[1]), "p", segment_bytes=20_000, flush_bytes=300)
print("ready", flush=True)
while True:
    sink.send(b"%d " % sink.next_offset * 9)
"""


def test_killed_writers_leave_a_readable_log(tmp_path):
    """SIGKILL at random moments: offsets stay contiguous and every record is whole."""
    source = source_of(tmp_path)
    got: list[tuple[int, bytes]] = []
    for round_ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        until = time.monotonic() + 0.02 + 0.013 * round_
        while time.monotonic() < until:
            got += [(m.offset, bytes(m.payload)) for m in source.poll(0.005)]
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
    got += read_all(source)
    assert len(got) > 100
    assert [offset for offset, _ in got] == list(range(len(got)))
    assert all(payload == b"%d " % offset * 9 for offset, payload in got)
    assert source.losses().total_messages == source.losses().total_positions == 0


def test_a_quiet_log_is_polled_less_often_until_a_message_arrives(tmp_path, monkeypatch):
    clock, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    source = source_of(tmp_path)
    fake = types.SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("flexd.stream.file_log.log.time", fake)
    for _ in range(10):
        assert source.poll(0.2) == []
    assert slept[0] == 0.001
    assert max(slept) == 0.05
    assert len(slept) < 60, "in two seconds"
    slept.clear()
    assert source.poll(0.2) == []
    assert slept[0] == 0.05, "one poll goes on where the other was"
    monkeypatch.undo()
    write(tmp_path, [b"news"])
    assert len(source.poll(0.2)) == 1
    monkeypatch.setattr("flexd.stream.file_log.log.time", fake)
    slept.clear()
    assert source.poll(0.2) == []
    assert slept[0] == 0.001
