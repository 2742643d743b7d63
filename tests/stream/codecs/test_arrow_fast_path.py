"""The fast path for Arrow messages: it is used, and it reads what Arrow reads."""

from __future__ import annotations

import io
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import CodecError
from flexd.stream.codecs import arrow_fast_path, arrow_framing, codec
from flexd.stream.types import AccessBatch

MAX = 2**20


def entry(n: int, dtype: type = np.int64, lengths: list[int] | None = None, table: str = "t") -> AccessBatch:
    split = None if lengths is None else np.array(lengths, dtype=np.int32)
    return AccessBatch(table, np.arange(n, dtype=dtype) * 3 - 1, 5, 2.5, split)


def read_fast(payload: bytes | memoryview) -> arrow_fast_path.Columns | None:
    end = arrow_framing.schema_bytes(payload)
    schema = pa.ipc.read_schema(pa.py_buffer(payload))
    columns = arrow_fast_path.fast_columns(schema)
    return None if columns is None else arrow_fast_path.read(payload, end, columns, codec.MAX_ENTRIES)


def _split(batch: AccessBatch) -> list[int] | None:
    return None if batch.sequence_lengths is None else batch.sequence_lengths.tolist()


def outcome(payload: bytes | memoryview) -> object:
    """Decode a payload into comparable values, or the reason of the refusal."""
    try:
        return [
            (b.table, b.rows.dtype, b.rows.tolist(), b.source_rank, b.event_time_seconds, _split(b))
            for b in codec.decode(payload, MAX)
        ]
    except CodecError as error:
        return error.reason


@pytest.fixture
def by_arrow(monkeypatch):
    """``outcome`` without the fast path."""

    def read(payload: bytes | memoryview) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(arrow_fast_path, "read", lambda *_: None)
            return outcome(payload)

    return read


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "entries",
    [
        [(8192, None)],
        [(0, None)],
        [(3, None), (0, None), (5, None)],
        [(6, [1, 2, 3])],
        [(6, [6]), (0, []), (2, [0, 2])],
    ],
)
def test_messages_of_publishers_are_read(dtype, entries, by_arrow):
    payload = codec.encode_arrow([entry(n, dtype, lengths, f"tabelle-ü{n}") for n, lengths in entries])
    assert read_fast(payload) is not None
    assert isinstance(outcome(payload), list)
    assert outcome(payload) == by_arrow(payload)


def test_streams_of_other_writers_are_read(by_arrow):
    columns = {
        "event_time": pa.array([1.5]),
        "source_rank": pa.array([3], type=pa.int32()),
        "rows": pa.array([[7, 8]], type=pa.list_(pa.int32())),
        "table": pa.array(["a"]),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    for version in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(metadata_version=version)) as writer:
            writer.write_batch(batch)
        payload = sink.getvalue()
        assert read_fast(payload) is not None
        assert outcome(payload) == by_arrow(payload) == [("a", np.int32, [7, 8], 3, 1.5, None)]
        assert outcome(payload + b"more") == by_arrow(payload + b"more") == "wrong_schema"


