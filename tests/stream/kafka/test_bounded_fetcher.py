"""Hostile batches on a real broker are refused, and the rest of the partition is read, in bounded memory."""

import gzip
import itertools
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import lz4.frame
import pytest
import snappy
import zstandard
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.codec import snappy_encode
from kafka.consumer.fetcher import Fetcher
from kafka.protocol.consumer import IsolationLevel
from kafka.record import MemoryRecordsBuilder

from flexd.core.errors import StreamError
from flexd.stream.kafka import bounded_fetcher
from flexd.stream.kafka.bounded_fetcher import (
    HEAD_BYTES,
    BatchLimits,
    BatchReader,
    BatchRefusedError,
    BoundedFetcher,
    EmptyOffsets,
    Item,
    decompress,
)
from flexd.stream.types import OffsetsInWork, RefusedMessages, StreamMessage
from tests.support.reading import kafka_source, poll_until
from tests.support.repository import ROOT, child_environment

CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "gzip": (1, gzip.compress),
    "snappy": (2, snappy.compress),
    "snappy-xerial": (2, snappy_encode),
    "lz4": (3, lz4.frame.compress),
    "zstd": (4, zstandard.ZstdCompressor().compress),
}
"""Name -> (code in a batch's attributes, compressor)."""
LOG_APPEND_TIME = 0x08


def varint(value: int) -> bytes:
    """Encode a zig-zag varint."""
    raw, out = (value << 1) ^ (value >> 63), bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def record(delta: int, value: bytes | None, time_delta: int = 0, headers: bytes = b"\x00") -> bytes:
    """Encode one record of format 2 without a key."""
    body = b"\x00" + varint(time_delta) + varint(delta) + varint(-1)
    body += varint(-1) if value is None else varint(len(value)) + value
    body += headers
    return varint(len(body)) + body


def batch(
    values: Sequence[bytes] = (),
    *,
    codec: str | None = None,
    records: bytes | None = None,
    count: int | None = None,
    last_delta: int | None = None,
    compressed: bytes | None = None,
    timestamp_ms: int = 1_700_000_000_000,
    attributes: int = 0,
    crc: int | None = None,
    base_offset: int = 0,
    producer: int = -1,
) -> bytes:
    """Encode a record batch of format 2; every field can be set to something that does not fit the others."""
    if records is None:
        records = b"".join(record(delta, value) for delta, value in enumerate(values))
    count = len(values) if count is None else count
    last_delta = max(count - 1, 0) if last_delta is None else last_delta
    if codec is not None:
        code, compress = CODECS[codec]
        attributes |= code
        records = compress(records) if compressed is None else compressed
    body = struct.pack(
        ">hiqqqhii", attributes, last_delta, timestamp_ms, timestamp_ms, producer, -1, -1, count
    ) + records  # fmt: skip
    crc = crc32c(body) if crc is None else crc
    return struct.pack(">qiibI", base_offset, len(body) + 9, 0, 2, crc) + body


def marker(base_offset: int, producer: int, *, committed: bool) -> bytes:
    """Encode the batch that ends a transaction."""
    body = b"\x00" + varint(0) + varint(0) + varint(4) + struct.pack(">hh", 0, committed) + varint(6) + bytes(7)
    records = varint(len(body)) + body
    return batch(records=records, count=1, attributes=0x30, base_offset=base_offset, producer=producer)


def produce(bootstrap: str, topic: str, batch: bytes, partition: int = 0) -> int:
    """Send one batch (Produce version 3). Return the broker's error code."""
    host, port = bootstrap.split(":")

    def text(value: str | None) -> bytes:
        return struct.pack(">h", -1) if value is None else struct.pack(">h", len(value)) + value.encode()

    request = struct.pack(">hhi", 0, 3, 1) + text("raw") + text(None) + struct.pack(">hi", 1, 10_000)
    request += struct.pack(">i", 1) + text(topic) + struct.pack(">iii", 1, partition, len(batch)) + batch
    with socket.create_connection((host, int(port)), 10.0) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        response = _read(connection, size)
    (error,) = struct.unpack_from(">h", response, 4 + 4 + 2 + len(topic) + 4 + 4)
    return int(error)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the broker closed the connection"
        data += part
    return data


pytestmark = pytest.mark.slow


