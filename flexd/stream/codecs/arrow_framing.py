"""Check the framing of an Arrow IPC stream before Arrow reads it.

Arrow validates what it reads, except that for a compressed buffer it allocates the uncompressed length that the
message claims. So each message's flatbuffer is checked here: compression is refused, and lengths must lie within the
payload. Layout: Apache Arrow columnar format 1.5, "Encapsulated message format" and `format/Message.fbs`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

CONTINUATION = b"\xff\xff\xff\xff"

_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
_VERSIONS = (3, 4)
"""V4 and V5."""
_MAX_DICTIONARIES = 16

_PREFIX = struct.Struct("<Ii")
_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_I16 = struct.Struct("<h")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_PAIR = struct.Struct("<qq")


class FrameError(Exception):
    """The framing is invalid. ``reason`` is one of the codec's reasons."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class Frames(NamedTuple):
    """Byte ranges of one stream: schema [0, schema_end), dictionaries, batch [batch_start, batch_end)."""

    schema_end: int
    dictionaries: int
    batch_start: int
    batch_end: int


class BatchHeader(NamedTuple):
    """Metadata of a record batch: (length, nulls) of every field and (start, bytes) of every buffer, depth first."""

    entries: int
    body_bytes: int
    nodes: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[int, int], ...]


def batch_header(metadata: bytes) -> BatchHeader | None:
    """Parse the metadata of one message, unchecked; None if it is not an uncompressed record batch of format V4 or V5.

    Raises:
        FrameError: ``corrupt``: the metadata points outside itself.
    """
    table = _Flatbuffer(metadata, 0, len(metadata))
    message = table.root()
    batch = table.child(message, 2)
    if table.i16(message, 0) not in _VERSIONS or table.u8(message, 1) != _RECORD_BATCH:
        return None
    if batch is None or table.child(batch, 3) is not None:
        return None
    return BatchHeader(table.i64(batch, 0), table.i64(message, 3), table.pairs(batch, 1), table.pairs(batch, 2))


def is_little_endian(schema: bytes) -> bool:
    """Return whether a schema message, walked before, declares little-endian bodies."""
    table = _Flatbuffer(schema, _PREFIX.size, len(schema))
    header = table.child(table.root(), 2)
    return header is not None and table.i16(header, 0) == 0


def schema_bytes(payload: bytes | memoryview) -> int:
    """Return the end of the first message, a schema, by its declared length; 0 if the payload is shorter."""
    if len(payload) < _PREFIX.size:
        return 0
    end = _PREFIX.size + int(_PREFIX.unpack_from(payload, 0)[1])
    return end if _PREFIX.size < end <= len(payload) else 0


def walk(payload: bytes | memoryview, schema_end: int = 0) -> Frames:
    """Find the schema and the record batch of an Arrow IPC stream.

    Args:
        schema_end: position after the schema if equal bytes were walked before, else 0.

    Raises:
        FrameError: ``truncated``, ``compressed``, ``wrong_schema`` (not schema, dictionaries, one batch) or
            ``corrupt`` (lengths or offsets that contradict each other).
    """
    dictionaries = 0
    position = schema_end
    while True:
        kind, end = _message(payload, position)
        if position == 0:
            if kind != _SCHEMA:
                raise FrameError("wrong_schema", "the first Arrow message is not a schema")
            if end != schema_bytes(payload):
                raise FrameError("corrupt", "the Arrow schema has a body")
            schema_end = end
        elif kind == _DICTIONARY_BATCH:
            dictionaries += 1
            if dictionaries > _MAX_DICTIONARIES:
                raise FrameError("wrong_schema", f"more than {_MAX_DICTIONARIES} dictionaries")
        elif kind == _RECORD_BATCH:
            _check_rest(payload, end)
            return Frames(schema_end, dictionaries, position, end)
        else:
            raise FrameError("wrong_schema", f"Arrow message of type {kind} where a record batch was expected")
        position = end