def test_unusual_messages_are_left_to_arrow():
    def stream(**changed: pa.Array) -> bytes:
        columns = {
            "table": pa.array(["a", "b"]),
            "rows": pa.array([[1], [2]], type=pa.list_(pa.int64())),
            "source_rank": pa.array([0, 1], type=pa.int32()),
            "event_time": pa.array([1.0, 2.0]),
            **changed,
        }
        batch = pa.RecordBatch.from_pydict(columns)
        return batch.schema.serialize().to_pybytes() + batch.serialize().to_pybytes()

    assert read_fast(stream()) is not None
    unusual = {
        "event_time": pa.array([1000, 2000], type=pa.timestamp("ms")),
        "table": pa.array(["a", None]),
        "rows": pa.array([[1], [None]], type=pa.list_(pa.int64())),
        "source_rank": pa.array([0, None], type=pa.int32()),
        "sequence_lengths": pa.array([[1], None], type=pa.list_(pa.int32())),
    }
    for name, column in unusual.items():
        assert read_fast(stream(**{name: column})) is None, name
    assert read_fast(stream(rows=pa.array([[1], None], type=pa.list_(pa.int64())))) is None
    assert read_fast(stream(rows=pa.array([[1], [2]], type=pa.large_list(pa.int64())))) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_messages_give_the_result_of_arrow(by_arrow_module, data):
    count = data.draw(st.integers(1, 3))
    lengths = data.draw(st.sampled_from([None, [2, 2]]))
    payload = bytearray(codec.encode_arrow([entry(4, lengths=lengths, table="ta") for _ in range(count)]))
    body = _body_start(payload)
    at = data.draw(st.integers(body, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 8]))
    damaged = bytes(payload[: len(payload) - cut])
    assert outcome(damaged) == by_arrow_module(damaged)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_metadata_never_gives_other_values_than_arrow(by_arrow_module, data):
    payload = bytearray(codec.encode_arrow([entry(4, lengths=[4]), entry(3, lengths=[1, 2])]))
    start = arrow_framing.schema_bytes(bytes(payload))
    at = data.draw(st.integers(start, _body_start(payload) - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = bytes(payload)
    short_way, arrows = outcome(damaged), by_arrow_module(damaged)
    if isinstance(arrows, list) and isinstance(short_way, list):
        assert short_way == arrows
    else:
        # Arrow verifies padding and fields that are not read here: it may refuse more, never less.
        assert not isinstance(arrows, list)


def test_publishers_messages_never_reach_arrow(monkeypatch):
    payload = codec.encode_arrow([entry(10)])
    codec.decode(payload, MAX)
    monkeypatch.setattr(pa.ipc, "read_record_batch", lambda *_: pytest.fail("read by Arrow"))
    assert codec.decode(payload, MAX)[0].rows.tolist() == entry(10).rows.tolist()


@pytest.mark.parametrize("part", ["nodes", "buffers"])
@pytest.mark.parametrize("value", [-(2**40), -8, -1, 0, 1, 5, 6, 7, 2**20, 2**40])
def test_wrong_lengths_give_the_result_of_arrow(part, value, by_arrow):
    payload = codec.encode_arrow([entry(4, lengths=[4]), entry(3, lengths=[1, 2])])
    start, body = arrow_framing.schema_bytes(payload) + 8, _body_start(payload)
    header = arrow_framing.batch_header(payload[start:body])
    pairs = getattr(header, part)
    at = payload.index(b"".join(struct.pack("<qq", *pair) for pair in pairs), start, body)
    for i in range(2 * len(pairs)):
        lying = bytearray(payload)
        struct.pack_into("<q", lying, at + 8 * i, value)
        short_way, arrows = outcome(bytes(lying)), by_arrow(bytes(lying))
        if isinstance(short_way, list):
            # Validity buffers are not looked at without nulls, and Arrow does look: all else is judged alike.
            assert short_way == arrows or _names_validity(part, i)
        else:
            assert short_way == arrows


def _names_validity(part: str, index: int) -> bool:
    return part == "buffers" and index // 2 in (0, 3, 5, 7, 9, 11, 13)


def test_a_list_that_is_longer_than_the_metadata_says_is_left_to_arrow():
    payload = codec.encode_arrow([entry(4)])
    start, body = arrow_framing.schema_bytes(payload) + 8, _body_start(payload)
    header = arrow_framing.batch_header(payload[start:body])
    columns = arrow_fast_path.fast_columns(pa.ipc.read_schema(pa.py_buffer(payload)))
    assert arrow_fast_path._layout(payload[start:body], columns) is not None
    assert arrow_fast_path._layout(payload[start:body], columns[:-1]) is None
    assert arrow_fast_path._layout(payload[start:body], (*columns, columns[-1])) is None
    shorter = bytearray(payload[start:body])
    at = shorter.index(struct.pack("<q", header.body_bytes))
    struct.pack_into("<q", shorter, at, header.body_bytes - 8)
    assert arrow_fast_path._layout(bytes(shorter), columns) is None


@pytest.fixture(scope="module")
def by_arrow_module():
    def read(payload: bytes) -> object:
        original = arrow_fast_path.read
        arrow_fast_path.read = lambda *_: None
        try:
            return outcome(payload)
        finally:
            arrow_fast_path.read = original

    return read


def _body_start(payload: bytes | bytearray) -> int:
    start = arrow_framing.schema_bytes(bytes(payload))
    return start + 8 + int(struct.unpack_from("<i", payload, start + 4)[0])


def test_rows_share_the_memory_and_are_aligned():
    payload = codec.encode_arrow([entry(100)])
    start = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    rows = read_fast(payload).rows[0]
    assert start <= rows.ctypes.data < start + len(payload)
    shifted = read_fast(memoryview(b"x" + payload)[1:]).rows[0]
    assert shifted.flags.aligned
    assert np.array_equal(shifted, rows)


def test_too_many_entries_are_left_to_arrow():
    payload = codec.encode_arrow([entry(1), entry(1)])
    columns = arrow_fast_path.fast_columns(pa.ipc.read_schema(pa.py_buffer(payload)))
    assert arrow_fast_path.read(payload, arrow_framing.schema_bytes(payload), columns, 2) is not None
    assert arrow_fast_path.read(payload, arrow_framing.schema_bytes(payload), columns, 1) is None
