"""Record batches read within bounds: hostile headers and records; the position always moves on."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record import MemoryRecordsBuilder

from flexd.stream.kafka.bounded_fetcher import BatchLimits, BatchReader
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import RefusedMessages, StreamMessage
from tests.support.raw_kafka import CODECS, LOG_APPEND_TIME, batch, record, varint

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
    assert items == [StreamMessage("t/0", 5, b"a"), StreamMessage("t/0", 6, b"b"), StreamMessage("t/0", 7, b"c")]
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


@pytest.mark.parametrize("codec", CODECS)
def test_an_oversized_batch_is_one_refused_range_and_its_neighbours_are_read(codec):
    bomb = batch([b"z" * 9_000, b"z" * 2_000], codec=codec, base_offset=1)
    data = batch([b"a"]) + bomb + batch([b"b"], base_offset=3)
    items, end = read(data)
    refused = only_refused(items)
    assert (refused.offset, refused.last_offset, refused.messages) == (1, 2, 2)
    assert refused.reason == "batch_too_large"
    assert refused.size_bytes == len(bomb)
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
        # Control batches are left out.
        (batch([b"kept"], attributes=0x10) + batch([bytes(4)], attributes=0x30, base_offset=1)
         + batch([b"too"], base_offset=2), 0, [b"kept", b"too"], [], 3),
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
