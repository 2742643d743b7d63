"""Encode and decode access messages: an Arrow IPC stream of one record batch, or lines of JSON.

``check`` is the one place that checks a batch: ``decode`` calls it for each entry, publishers before they queue one.

Raises:
    MissingExtraError: at import, if pyarrow is not installed or does not load with the numpy that is.
"""

import functools
import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from flexd.core.arrays import RowArray
from flexd.core.errors import CodecError, MissingExtraError, StreamError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.stream.types import AccessBatch

try:
    import pyarrow as pa
except ImportError as error:
    if "numpy" in str(error).lower():
        USAGE_WARNINGS.note(UsageWarningKind.NUMPY, f"access messages need pyarrow ({error}): install numpy 2")
    raise MissingExtraError(
        f"access messages need pyarrow ({error})",
        remedy="pip install 'flexd[publisher]' in a trainer's image, which brings numpy 2; with numpy 1 an older "
        "pyarrow (16), or count with flexd.Tap, which needs neither",
    ) from error

# Every value that ``CodecError.reason`` takes.
REASONS = (
    "bad_event_time",
    "bad_json",
    "bad_lengths",
    "bad_source_rank",
    "bad_step",
    "bad_table_name",
    "compressed",
    "corrupt",
    "empty",
    "missing_field",
    "not_arrow_or_json",
    "null_value",
    "too_large",
    "too_many_entries",
    "unknown_id",
    "unknown_schema",
    "wrong_schema",
    "wrong_type",
)

# Maximum entries of a message. Without it, a message of empty entries would cost 20 times its size in objects.
MAX_ENTRIES = 65_536
MAX_TABLE_NAME_CHARS = 256
# Year 5138. Larger values are milliseconds or finer by mistake, and would decay every counter to nothing.
MAX_EVENT_TIME_SECONDS = 1e11

_REQUIRED = ("table", "rows", "source_rank", "event_time")
# Columns of a message in the order of the fields of ``AccessBatch``.
_TYPES = {
    "table": pa.utf8(),
    "rows": pa.list_(pa.int64()),
    "source_rank": pa.int32(),
    "event_time": pa.float64(),
    "sequence_lengths": pa.list_(pa.int32()),
    "step": pa.int64(),
    "sample_ids": pa.list_(pa.int64()),
    "user_ids": pa.list_(pa.int64()),
}
_OPTIONAL = tuple(name for name in _TYPES if name not in _REQUIRED)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


_CONTINUATION = b"\xff\xff\xff\xff"
_NO_MARK = "write UTF-8 without one"
_ONCE = "send the bytes as they are: the producer's compression.type compresses batches"
# First bytes of what other producers send: what it is, and the remedy.
_OTHER_HEADS = {
    b"\x00": ("a schema registry's header", "set stream.mapping, or produce without the registry's serializer"),
    b"\xef\xbb\xbf": ("a byte-order mark", _NO_MARK),
    b"\xff\xfe": ("a byte-order mark", _NO_MARK),
    b"\xfe\xff": ("a byte-order mark", _NO_MARK),
    b"[": ("a JSON array", "set stream.mapping, or send its objects, one a line"),
    b"\x1f\x8b": ("gzip data", _ONCE),
    b"\x28\xb5\x2f\xfd": ("zstd data", _ONCE),
    b"ARRO": ("an Arrow file", "write Arrow's stream format"),
}

_UINT16, _UINT32, _INT32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")


