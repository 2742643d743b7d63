"""The file log: what a reader sees while it is written, damaged, dropped and made anew."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import PositionLostError, StreamError
from flexd.stream.file_log import segments
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from tests.support.reading import poll_until


def read_all(source: FileLogSource, rounds: int = 3) -> list[tuple[int, bytes]]:
    """Everything there is: polls until a few polls in a row return nothing."""
    got: list[tuple[int, bytes]] = []
    empty = 0
    while empty < rounds:
        messages = source.poll(0.0)
        empty = 0 if messages else empty + 1
        got += [(m.offset, bytes(m.payload)) for m in messages]
    return got


def source_of(path: Path, **options) -> FileLogSource:
    return FileLogSource(path, discovery_seconds=0.0, **options)


def write(path: Path, payloads: list[bytes], partition: str = "p", **options) -> None:
    sink = FileLogSink(path, partition, **options)
    for payload in payloads:
        sink.send(payload)
    sink.close()


def segment_files(path: Path) -> list[Path]:
    return sorted((path / "p").glob("*.log"))


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
    assert source.messages_lost == source.positions_lost == 0
    assert source.problem is None
    source.close()


def test_lag_counts_across_segments(tmp_path):
    write(tmp_path, [b"x" * 50] * 20, segment_bytes=200)
    source = source_of(tmp_path)
    assert source.lag() == 20
    source.restore({"p": 15})
    assert source.lag() == 5


def test_payloads_are_aligned(tmp_path):
    write(tmp_path, [b"a" * n for n in range(1, 20)])
    import numpy as np

    for message in source_of(tmp_path).poll(0.0):
        assert np.frombuffer(message.payload, dtype=np.uint8).ctypes.data % 8 == 0
        assert message.payload.readonly


def test_a_torn_tail_is_not_there_yet_then_arrives(tmp_path):
    """A record is written byte by byte: the reader must give it exactly when its last byte is there."""
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
    assert source.messages_lost == 0


def test_a_record_completed_just_before_the_segment_rolls_is_read(tmp_path, monkeypatch):
    """The writer finishes the old segment and begins a new one between the reader's read and its look around."""
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
    assert source.messages_lost == 0


def test_a_segment_cut_short_is_noticed(tmp_path):
    write(tmp_path, [b"%d" % i for i in range(5)])
    source = source_of(tmp_path)
    assert len(read_all(source)) == 5
    os.truncate(segment_files(tmp_path)[0], segments.record_bytes(1) * 2)
    assert [offset for offset, _ in read_all(source)] == [0, 1]
    assert source.positions_lost == 1


@pytest.mark.parametrize("last", [5, 8])
def test_segments_that_overlap_are_read_once(tmp_path, last):
    """Somebody copied files about."""
    write(tmp_path, [b"%d" % i for i in range(6)])
    repeated = b"".join(b"".join(segments.frame(i, b"%d" % i)) for i in range(3, last))
    segments.segment_path(tmp_path / "p", 3).write_bytes(repeated)
    assert read_all(source_of(tmp_path)) == [(i, b"%d" % i) for i in range(max(last, 6))]


@pytest.mark.parametrize("kept", range(1, 56, 7))
def test_a_torn_record_of_a_dead_writer_costs_nothing(tmp_path, kept):
    write(tmp_path, [b"zero", b"x" * 25])
    (path,) = segment_files(tmp_path)
    whole = path.read_bytes()
    first = segments.record_bytes(4)
    path.write_bytes(whole[: first + kept])
    source = source_of(tmp_path)
    assert read_all(source) == [(0, b"zero")]
    write(tmp_path, [b"one", b"two"])
    assert read_all(source) == [(1, b"one"), (2, b"two")]
    assert source.messages_lost == 0
    assert source.problem is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_corruption_is_skipped_and_counted(tmp_path_factory, data):
    """Any damaged byte costs at most the records it lies in: the rest arrive, and what is missing is counted."""
    path = tmp_path_factory.mktemp("log")
    payloads = [bytes([i]) * data.draw(st.integers(0, 60)) for i in range(12)]
    write(path, payloads, segment_bytes=data.draw(st.sampled_from([150, 10**6])))
    damaged = data.draw(st.sampled_from([f for f in segment_files(path) if f.stat().st_size]))
    content = bytearray(damaged.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    damaged.write_bytes(bytes(content))
    # A later segment tells that the damaged one is complete.
    write(path, [b"after"])
    source = source_of(path)
    got = read_all(source)
    everything = dict(enumerate(payloads))
    end = max(offset for offset, _ in got)
    assert got[-1][1] == b"after"
    assert [offset for offset, _ in got] == sorted({offset for offset, _ in got})
    for offset, payload in got[:-1]:
        assert payload == everything[offset]
    assert source.messages_lost == end + 1 - len(got)
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
    assert source.messages_lost == 1
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
    assert source.problem is None
    assert source.messages_lost == 2
    sink.close()


def test_retention_drops_the_oldest_and_a_slow_reader_notices(tmp_path):
    sink = FileLogSink(tmp_path, "p", segment_bytes=100, max_bytes=400, flush_bytes=1)
    slow, strict = source_of(tmp_path), source_of(tmp_path, on_position_lost="fail")
    latest = source_of(tmp_path, on_position_lost="latest")
    sink.send(b"0" * 60)
    for source in (slow, strict, latest):
        assert len(read_all(source)) == 1
    for i in range(1, 40):
        sink.send(b"%02d" % i * 30)
    assert sum(f.stat().st_size for f in segment_files(tmp_path)) <= 500
    first = segments.base_offsets(tmp_path / "p")[0]
    assert first > 20
    # The segment that a reader has open stays readable to its end: record 1 is in it.
    assert [offset for offset, _ in read_all(slow)] == [1, *range(first, 40)]
    assert (slow.messages_lost, slow.positions_lost) == (first - 2, 1)
    assert len(strict.poll(0.0)) == 1
    with pytest.raises(PositionLostError, match="snapshot"):
        strict.poll(0.0)
    assert [offset for offset, _ in read_all(latest)] == [1]
    assert latest.messages_lost == 38
    sink.send(b"new")
    assert read_all(latest) == [(40, b"new")]
    sink.close()


@pytest.mark.parametrize("policy", ["earliest", "latest", "fail"])
def test_a_position_beyond_the_end_is_noticed(tmp_path, policy):
    write(tmp_path, [b"a", b"b", b"c"])
    source = source_of(tmp_path, on_position_lost=policy)
    source.restore({"p": 10})
    if policy == "fail":
        with pytest.raises(PositionLostError):
            source.poll(0.0)
        return
    assert [offset for offset, _ in read_all(source)] == ([0, 1, 2] if policy == "earliest" else [])
    assert source.positions_lost == 1
    assert source.positions() == {"p": 3}


def test_a_log_made_anew_is_noticed(tmp_path):
    write(tmp_path, [b"%d" % i for i in range(5)])
    source = source_of(tmp_path)
    assert len(read_all(source)) == 5
    shutil.rmtree(tmp_path / "p")
    assert read_all(source) == []
    write(tmp_path, [b"new %d" % i for i in range(8)])
    assert read_all(source) == [(i, b"new %d" % i) for i in range(8)]
    assert source.positions_lost == 1


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
    """Writes fail, partially and wholly; what ``send`` took arrives once, what it refused does not."""
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
    assert source.messages_lost == 0


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
    assert source.messages_lost == source.positions_lost == 0


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
    assert source.messages_lost == source.positions_lost == 0


def test_a_quiet_log_is_looked_at_ever_more_seldom_and_a_message_at_once_again(tmp_path, monkeypatch):
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
