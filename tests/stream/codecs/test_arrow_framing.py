"""Framing of Arrow messages: batch headers, byte order and format versions."""

from __future__ import annotations

import io
import struct

import numpy as np
import pyarrow as pa
import pytest

from flexd.stream.codecs import arrow_framing, codec
from flexd.stream.types import AccessBatch


def entry(n: int, dtype: type = np.int64, lengths: list[int] | None = None, table: str = "t") -> AccessBatch:
    split = None if lengths is None else np.array(lengths, dtype=np.int32)
    return AccessBatch(table, np.arange(n, dtype=dtype) * 3 - 1, 5, 2.5, split)


@pytest.mark.parametrize(("compression", "known"), [(None, True), ("lz4", False), ("zstd", False)])
def test_compressed_batches_are_left_to_arrow(compression, known):
    batch = pa.RecordBatch.from_pydict({"rows": pa.array([list(range(1000))], type=pa.list_(pa.int64()))})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    payload = sink.getvalue()
    metadata = payload[arrow_framing.schema_bytes(payload) + 8 : _body_start(payload)]
    assert (arrow_framing.batch_header(metadata) is not None) == known


def _body_start(payload: bytes | bytearray) -> int:
    start = arrow_framing.schema_bytes(bytes(payload))
    return start + 8 + int(struct.unpack_from("<i", payload, start + 4)[0])


def _schema_message(endianness: int) -> bytes:
    """Build the smallest schema message: a Message table whose Schema table has only an endianness."""
    metadata = struct.pack(
        "<I4x HHHHHH iHBxI HHH2x iH2x",
        20,  # root: the Message table
        *(10, 16, 4, 6, 8, 0),  # its vtable at 8: version, type, header
        *(12, 4, 1, 12),  # at 20: vtable, V5, Schema, header
        *(6, 8, 4),  # vtable of the Schema at 32: endianness
        *(8, endianness),  # at 40
    )
    return arrow_framing.CONTINUATION + struct.pack("<i", len(metadata)) + metadata


def test_big_endian_bodies_are_left_to_arrow():
    assert arrow_framing.is_little_endian(_schema_message(0))
    assert not arrow_framing.is_little_endian(_schema_message(1))
    assert arrow_framing.is_little_endian(pa.schema([("a", pa.int32())]).serialize().to_pybytes())


def test_old_formats_are_left_to_arrow():
    payload = codec.encode_arrow([entry(4)])
    metadata = bytearray(payload[arrow_framing.schema_bytes(payload) + 8 : _body_start(payload)])
    (root,) = struct.unpack_from("<I", metadata)
    (back,) = struct.unpack_from("<i", metadata, root)
    (version_field,) = struct.unpack_from("<H", metadata, root - back + 4)
    at = root + version_field
    assert struct.unpack_from("<h", metadata, at) == (4,)
    for version, known in ((2, False), (3, True), (4, True), (5, False)):
        struct.pack_into("<h", metadata, at, version)
        assert (arrow_framing.batch_header(bytes(metadata)) is not None) == known