def test_poison_batches_are_refused_in_their_place_and_a_poll_ends_at_a_number_of_decompressed_bytes(mock_broker):
    topic = mock_broker.create_topic(1)
    payloads = []
    for codec in CODECS:
        produce(mock_broker.bootstrap_servers, topic, batch([b"before " + codec.encode()], codec=codec))
        produce(mock_broker.bootstrap_servers, topic, batch([bytes(600_000)], codec=codec))
        payloads.append(b"before " + codec.encode())
    produce(mock_broker.bootstrap_servers, topic, batch([b"bad checksum"], crc=5))
    produce(mock_broker.bootstrap_servers, topic, batch([b"bad gzip"], codec="gzip", compressed=b"garbage"))
    produce(mock_broker.bootstrap_servers, topic, batch([bytes(10_000)] * 50, codec="gzip"))
    payloads += [bytes(10_000)] * 50

    limits = BatchLimits(max_batch_bytes=550_000, max_poll_bytes=100_000)
    source = kafka_source(
        mock_broker.bootstrap_servers,
        topic,
        f"group-{topic}",
        session_timeout_seconds=6.0,
        limits=limits,
        client_options=mock_broker.client_options,
    )
    for begin in (0, 1):
        source.restore({f"{topic}/0": begin})
        polls: list[list[Item]] = []
        deadline = time.monotonic() + 60
        while source.positions() != {f"{topic}/0": 62}:
            assert time.monotonic() < deadline, source.problem
            polls.append(source.poll(1.0))
        assert source.problem is None
        items = [item for got in polls for item in got]
        assert [bytes(item.payload) for item in items if isinstance(item, StreamMessage)] == payloads[begin:]
        refused = [item for item in items if isinstance(item, RefusedMessages)]
        assert [item.reason for item in refused] == ["batch_too_large"] * 5 + ["corrupt_batch"] * 2
        offsets = [offset for item in items for offset in range(item.offset, item.last_offset + 1)]
        assert offsets == list(range(begin, 62))
        assert max(sum(len(item.payload) for item in got if item.offset >= 12) for got in polls) <= 110_000
    source.close()


def test_a_changed_client_is_refused_at_the_start(monkeypatch):
    bounded_fetcher.check_client()
    changed = type("Changed", (Fetcher.PartitionRecords,), {"take": lambda self, n=None, more=None: []})
    monkeypatch.setattr(Fetcher, "PartitionRecords", changed)
    with pytest.raises(StreamError, match=r"kafka-python .* cannot be bounded: Changed.take changed"):
        kafka_source("127.0.0.1:1", "t", "g")


LIMITS = BatchLimits(max_batch_bytes=10_000, max_batch_records=100)


def read(data: bytes, start: int = 0, limits: BatchLimits = LIMITS, **options) -> tuple[list, int]:
    reader = BatchReader("t/0", memoryview(data), start, limits, OffsetsInWork(), **options)
    return list(reader), reader.next_offset


def payloads(items: list) -> list[bytes]:
    return [bytes(item.payload) for item in items if isinstance(item, StreamMessage)]


def only_refused(items: list) -> RefusedMessages:
    (refused,) = [item for item in items if isinstance(item, RefusedMessages)]
    return refused


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_batches_are_read_in_every_codec(codec):
    data = batch([b"a", b"b"], codec=codec, base_offset=5) + batch([b"c"], codec=codec, base_offset=7)
    items, end = read(data, 5)
    assert items == [StreamMessage("t/0", 5 + n, b"abc"[n : n + 1], None, 1.7e9) for n in range(3)]
    assert end == 8
    assert payloads(read(data, 6)[0]) == [b"b", b"c"]


@pytest.mark.parametrize("codec", [0, 1, 2, 3])
def test_what_kafka_python_writes_is_read(codec):
    builder = MemoryRecordsBuilder(2, codec, 2**20)
    values = [b"first" * 20, b"", b"third" * 20]
    for value in values:
        builder.append(timestamp=1, key=None, value=value)
    builder.close()
    items, end = read(bytes(builder.buffer()))
    assert payloads(items) == values
    assert [item.offset for item in items] == [0, 1, 2]
    assert end == 3