def encode_arrow(batches: Sequence[AccessBatch]) -> bytes:
    """Encode one message: an Arrow IPC stream of one record batch, with one entry per batch.

    Columns: ``table`` utf8, ``rows`` list<int64> (list<int32> if all are), ``source_rank`` int32, ``event_time``
    float64 Unix seconds; ``sequence_lengths`` list<int32>, ``step`` int64, ``sample_ids`` and ``user_ids`` list<int64>
    if any batch has them.

    Raises:
        StreamError: no batches, or more entries or ids than a message can hold.
    """
    if not 0 < len(batches) <= MAX_ENTRIES:
        raise StreamError(f"{len(batches)} entries in a message", remedy=f"send 1 to {MAX_ENTRIES}")
    if sum(len(b.rows) for b in batches) >= 2**31:
        raise StreamError("more than 2^31 - 1 row ids in a message", remedy="send several messages")
    wide = any(b.rows.dtype == np.int64 for b in batches)
    columns = {
        "table": pa.array([b.table for b in batches], type=pa.utf8()),
        "rows": _list_array([b.rows for b in batches], np.dtype(np.int64 if wide else np.int32)),
        "source_rank": pa.array(np.array([b.source_rank for b in batches], dtype=np.int32)),
        "event_time": pa.array(np.array([b.event_time_seconds for b in batches], dtype=np.float64)),
    }
    for name in _OPTIONAL:
        values = [getattr(b, name) for b in batches]
        if any(value is not None for value in values):
            kind = _TYPES[name]
            columns[name] = (
                _list_array(values, np.dtype(kind.value_type.to_pandas_dtype()))
                if _is_list(kind)
                else pa.array(values, type=kind)
            )
    schema, schema_bytes = _schema(wide, tuple(columns))
    return b"".join((schema_bytes, pa.RecordBatch.from_arrays(list(columns.values()), schema=schema).serialize()))


def decode(payload: bytes | memoryview, max_message_bytes: int) -> list[AccessBatch]:
    """Decode the entries of one message, in order; Arrow row ids share the payload's memory where it is aligned.

    A message is decoded whole or not at all. For any bytes, memory is bounded by a small multiple of
    ``max_message_bytes``. Unknown columns and JSON keys are refused, so that a misspelt optional one is noticed.

    Raises:
        CodecError: ``reason`` is one of ``REASONS``.
    """
    if len(payload) > max_message_bytes:
        fail("too_large", f"{len(payload)} bytes, at most {max_message_bytes} are read")
    head = bytes(payload[:4])
    if not head:
        fail("empty", "no bytes")
    if head != _CONTINUATION and head[:1] not in b"{ \t\r\n":
        what, remedy = next(
            (known for first, known in _OTHER_HEADS.items() if head.startswith(first)), (repr(head), "")
        )
        fail("not_arrow_or_json", f"begins with {what}", remedy)
    try:
        schema, batch = _read_batch(payload) if head == _CONTINUATION else _read_json(payload)
        if not 0 < batch.num_rows <= MAX_ENTRIES:
            reason = "empty" if batch.num_rows == 0 else "too_many_entries"
            fail(reason, f"{batch.num_rows} entries, 1 to {MAX_ENTRIES} are read")
        # Arrow reads offsets and text without a check.
        batch.validate(full=True)
        return _entries(batch, schema)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
        fail("corrupt", f"Arrow refuses it: {str(error)[:200]}")


def fail(reason: str, message: str, remedy: str = "") -> NoReturn:
    """Raise the CodecError of a message."""
    raise CodecError(f"access message refused ({reason}): {message}", reason=reason, remedy=remedy)


def refuse_head(payload: bytes, usual: bytes = b"") -> None:
    """Raise CodecError if there are no bytes, or the first are those of another format; ``usual`` ones are not."""
    if not payload:
        fail("empty", "no bytes")
    for first, (what, remedy) in _OTHER_HEADS.items():
        if payload.startswith(first) and first != usual:
            fail("corrupt", f"begins with {what}", remedy)


