"""The codec: round trips, refusals with their reasons, and robustness against any bytes."""

import io
import itertools
import json
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import CodecError, StreamError
from flexd.stream import codec
from flexd.stream.codec import REASONS, decode, encode_arrow
from flexd.stream.types import AccessBatch

MAX = 1 << 20


OPTIONAL = ("sequence_lengths", "step", "sample_ids", "user_ids")


def fields(batch: AccessBatch) -> tuple[object, ...]:
    lengths, *ids = (
        None if each is None else each.tolist() for each in (batch.sequence_lengths, batch.sample_ids, batch.user_ids)
    )
    return batch.table, batch.rows.tolist(), batch.source_rank, batch.event_time_seconds, lengths, batch.step, *ids


def read_by_arrow(payload: bytes) -> list[tuple[object, ...]]:
    """Read a message with Arrow's own stream reader, independently of the codec."""
    batch = pa.ipc.open_stream(payload).read_next_batch()
    batch.validate(full=True)
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    for name in OPTIONAL:
        columns.setdefault(name, [None] * batch.num_rows)
    return list(zip(*(columns[name] for name in NAMES), strict=True))


NAMES = ("table", "rows", "source_rank", "event_time", *OPTIONAL)


def encode_json(sent: list[AccessBatch]) -> bytes:
    """Write a message as people do: an object a line, without the keys that have no value."""
    entries = [
        {name: value for name, value in zip(NAMES, fields(batch), strict=True) if value is not None} for batch in sent
    ]
    return "\n".join(map(json.dumps, entries)).encode()


@st.composite
def batches(draw, dtype=None):
    kind = dtype or draw(st.sampled_from([np.int32, np.int64]))
    info = np.iinfo(kind)
    lengths = draw(st.none() | st.lists(st.integers(0, 5), max_size=6))
    total = draw(st.integers(0, 20)) if lengths is None else sum(lengths)
    rows = draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=total, max_size=total))
    name = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
    ids = [None, None]
    if lengths is not None:
        count, id64 = len(lengths), st.integers(-(2**63), 2**63 - 1)
        ids = [draw(st.none() | st.lists(id64, min_size=count, max_size=count)) for _ in ids]
    return AccessBatch(
        name,
        np.array(rows, dtype=kind),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.floats(0, 1e11)),
        None if lengths is None else np.array(lengths, dtype=np.int32),
        draw(st.none() | st.integers(0, 2**62 - 1)),
        *(None if each is None else np.array(each, dtype=np.int64) for each in ids),
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(batches(), min_size=1, max_size=5))
def test_both_formats_round_trip(sent):
    expected = [fields(batch) for batch in sent]
    wide = any(batch.rows.dtype == np.int64 for batch in sent)
    for encode, dtype in ((encode_arrow, np.int64 if wide else np.int32), (encode_json, np.int64)):
        payload = encode(sent)
        received = decode(payload, MAX)
        assert [fields(batch) for batch in received] == expected
        assert {batch.rows.dtype for batch in received} == {np.dtype(dtype)}
        assert [fields(batch) for batch in sent] == expected, "encoding leaves the batches unchanged"
        assert payload == encode(sent), "decoding leaves the payload unchanged"
    assert read_by_arrow(encode_arrow(sent)) == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_share_the_memory_of_an_aligned_payload_and_are_aligned_in_any(dtype):
    payload = encode_arrow([AccessBatch("t", np.arange(100, dtype=dtype), 0, 1.0)])
    start = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    assert start <= decode(payload, MAX)[0].rows.ctypes.data < start + len(payload)
    rows = decode(memoryview(b"x" + payload)[1:], MAX)[0].rows
    assert rows.flags.aligned
    assert np.array_equal(rows, np.arange(100))


def stream(columns: dict[str, pa.Array], **write_options) -> bytes:
    batch = pa.RecordBatch.from_pydict(columns)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**write_options)) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def columns(**changed) -> dict[str, pa.Array]:
    base = {
        "table": pa.array(["a", "b"]),
        "rows": pa.array([[1, 2, 3], [4]], type=pa.list_(pa.int64())),
        "source_rank": pa.array([0, 1], type=pa.int32()),
        "event_time": pa.array([1.5, 2.0]),
    }
    base.update(changed)
    return {name: column for name, column in base.items() if column is not None}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"table": pa.array(["a", "b"], type=pa.large_utf8())},
        {"rows": pa.array([[1, 2, 3], [4]], type=pa.large_list(pa.int32()))},
        {"rows": pa.array([[1, 2, 3], [4]], type=pa.list_(pa.field("element", pa.int32(), nullable=False)))},
        {"event_time": pa.array([1500, 2000], type=pa.timestamp("ms", tz="UTC"))},
        {"event_time": pa.array([1_500_000_000, 2_000_000_000], type=pa.timestamp("ns"))},
        {"sequence_lengths": pa.array([[1, 2], None], type=pa.list_(pa.int32()))},
    ],
)
def test_messages_of_other_arrow_writers_are_read(changed):
    received = decode(stream(columns(**changed)), MAX)
    assert ([b.table for b in received], [b.rows.tolist() for b in received]) == (["a", "b"], [[1, 2, 3], [4]])
    assert ([b.event_time_seconds for b in received], [b.source_rank for b in received]) == ([1.5, 2.0], [0, 1])
    if "sequence_lengths" in changed:
        assert (received[0].sequence_lengths.tolist(), received[1].sequence_lengths) == ([1, 2], None)