def test_the_time_of_the_append_is_that_of_the_broker_or_unknown():
    data = batch([b"a"], timestamp_ms=1_500, attributes=LOG_APPEND_TIME) + batch([b"b"], base_offset=1)
    items, _ = read(data)
    assert [item.appended_seconds for item in items] == [1.5, None]
    assert [item.timestamp_seconds for item in items] == [1.5, 1.7e9]
    assert read(batch([b"a"], timestamp_ms=-1))[0][0].timestamp_seconds is None


def test_a_message_without_a_value_is_a_tombstone_and_one_with_an_empty_value_is_none():
    records = record(0, b"a") + b"\x0e\x00\x00\x02\x02k\x01\x00" + record(2, b"")
    items, end = read(batch(records=records, count=3))
    assert [getattr(item, "reason", None) for item in items] == [None, "tombstone", None]
    assert (items[1].offset, items[1].last_offset, end) == (1, 1, 3)


@pytest.mark.parametrize("codec", CODECS)
def test_an_oversized_batch_is_one_refused_range_and_its_neighbours_are_read(codec):
    bomb = batch([b"z" * 9_000, b"z" * 2_000], codec=codec, base_offset=1)
    items, end = read(batch([b"a"]) + bomb + batch([b"b"], base_offset=3))
    refused = only_refused(items)
    assert (refused.offset, refused.last_offset, refused.messages) == (1, 2, 2)
    assert (refused.reason, refused.size_bytes) == ("batch_too_large", len(bomb))
    assert len(refused.payload) <= 4096
    assert payloads(items) == [b"a", b"b"]
    assert end == 4


@pytest.mark.parametrize(
    ("reason", "bad"),
    [
        ("corrupt_batch", batch([b"x"], crc=1, base_offset=1)),
        ("corrupt_batch", batch([b"x"], codec="gzip", compressed=b"garbage", base_offset=1)),
        ("corrupt_batch", batch([b"x"], count=2, last_delta=0, base_offset=1)),
        ("corrupt_batch", batch(records=b"\x00" * 20, count=1, base_offset=1)),
        ("corrupt_batch", batch(records=varint(-5) + b"\x00" * 20, count=1, base_offset=1)),
        ("corrupt_batch", batch(records=varint(2**40) + b"\x00" * 20, count=1, base_offset=1)),
        ("corrupt_batch", batch(records=b"\xff" * 30, count=1, base_offset=1)),
        ("corrupt_batch", batch(records=record(7, b"far"), count=1, base_offset=1)),
        ("corrupt_batch", batch(records=record(-7, b"back"), count=1, base_offset=1)),
        ("batch_too_many_records", batch(records=record(0, b""), count=101, last_delta=0, base_offset=1)),
        ("batch_too_many_records", batch(records=record(0, b""), count=-1, last_delta=0, base_offset=1)),
        ("unsupported_codec", batch([b"x"], attributes=6, base_offset=1)),
        ("corrupt_batch", batch([b"x"], base_offset=1)[:16] + b"\x01" + batch([b"x"], base_offset=1)[17:]),
    ],
    ids=itertools.count(),
)
def test_what_cannot_be_read_is_one_refused_range(reason, bad):
    items, end = read(batch([b"a"]) + bad + batch([b"b"], base_offset=2))
    refused = only_refused(items)
    assert (refused.offset, refused.last_offset, refused.reason) == (1, 1, reason), refused
    assert payloads(items) == [b"a", b"b"]
    assert end == 3


def of_length(length: int) -> bytes:
    return batch([b"a"], base_offset=4)[:8] + struct.pack(">i", length) + batch([b"a"], base_offset=4)[12:]