def check(batch: AccessBatch) -> None:
    """Check one batch: every array, and every number by its range.

    Raises:
        CodecError: ``reason`` is one of ``REASONS``.
    """
    rows, lengths = batch.rows, batch.sequence_lengths
    if rows.ndim != 1 or rows.dtype not in (np.int32, np.int64):
        fail("wrong_type", f"rows are {rows.dtype}{list(rows.shape)}, one dimension of int32 or int64 is read")
    if not isinstance(batch.table, str) or not 0 < len(batch.table) <= MAX_TABLE_NAME_CHARS:
        fail("bad_table_name", f"{len(batch.table)} characters, 1 to {MAX_TABLE_NAME_CHARS} are allowed")
    if batch.source_rank < 0:
        fail("bad_source_rank", f"source_rank {batch.source_rank}")
    # In this form the comparison fails for NaN too.
    if not 0 <= batch.event_time_seconds <= MAX_EVENT_TIME_SECONDS:
        is_finer = batch.event_time_seconds > MAX_EVENT_TIME_SECONDS
        fail(
            "bad_event_time",
            f"event_time {batch.event_time_seconds}, Unix seconds are expected",
            "send seconds, not milliseconds or finer" if is_finer else "",
        )
    if batch.step is not None and not 0 <= batch.step <= 2**62 - 1:
        fail("bad_step", f"step {batch.step}, 0 to {2**62 - 1} are read")
    if lengths is not None and (
        lengths.ndim != 1 or (len(lengths) and lengths.min() < 0) or int(lengths.sum(dtype=np.int64)) != len(rows)
    ):
        fail("bad_lengths", f"sequence_lengths do not sum to the {len(rows)} rows, or one is negative")
    for name, ids in (("sample_ids", batch.sample_ids), ("user_ids", batch.user_ids)):
        if ids is not None and (lengths is None or ids.shape != lengths.shape):
            fail("bad_lengths", f"{len(ids)} {name}: one is needed for each of sequence_lengths")


def _list_array(parts: Sequence[RowArray | None], dtype: np.dtype[Any]) -> pa.ListArray:
    missing = [part is None for part in parts]
    arrays = [np.empty(0, dtype=dtype) if part is None else part for part in parts]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(part) for part in arrays], out=offsets[1:])
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    mask = pa.array(missing) if any(missing) else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values, dtype=dtype)), mask=mask)


@functools.cache
def _schema(wide: bool, names: tuple[str, ...]) -> tuple[pa.Schema, bytes]:
    fields = {name: _TYPES[name] for name in names}
    if not wide:
        fields["rows"] = pa.list_(pa.int32())
    schema = pa.schema(list(fields.items()))
    return schema, schema.serialize().to_pybytes()


class _Schema(NamedTuple):
    """A checked schema: its columns by name, and the dtypes of the values of those that are lists."""

    schema: pa.Schema
    columns: dict[str, int]
    lists: dict[str, np.dtype[Any]]


# Checked schemas by their bytes: producers repeat their schema in every message.
_schemas: dict[bytes, _Schema] = {}


def _read_batch(payload: bytes | memoryview) -> tuple[_Schema, pa.RecordBatch]:
    stream = pa.BufferReader(pa.py_buffer(payload))
    schema = _read_schema(payload, stream)
    return schema, _read_next(payload, stream, schema.schema)