def reason_of(payload: bytes, limit: int = MAX) -> str:
    with pytest.raises(CodecError) as caught:
        decode(payload, limit)
    assert caught.value.reason in REASONS
    return caught.value.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rows": None}, "wrong_schema"),
        ({"extra": pa.array([1, 2])}, "wrong_schema"),
        ({"rows": pa.array([[1.0], [2.0]])}, "wrong_type"),
        ({"rows": pa.array([1, 2])}, "wrong_type"),
        ({"rows": pa.array([[1], [2]], type=pa.list_(pa.uint64()))}, "wrong_type"),
        ({"table": pa.array([b"a", b"b"])}, "wrong_type"),
        ({"table": pa.array(["a", "b"]).dictionary_encode()}, "wrong_type"),
        ({"source_rank": pa.array([0.0, 1.0])}, "wrong_type"),
        ({"event_time": pa.array([1, 2])}, "wrong_type"),
        ({"rows": pa.array([[1], None], type=pa.list_(pa.int64()))}, "null_value"),
        ({"rows": pa.array([[1], [None]], type=pa.list_(pa.int64()))}, "null_value"),
        ({"table": pa.array(["a", None])}, "null_value"),
        ({"event_time": pa.array([1.0, float("nan")])}, "bad_event_time"),
        ({"event_time": pa.array([1.0, -1.0])}, "bad_event_time"),
        ({"event_time": pa.array([1.0, 1.7e12])}, "bad_event_time"),
        ({"source_rank": pa.array([0, -1], type=pa.int32())}, "bad_source_rank"),
        ({"table": pa.array(["a", ""])}, "bad_table_name"),
        ({"table": pa.array(["a", "b" * 257])}, "bad_table_name"),
        ({"sequence_lengths": pa.array([[1, 1], [1]], type=pa.list_(pa.int32()))}, "bad_lengths"),
        ({"sequence_lengths": pa.array([[4, -1], [1]], type=pa.list_(pa.int32()))}, "bad_lengths"),
        ({"sample_ids": pa.array([[1], [1]], type=pa.list_(pa.int64()))}, "bad_lengths"),
        ({"user_ids": pa.array([[1], [1]], type=pa.list_(pa.int32()))}, "wrong_type"),
        ({"step": pa.array([3, -3])}, "bad_step"),
        ({"step": pa.array([3, 2**62])}, "bad_step"),
        (
            {
                "sequence_lengths": pa.array([[3], [1]], type=pa.list_(pa.int32())),
                "sample_ids": pa.array([[7], [7, 8]], type=pa.list_(pa.int64())),
            },
            "bad_lengths",
        ),
    ],
)
def test_refused_arrow(changed, reason):
    assert reason_of(stream(columns(**changed))) == reason


LINE = {"table": "a", "rows": [1, 2], "source_rank": 0, "event_time": 1.5}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([LINE, {**LINE, "extra": 1}], "wrong_schema"),
        ([{"table": "a"}], "wrong_schema"),
        ([LINE, [1]], "wrong_type"),
        ([{**LINE, "rows": [1.5]}], "wrong_type"),
        ([{**LINE, "rows": ["1"]}], "wrong_type"),
        ([{**LINE, "rows": [True]}], "wrong_type"),
        ([{**LINE, "rows": [2**64]}], "wrong_type"),
        ([{**LINE, "event_time": "5"}], "wrong_type"),
        ([{**LINE, "source_rank": 2**31}], "wrong_type"),
        ([LINE, {**LINE, "rows": None}], "null_value"),
        ([LINE, {**LINE, "rows": [None]}], "null_value"),
        ([{**LINE, "event_time": float("nan")}], "bad_event_time"),
        ([{**LINE, "step": -1}], "bad_step"),
        ([LINE] * 65_537, "too_many_entries"),
    ],
    ids=itertools.count(),
)
def test_refused_json(lines, reason):
    assert reason_of("\n".join(map(json.dumps, lines)).encode(), 1 << 23) == reason