@pytest.mark.parametrize(
    ("data", "start", "read_payloads", "refused", "end"),
    [
        # Records before a damaged one.
        (batch(records=record(0, b"a") + record(1, b"b") + bytes(20), count=5, base_offset=10)
         + batch([b"c"], base_offset=15), 10, [b"a", b"b", b"c"], [(12, 14)], 16),
        # An incomplete batch at the end is left for the next fetch.
        (batch([b"a"]) + batch([b"b"], base_offset=1)[:-1], 0, [b"a"], [], 1),
        *((of_length(length), 4, [], [(4, 4)], 5) for length in (-1, -(2**31), 2**31 - 1)),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_the_position_moves_past_all_that_is_read_or_refused(data, start, read_payloads, refused, end):
    items, reached = read(data, start)
    assert payloads(items) == read_payloads
    passed_over = [item for item in items if isinstance(item, RefusedMessages)]
    assert [(item.offset, item.last_offset) for item in passed_over] == refused
    assert {item.reason for item in passed_over} <= {"corrupt_batch"}
    assert reached == end


@pytest.mark.parametrize(
    ("data", "start", "read_payloads", "empty", "end"),
    [
        (batch([b"a"], attributes=0x10, producer=5) + marker(1, 5, committed=True), 0, [b"a"], [(1, 1)], 2),
        # Aborted at offset 0 and 6, committed between, by one producer; another one commits beside it.
        (batch([b"a", b"a"], attributes=0x10, producer=5) + batch([b"b"], attributes=0x10, producer=6, base_offset=2)
         + marker(3, 5, committed=False) + batch([b"c"], attributes=0x10, producer=5, base_offset=4)
         + marker(5, 5, committed=True) + batch([b"a"], attributes=0x10, producer=5, base_offset=6)
         + marker(7, 5, committed=False) + batch([b"d"], producer=5, base_offset=8),
         1, [b"b", b"c", b"d"], [(1, 1), (3, 3), (5, 5), (6, 6), (7, 7)], 9),
        # Compacted: some keys of a batch, and all of one.
        (batch(records=record(2, b"a") + record(5, b"b"), count=2, last_delta=7, base_offset=10)
         + batch(count=0, last_delta=3, base_offset=18),
         11, [b"a", b"b"], [(11, 11), (13, 14), (16, 17), (18, 21)], 22),
        # What is missing between two batches is not known to hold no message.
        (batch([b"a"], base_offset=3) + marker(6, 5, committed=True), 1, [b"a"], [(6, 6)], 7),
    ],
    ids=["markers", "aborted", "compacted", "between batches"],
)  # fmt: skip
def test_offsets_of_a_batch_without_a_message_are_named(data, start, read_payloads, empty, end):
    items, reached = read(data, start, aborted=[(0, 5), (6, 5)] if len(read_payloads) == 3 else [])
    assert payloads(items) == read_payloads
    assert [(item.offset, item.last_offset) for item in items if isinstance(item, EmptyOffsets)] == empty
    assert len(items) == len(read_payloads) + len(empty)
    assert reached == end


def test_messages_of_an_aborted_transaction_are_not_delivered(mock_broker, monkeypatch):
    """No test broker names the aborted transactions of what it sends: this test adds one to the answers."""
    topic = mock_broker.create_topic(1)
    for data in (
        batch([b"a"], attributes=0x10, producer=5),
        batch([b"b"], attributes=0x10, producer=6),
        marker(0, 5, committed=False),
        marker(0, 6, committed=True),
    ):
        assert produce(mock_broker.bootstrap_servers, topic, data) == 0
    isolation = set()
    original = BoundedFetcher._parse_fetched_data

    def parse(fetcher, completed):
        isolation.add(fetcher._isolation_level)
        completed.partition_data.aborted_transactions = [SimpleNamespace(first_offset=0, producer_id=5)]
        return original(fetcher, completed)

    monkeypatch.setattr(BoundedFetcher, "_parse_fetched_data", parse)
    source = kafka_source(
        mock_broker.bootstrap_servers, topic, f"group-{topic}", client_options=mock_broker.client_options
    )
    got = poll_until(source, lambda got: got and source.lag() == 0)
    assert [(each.offset, bytes(each.payload)) for each in got] == [(1, b"b")]
    assert source.positions() == {f"{topic}/0": 4}
    assert isolation == {IsolationLevel.READ_COMMITTED}
    source.close()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_of_one_batch_leaves_its_neighbours_and_the_position_moves_on(data):
    codec = data.draw(st.sampled_from([None, "gzip", "snappy", "lz4", "zstd"]))
    damaged = bytearray(batch([b"one" * 5, b"two" * 50, b"three"], codec=codec, base_offset=1))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(12, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    items, end = read(batch([b"a"]) + bytes(damaged) + batch([b"b"], base_offset=4))
    assert payloads(items)[0] == b"a"
    # A changed last offset may claim those behind it; the broker would then have numbered them otherwise.
    (last_offset_delta,) = struct.unpack_from(">i", damaged, 23)
    if end == 5 and last_offset_delta != 3:
        assert payloads(items)[-1] == b"b"
    assert end >= 5
    covered = [
        offset
        for item in items
        # A damaged last offset may claim two thousand million of them.
        for offset in range(
            item.offset, min(5, (item.offset if isinstance(item, StreamMessage) else item.last_offset) + 1)
        )
    ]
    assert covered == sorted(set(covered))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 5))
def test_any_bytes_end_in_a_bounded_number_of_items(data, start):
    items, end = read(data, start)
    assert len(items) <= len(data)
    assert end >= start
    if len(data) >= 12 and items:
        assert end > start


DATA = random.Random(1).randbytes(300_000) + b"a" * 3_000_000


@pytest.mark.parametrize("codec", CODECS)
def test_one_byte_over_the_bound_is_refused_with_the_head(codec):
    code, compress = CODECS[codec]
    with pytest.raises(BatchRefusedError, match="over 3299999 bytes") as refused:
        decompress(code, memoryview(compress(DATA)), len(DATA) - 1)
    assert refused.value.reason == "batch_too_large"
    assert DATA.startswith(refused.value.head)
    assert len(refused.value.head) <= HEAD_BYTES


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"garbage",
        lambda data: b"\x82SNAPPY\x00" + bytes(range(100)),
        lambda data: b"",
        lambda data: data[: len(data) // 2] + b"\x55" + data[len(data) // 2 + 1 :],
    ],
    ids=["cut", "garbage", "xerial garbage", "empty", "changed"],
)
def test_damaged_data_is_refused_or_differs(codec, damaged):
    """Some codecs have no checksum and no end mark; the records' own lengths then tell."""
    code, compress = CODECS[codec]
    refused, result = None, b""
    try:
        result = decompress(code, memoryview(damaged(compress(DATA))), len(DATA))
    except BatchRefusedError as error:
        refused = error.reason
    assert refused in (None, "corrupt_batch", "batch_too_large")
    assert bytes(result) != DATA