def read_record_batch(payload: bytes, max_rows: int) -> pa.RecordBatch:
    """Read a message of any columns. Raises CodecError: it is none, is too long, or breaks Arrow's rules."""
    if payload[:4] != _CONTINUATION:
        refuse_head(payload)
        fail("corrupt", f"begins with {payload[:4]!r}, Arrow's stream format is read")
    try:
        stream = pa.BufferReader(pa.py_buffer(payload))
        schema = _schema_of(pa.ipc.read_message(stream))
        batch = _read_next(payload, stream, schema)
        if batch.num_rows > max_rows:
            fail("too_many_entries", f"{batch.num_rows} events, {max_rows} are read")
        batch.validate(full=True)
        return batch
    except (pa.ArrowException, EOFError, OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
        fail("corrupt", f"Arrow refuses it: {str(error)[:200]}")


def check_nesting(batch: pa.RecordBatch, max_values: int) -> None:
    """Raise CodecError if an array of a batch has more values than that, or may repeat them: values without bytes, and
    arrays that refer to others, would make a short message long."""
    arrays = list(batch.columns)
    for array in arrays:
        kind = array.type
        if len(array) > max(max_values, batch.num_rows):
            fail("too_large", f"{len(array)} values of type {str(kind)[:80]}")
        if pa.types.is_struct(kind):
            arrays += [array.field(at) for at in range(kind.num_fields)]
        elif _is_list(kind) or pa.types.is_fixed_size_list(kind):
            arrays.append(array.values)
        elif pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
            fail("wrong_type", f"a column of type {str(kind)[:80]}", "write lists, structs and plain values")


def _read_next(payload: bytes | memoryview, stream: pa.BufferReader, schema: pa.Schema) -> pa.RecordBatch:
    try:
        message = pa.ipc.read_message(stream)
    except EOFError:
        fail("empty", "the Arrow stream holds no record batch")
    if message.type != "record batch":
        fail("wrong_schema", f"Arrow message of type {message.type} where a record batch was expected")
    # Arrow allocates the length that each compressed buffer claims to have uncompressed. ``format/Message.fbs``: a
    # ``Message`` has its header as field 2, a ``RecordBatch`` its compression as field 3. Arrow has verified both.
    metadata = memoryview(message.metadata)
    batch = _child(metadata, _UINT32.unpack_from(metadata)[0], 2)
    if batch is not None and _child(metadata, batch, 3) is not None:
        fail("compressed", "the Arrow buffers are compressed")
    if bytes(payload[stream.tell() :][:9]) not in (b"", _CONTINUATION + bytes(4)):
        fail("wrong_schema", "bytes after the record batch: one batch per message")
    return pa.ipc.read_record_batch(message, schema)


def _read_schema(payload: bytes | memoryview, stream: pa.BufferReader) -> _Schema:
    # A cached schema must make no difference: a replay after a restart must give the same result for every message.
    key = bytes(payload[: 8 + min(int.from_bytes(payload[4:8], "little"), 2**16)])
    known = _schemas.get(key)
    if known is not None:
        stream.seek(len(key))
        return known
    try:
        known = _checked(_schema_of(pa.ipc.read_message(stream)))
    except EOFError:
        fail("empty", "the Arrow stream holds no record batch")
    if len(_schemas) >= 64:
        _schemas.clear()
    if stream.tell() == len(key):
        _schemas[key] = known
    return known


def _schema_of(message: pa.Message) -> pa.Schema:
    if message.type != "schema":
        fail("wrong_schema", f"the first Arrow message is a {message.type}")
    schema = pa.ipc.read_schema(message)
    # Arrow swaps the bytes of a batch of the other byte order, without a check of the offsets that it swaps.
    if not schema.equals(pa.schema(list(schema))):
        fail("wrong_schema", "big-endian values, little-endian ones are read")
    return schema


def _child(flatbuffer: memoryview, table: int, field: int) -> int | None:
    """Return the position of the table that a field of a table points at; None if the field is absent."""
    vtable = table - _INT32.unpack_from(flatbuffer, table)[0]
    slot = 4 + 2 * field
    if slot + 2 > _UINT16.unpack_from(flatbuffer, vtable)[0]:
        return None
    offset = _UINT16.unpack_from(flatbuffer, vtable + slot)[0]
    return table + offset + int(_UINT32.unpack_from(flatbuffer, table + offset)[0]) if offset else None


def _read_json(payload: bytes | memoryview) -> tuple[_Schema, pa.RecordBatch]:
    try:
        # Not ``splitlines``: text may hold other line separators, such as U+2028.
        entries = [json.loads(line) for line in bytes(payload).decode().split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        fail("bad_json", str(error)[:200])
    if not all(isinstance(entry, dict) for entry in entries):
        fail("wrong_type", "a line is no JSON object")
    names = dict.fromkeys(itertools.chain.from_iterable(entries)) or _REQUIRED
    known = _checked(pa.schema({name: _TYPES.get(name, pa.null()) for name in names}))
    columns = [_json_column(name, [entry.get(name) for entry in entries]) for name in names]
    return known, pa.RecordBatch.from_arrays(columns, schema=known.schema)


def _json_column(name: str, values: list[Any]) -> pa.Array:
    """Convert the values of a key. Arrow refuses mixed types, and casts numbers of the wrong type: they are checked."""
    kind = _TYPES[name]
    try:
        array = pa.array(values)
        found, wanted = (each.value_type if _is_list(each) else each for each in (array.type, kind))
        is_integer = pa.types.is_integer(found) and not pa.types.is_string(wanted)
        if not (is_integer or found in (wanted, pa.null())):
            fail("wrong_type", f"{name} holds {str(array.type)[:200]}, expected {kind}")
        return array.cast(kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        fail("wrong_type", f"{name}: {str(error)[:200]}")


def _checked(schema: pa.Schema) -> _Schema:
    names = schema.names
    if len(set(names)) != len(names) or not set(_TYPES).issuperset(names) or not set(_REQUIRED).issubset(names):
        optional = " and ".join(_OPTIONAL)
        others = [name for name in names if name not in _TYPES]
        fail(
            "wrong_schema",
            f"columns {str(names)[:200]}, expected {list(_REQUIRED)} and optionally {optional}",
            f"leave {str(others)[:200]} out, or set stream.mapping" if others else "",
        )
    for name, kind in zip(names, schema.types, strict=True):
        if not _is_read(name, kind):
            fail("wrong_type", f"column {name!r} is {str(kind)[:200]}")
    lists = {each.name: np.dtype(each.type.value_type.to_pandas_dtype()) for each in schema if _is_list(each.type)}
    return _Schema(schema, {name: at for at, name in enumerate(names)}, lists)


def _is_read(name: str, kind: pa.DataType) -> bool:
    wanted = _TYPES[name]
    if _is_list(wanted):
        values = (pa.int32(), pa.int64()) if name == "rows" else (wanted.value_type,)
        return _is_list(kind) and kind.value_type in values
    return kind in (wanted, pa.large_utf8() if name == "table" else wanted) or (
        name == "event_time" and bool(pa.types.is_timestamp(kind))
    )


def _entries(batch: pa.RecordBatch, schema: _Schema) -> list[AccessBatch]:
    columns = {name: batch.column(at) for name, at in schema.columns.items()}
    for name in _REQUIRED:
        if columns[name].null_count:
            fail("null_value", f"column {name!r} has null entries")
    values: dict[str, list[Any]] = {name: _lists(name, columns[name], dtype) for name, dtype in schema.lists.items()}
    values["event_time"] = _event_times(columns["event_time"])
    none: list[None] = [None] * batch.num_rows
    for name in _TYPES:
        if name not in values:
            values[name] = columns[name].to_pylist() if name in columns else none
    batches = list(map(AccessBatch, *(values[name] for name in _TYPES)))
    for each in batches:
        check(each)
    return batches


def _lists(name: str, column: pa.Array, dtype: np.dtype[Any]) -> list[Any]:
    if pa.types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    missing, offsets, missing_values, data = column.buffers()
    if missing_values is not None and column.values.null_count:
        fail("null_value", f"column {name!r} has null values")
    values = np.frombuffer(b"" if data is None else data, dtype)
    if not values.flags.aligned:
        values = values.copy()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1).tolist()
    parts: list[Any] = [values[first:last] for first, last in itertools.pairwise(ends)]
    if missing is not None and column.null_count:
        parts = [part if valid else None for part, valid in zip(parts, column.is_valid().to_pylist(), strict=True)]
    return parts


def _event_times(column: pa.Array) -> list[float]:
    if pa.types.is_timestamp(column.type):
        units_per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
        column = pa.array(column.cast(pa.int64()).to_numpy() / units_per_second)
    seconds: list[float] = column.to_pylist()
    return seconds