GOOD = stream(columns())
SCHEMA = pa.RecordBatch.from_pydict(columns()).schema.serialize().to_pybytes()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{\xff", "bad_json"),
        (b'{"a":' * 10_000, "bad_json"),
        (b"PK\x03\x04", "not_arrow_or_json"),
        (b"ARROW1\0\0" + GOOD, "not_arrow_or_json"),
        (GOOD + b"x" * 20, "wrong_schema"),
        (GOOD[: len(GOOD) // 2], "corrupt"),
        (GOOD + bytes(MAX), "too_large"),
        (SCHEMA, "empty"),
        (SCHEMA + b"\xff\xff\xff\xff\0\0\0\0", "empty"),
        (stream({name: column[:0] for name, column in columns().items()}), "empty"),
    ],
    ids=itertools.count(),
)
def test_refused_framing(payload, reason):
    assert reason_of(payload) == reason


def big_endian(payload: bytes) -> bytes:
    """Let the schema declare big-endian values: its endianness becomes the bytes of the next field, which are not 0."""
    metadata_at = 8
    root = metadata_at + struct.unpack_from("<I", payload, metadata_at)[0]
    header_field = root + struct.unpack_from("<H", payload, root - struct.unpack_from("<i", payload, root)[0] + 8)[0]
    schema = header_field + struct.unpack_from("<I", payload, header_field)[0]
    endianness_slot = schema - struct.unpack_from("<i", payload, schema)[0] + 4
    changed = bytearray(payload)
    assert struct.unpack_from("<HH", changed, endianness_slot) == (0, 4), "no endianness, then the fields"
    struct.pack_into("<H", changed, endianness_slot, 4)
    return bytes(changed)


def test_a_schema_that_says_big_endian_is_refused():
    assert decode(GOOD, MAX)
    assert reason_of(big_endian(GOOD)) == "wrong_schema"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_buffers_are_refused_before_memory_is_allocated(compression):
    """Each claims 2^40 bytes uncompressed."""
    payload = stream(columns(), compression=compression)
    # The four row ids: a compressed buffer begins with its length uncompressed.
    bomb = payload.replace(struct.pack("<q", 32), struct.pack("<q", 2**40))
    assert bomb != payload
    assert reason_of(bomb) == "compressed"


def test_contents_that_contradict_the_metadata_are_refused():
    """Offsets out of range, which Arrow reads without a check."""
    good = stream(columns())
    offsets = struct.pack("<3i", 0, 3, 4)
    assert good.count(offsets) == 1
    for bad in ((0, 3, 2), (0, 3, 5), (-1, 3, 4), (3, 0, 4), (0, 2**31 - 1, 4)):
        assert reason_of(good.replace(offsets, struct.pack("<3i", *bad))) == "corrupt"
    assert reason_of(good.replace(struct.pack("<3i", 0, 1, 2), struct.pack("<3i", 0, 2, 1))) == "corrupt"
    assert reason_of(stream(columns(table=pa.array(["aaaa", "b"]))).replace(b"aaaa", b"a\xff\xffa")) == "corrupt"


def test_too_many_entries():
    many = codec.MAX_ENTRIES + 1
    payload = stream(
        {
            "table": pa.array(["t"] * many),
            "rows": pa.array([[]] * many, type=pa.list_(pa.int32())),
            "source_rank": pa.array([0] * many, type=pa.int32()),
            "event_time": pa.array([0.0] * many),
        }
    )
    assert reason_of(payload, limit=1 << 24) == "too_many_entries"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"\xff\xff\xff\xff", SCHEMA]))
def test_random_bytes_only_raise_codec_errors(tail, head):
    reason_of(head + tail)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_arrow_is_read_or_refused(data):
    payload = bytearray(stream(columns(sequence_lengths=pa.array([[1, 2], [1]], type=pa.list_(pa.int32())))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(payload) - 8))
        if data.draw(st.booleans()):
            payload[at] = data.draw(st.integers(0, 255))
        else:
            struct.pack_into("<q", payload, at, data.draw(st.sampled_from([-1, 0, 1, 2**31 - 1, 2**40, 2**62])))
    try:
        received = decode(bytes(payload), MAX)
    except CodecError as error:
        if error.reason in REASONS:
            return
        raise
    # An accepted message holds what Arrow reads in it, and nothing out of range.
    assert [fields(batch) for batch in received] == read_by_arrow(bytes(payload))
    for batch in received:
        assert 0 < len(batch.table) <= codec.MAX_TABLE_NAME_CHARS
        assert 0 <= batch.source_rank < 2**31
        assert 0 <= batch.event_time_seconds <= codec.MAX_EVENT_TIME_SECONDS
        assert batch.sequence_lengths is None or int(batch.sequence_lengths.sum()) == len(batch.rows)


@pytest.mark.parametrize("batch_list", [[], [AccessBatch("t", np.zeros(0, dtype=np.int32), 0, 0.0)] * 65_537])
def test_the_encoder_refuses_messages_that_the_decoder_would(batch_list):
    with pytest.raises(StreamError):
        encode_arrow(batch_list)