def test_gzip_members_in_a_row_count_together():
    data = gzip.compress(b"a" * 60) + gzip.compress(b"b" * 60) + b"\0\0"
    assert bytes(decompress(1, memoryview(data), 120)) == b"a" * 60 + b"b" * 60
    with pytest.raises(BatchRefusedError, match="over 119"):
        decompress(1, memoryview(data), 119)


def test_snappy_blocks_that_claim_more_than_they_hold_are_refused_before_they_are_allocated():
    claim = b"\xff\xff\xff\xff\x0f"
    for data in (claim, b"\x82SNAPPY\x00" + bytes(8) + struct.pack(">i", 5) + claim):
        with pytest.raises(BatchRefusedError) as refused:
            decompress(2, memoryview(data), 1000)
        assert refused.value.reason == "batch_too_large"
    for size in (-1, 0, 2**31 - 1):
        with pytest.raises(BatchRefusedError) as refused:
            decompress(2, memoryview(b"\x82SNAPPY\x00" + bytes(8) + struct.pack(">i", size)), 1000)
        assert refused.value.reason == "corrupt_batch"


_MEASURE = """
import sys
from pathlib import Path
from flexd.stream.kafka.bounded_fetcher import BatchRefusedError, decompress
import lz4.frame, snappy, zstandard
def peak():
    # Not getrusage, whose maximum starts with that of the parent.
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])
for path in sys.argv[1:]:
    data = memoryview(Path(path).read_bytes())
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        decompress(int(Path(path).name[0]), data, 16 * 2**20)
        raise SystemExit("not refused")
    except BatchRefusedError as error:
        assert error.reason == "batch_too_large", error
    print((peak() - before) // 1024)
"""


def test_a_bomb_costs_no_more_than_twice_the_bound(tmp_path):
    bombs = [tmp_path / f"{code} {name}" for name, (code, _) in CODECS.items()]
    for bomb, (_, compress) in zip(bombs, CODECS.values(), strict=True):
        bomb.write_bytes(compress(bytes(80 * 2**20)))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *map(str, bombs)],
        capture_output=True, check=True, env=child_environment(), cwd=ROOT,
    )  # fmt: skip
    for bomb, mebibytes in zip(bombs, done.stdout.split(), strict=True):
        assert int(mebibytes) <= 2 * 16 + 2 * bomb.stat().st_size // 2**20 + 8, bomb.name
