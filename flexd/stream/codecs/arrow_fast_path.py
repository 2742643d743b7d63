"""Read Arrow messages of the schemas that flexd's publishers write without Arrow's own reader.

Arrow's reader builds objects for every column and child of a batch, which takes longer than counting 2,000 ids. Here
the batch's metadata is parsed once for all messages that repeat it, and a message costs a few look-ups and bounds
checks. Nothing is refused here: for anything unusual (nulls, other types, contradicting lengths) the result is None,
and Arrow's reader decodes the message or raises. Layout: Apache Arrow columnar format 1.5, "IPC", and
`format/Message.fbs`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexd.stream.codecs import arrow_framing

_MAX_METADATA_BYTES = 4096
_PREFIX = struct.Struct("<Ii")
_END_OF_STREAM = arrow_framing.CONTINUATION + b"\0\0\0\0"

_INT32, _INT64, _FLOAT64 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8")

_KINDS: dict[pa.DataType, tuple[np.dtype[Any], bool, bool]] = {
    pa.utf8(): (np.dtype("u1"), True, False),
    pa.list_(pa.int64()): (_INT64, True, True),
    pa.list_(pa.int32()): (_INT32, True, True),
    pa.int32(): (_INT32, False, False),
    pa.int64(): (_INT64, False, False),
    pa.float64(): (_FLOAT64, False, False),
}

Array = npt.NDArray[Any]


class Column(NamedTuple):
    """A column with values of dtype ``values``. Text and lists also have offsets; their values are bytes or ids."""

    name: str
    values: np.dtype[Any]
    has_offsets: bool
    is_list: bool


class Columns(NamedTuple):
    """The columns of a batch, one element an entry. Arrays share the payload's memory."""

    tables: list[str]
    rows: list[Array]
    source_ranks: list[int]
    event_times: list[float]
    sequence_lengths: list[Array] | None
    steps: list[int] | None
    sample_ids: list[Array] | None
    user_ids: list[Array] | None


class _Place(NamedTuple):
    """Byte positions of a column from the start of the body, and its number of values."""

    offsets_at: int
    values_at: int
    values: int


class _Layout(NamedTuple):
    entries: int
    body_bytes: int
    places: tuple[_Place, ...]


def fast_columns(schema: pa.Schema) -> tuple[Column, ...] | None:
    """Return the columns of a checked schema, or None if one has a type that is not read here."""
    if any(kind not in _KINDS for kind in schema.types):
        return None
    kinds = [_KINDS[kind] for kind in schema.types]
    return tuple(Column(name, *kind) for name, kind in zip(schema.names, kinds, strict=True))


def read(payload: bytes | memoryview, schema_end: int, columns: tuple[Column, ...], max_entries: int) -> Columns | None:
    """Read the batch after the schema of a message; None if Arrow's reader has to decode it.

    Args:
        schema_end: position after the schema.
        columns: of that schema.
    """
    start = schema_end + _PREFIX.size
    if start > len(payload):
        return None
    marker, metadata_bytes = _PREFIX.unpack_from(payload, schema_end)
    body = start + metadata_bytes
    if marker != 0xFFFFFFFF or not 0 < metadata_bytes <= _MAX_METADATA_BYTES or body > len(payload):
        return None
    layout = _layout(bytes(payload[start:body]), columns)
    if layout is None or layout.entries > max_entries:
        return None
    end = body + layout.body_bytes
    if end != len(payload) and (end > len(payload) or payload[end:] != _END_OF_STREAM):
        return None
    read: dict[str, list[Any]] = {}
    for column, place in zip(columns, layout.places, strict=True):
        values = np.frombuffer(payload, column.values, place.values, body + place.values_at)
        if not column.has_offsets:
            read[column.name] = values.tolist()
            continue
        offsets = np.frombuffer(payload, _INT32, layout.entries + 1, body + place.offsets_at).tolist()
        if offsets[0] < 0 or offsets[-1] > place.values or not all(map(operator.le, offsets, offsets[1:])):
            return None
        if column.is_list:
            if not values.flags.aligned:
                values = values.copy()
            read[column.name] = [values[first:last] for first, last in itertools.pairwise(offsets)]
        else:
            try:
                read[column.name] = [
                    str(values[first:last].data, "utf-8") for first, last in itertools.pairwise(offsets)
                ]
            except UnicodeDecodeError:
                return None
    return Columns(
        read["table"], read["rows"], read["source_rank"], read["event_time"], read.get("sequence_lengths"),
        read.get("step"), read.get("sample_ids"), read.get("user_ids"),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _layout(metadata: bytes, columns: tuple[Column, ...]) -> _Layout | None:
    """Return the positions of the columns of a batch without nulls; None for any other metadata."""
    try:
        header = arrow_framing.batch_header(metadata)
    except arrow_framing.FrameError:
        return None
    if header is None or header.entries < 1:
        return None
    nodes, buffers = iter(header.nodes), iter(header.buffers)
    places: list[_Place] = []
    try:
        for column in columns:
            length, nulls = next(nodes)
            next(buffers)  # validity: not read when there are no nulls
            if length != header.entries or nulls:
                return None
            offsets_at = 0
            if column.has_offsets:
                offsets_at, offsets_bytes = next(buffers)
                if offsets_bytes < (length + 1) * _INT32.itemsize:
                    return None
            if column.is_list:
                length, nulls = next(nodes)
                next(buffers)
                if nulls:
                    return None
            values_at, values_bytes = next(buffers)
            if column.has_offsets and not column.is_list:
                length = values_bytes
            if length < 0 or values_bytes < length * column.values.itemsize:
                return None
            places.append(_Place(offsets_at, values_at, length))
    except StopIteration:
        return None
    if next(nodes, None) is not None or next(buffers, None) is not None:
        return None
    if any(at < 0 or at % 8 or size < 0 or at + size > header.body_bytes for at, size in header.buffers):
        return None
    return _Layout(header.entries, header.body_bytes, tuple(places))