def _message(payload: bytes | memoryview, start: int) -> tuple[int, int]:
    """Return (header type, end of the body) of the encapsulated message at ``start``."""
    if start + _PREFIX.size > len(payload):
        raise FrameError("truncated", f"{len(payload)} bytes end before the record batch")
    marker, metadata_bytes = _PREFIX.unpack_from(payload, start)
    if marker != 0xFFFFFFFF:
        raise FrameError("corrupt", f"no Arrow message at byte {start}")
    if metadata_bytes == 0:
        raise FrameError("empty", "the Arrow stream holds no record batch")
    metadata_start = start + _PREFIX.size
    metadata_end = metadata_start + metadata_bytes
    if metadata_bytes < 0:
        raise FrameError("corrupt", f"negative metadata length at byte {start}")
    if metadata_end > len(payload):
        raise FrameError("truncated", f"Arrow metadata at byte {start} goes {metadata_end - len(payload)} bytes beyond")
    table = _Flatbuffer(payload, metadata_start, metadata_end)
    message = table.root()
    kind = table.u8(message, 1)
    header = table.child(message, 2)
    body_bytes = table.i64(message, 3)
    if header is None:
        raise FrameError("corrupt", f"Arrow message without header at byte {start}")
    end = metadata_end + body_bytes
    if body_bytes < 0:
        raise FrameError("corrupt", f"negative body length at byte {start}")
    if end > len(payload):
        raise FrameError("truncated", f"Arrow body at byte {start} goes {end - len(payload)} bytes beyond the payload")
    batch: int | None = None
    if kind == _RECORD_BATCH:
        batch = header
    elif kind == _DICTIONARY_BATCH:
        batch = table.child(header, 1)
    if batch is not None and table.child(batch, 3) is not None:
        raise FrameError("compressed", "the Arrow buffers are compressed")
    return kind, end


def _check_rest(payload: bytes | memoryview, end: int) -> None:
    """Check that at most the end-of-stream marker follows the batch."""
    rest = len(payload) - end
    if rest == 0:
        return
    if rest < _PREFIX.size:
        raise FrameError("truncated", f"{rest} bytes after the record batch")
    if _PREFIX.unpack_from(payload, end) != (0xFFFFFFFF, 0) or rest > _PREFIX.size:
        raise FrameError("wrong_schema", f"{rest} bytes after the record batch: one batch a message")


class _Flatbuffer:
    """Bounds-checked reads of flatbuffer tables inside [start, end) of a payload."""

    def __init__(self, payload: bytes | memoryview, start: int, end: int) -> None:
        self._payload = payload
        self._start = start
        self._end = end

    def root(self) -> int:
        return self._table(self._start + self._read(_U32, self._start))

    def u8(self, table: int, field: int) -> int:
        at = self._field(table, field)
        return 0 if at is None else self._read(_U8, at)

    def i16(self, table: int, field: int) -> int:
        at = self._field(table, field)
        return 0 if at is None else self._read(_I16, at)

    def i64(self, table: int, field: int) -> int:
        at = self._field(table, field)
        return 0 if at is None else self._read(_I64, at)

    def child(self, table: int, field: int) -> int | None:
        """Return the position of the table that a field points at, or None if the field is absent."""
        at = self._field(table, field)
        return None if at is None else self._table(at + self._read(_U32, at))

    def pairs(self, table: int, field: int) -> tuple[tuple[int, int], ...]:
        """Read a vector of structs of two 64-bit integers."""
        at = self._field(table, field)
        if at is None:
            return ()
        vector = at + self._read(_U32, at)
        count, first = self._read(_U32, vector), vector + _U32.size
        if first < self._start or first + count * _PAIR.size > self._end:
            raise FrameError("corrupt", "Arrow metadata points outside itself")
        return tuple(_PAIR.iter_unpack(bytes(self._payload[first : first + count * _PAIR.size])))

    def _table(self, at: int) -> int:
        self._read(_I32, at)
        return at

    def _field(self, table: int, field: int) -> int | None:
        vtable = table - self._read(_I32, table)
        slot = 4 + 2 * field
        if slot + 2 > self._read(_U16, vtable):
            return None
        offset = self._read(_U16, vtable + slot)
        return table + offset if offset else None

    def _read(self, kind: struct.Struct, at: int) -> int:
        if at < self._start or at + kind.size > self._end:
            raise FrameError("corrupt", "Arrow metadata points outside itself")
        value: int = kind.unpack_from(self._payload, at)[0]
        return value
