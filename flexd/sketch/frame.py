"""A checksummed block of JSON and numeric arrays, used for snapshot files and for messages between daemons."""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SnapshotError, StateVersionError

Arrays = dict[str, npt.NDArray[Any]]

MAGIC = b"FLEXDSNP"
FORMAT_VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
"""Magic, format version, CRC-32 of the description, its bytes, bytes of the whole frame."""
_HEAD_CRC = struct.Struct("<I")
_DTYPES = ("|u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8")


def encode(meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> list[bytes | memoryview]:
    """Return the frame as successive parts; contiguous arrays are not copied.

    Layout (all integers little-endian): head (magic, format version, CRC-32 of the description, its length, length of
    the frame), CRC-32 of the head, description (JSON: ``meta`` and name, dtype, shape, CRC-32 of each array), arrays.

    Args:
        meta: JSON-able.
        arrays: numeric, by name.

    Raises:
        SnapshotError: an array is of an unsupported type, or ``meta`` is not plain JSON.
    """
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    head, description = _describe(meta, plain)
    return [head, description, *(_bytes(array) for array in plain.values())]


def decode(data: bytes, name: str, remedy: str) -> tuple[dict[str, Any], Arrays]:
    """Return (meta, writable arrays) of a frame in memory. Raises the errors of ``read``."""
    return read(io.BytesIO(data), len(data), name, remedy)


def read(file: BinaryIO, size: int, name: str, remedy: str) -> tuple[dict[str, Any], Arrays]:
    """Return (meta, writable arrays) of the frame from the current position of ``file`` to its end.

    No allocation is larger than ``size``, whatever the frame claims.

    Args:
        size: bytes of the frame.
        name, remedy: for error messages.

    Raises:
        StateVersionError: the frame is of a newer format.
        SnapshotError: the frame is no frame, or any byte of it is missing or changed.
        OSError, MemoryError: it cannot be read.
    """
    origin = _Origin(name, remedy)
    meta, layout = _read_description(origin, file, size)
    arrays: Arrays = {}
    for entry in layout:
        array = np.empty(entry.shape, dtype=entry.dtype)
        got = file.readinto(_bytes(array))  # type: ignore[attr-defined]
        if got != entry.nbytes or zlib.crc32(_bytes(array)) != entry.crc:
            raise origin.damaged(f"array {entry.name!r} is damaged")
        arrays[entry.name] = array
    return meta, arrays


def read_meta(file: BinaryIO, size: int, name: str, remedy: str) -> dict[str, Any]:
    """Return the meta of the frame alone; its arrays are not read. Arguments and errors as of ``read``."""
    return _read_description(_Origin(name, remedy), file, size)[0]


def _read_description(origin: _Origin, file: BinaryIO, size: int) -> tuple[dict[str, Any], list[_Entry]]:
    head = file.read(_HEAD.size + _HEAD_CRC.size)
    length, checksum = _parse_head(origin, head, size)
    description = file.read(length)
    if len(description) != length or zlib.crc32(description) != checksum:
        raise origin.damaged("the description is damaged")
    meta, layout = _parse_description(origin, description)
    expected = len(head) + length + sum(entry.nbytes for entry in layout)
    if expected != size:
        raise origin.damaged(f"{size} bytes, {expected} described")
    return meta, layout


@dataclass(frozen=True)
class _Origin:
    name: str
    remedy: str

    def damaged(self, what: str) -> SnapshotError:
        return SnapshotError(f"{self.name}: {what}", remedy=self.remedy)


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    crc: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def _parse_head(origin: _Origin, head: bytes, size: int) -> tuple[int, int]:
    if len(head) < _HEAD.size + _HEAD_CRC.size:
        raise origin.damaged(f"truncated at {size} bytes")
    magic, version, checksum, length, total = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise origin.damaged("not a flexd snapshot")
    if _HEAD_CRC.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
        raise origin.damaged("the head is damaged")
    if version > FORMAT_VERSION:
        raise StateVersionError(
            f"{origin.name}: format version {version} is of a newer flexd; this one reads {FORMAT_VERSION}",
            remedy="run the flexd that wrote it, or a newer one",
        )
    if version != FORMAT_VERSION:
        raise origin.damaged(f"format version {version}, this flexd reads {FORMAT_VERSION}")
    if total != size:
        raise origin.damaged(f"{size} bytes of {total}")
    return int(length), int(checksum)


def _parse_description(origin: _Origin, text: bytes) -> tuple[dict[str, Any], list[_Entry]]:
    try:
        description = json.loads(text)
        layout = [
            _Entry(str(name), str(dtype), tuple(int(n) for n in shape), int(crc))
            for name, dtype, shape, crc in description["arrays"]
        ]
        meta = dict(description["meta"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise origin.damaged(f"the description is malformed: {error!r}") from error
    if any(entry.dtype not in _DTYPES or any(n < 0 for n in entry.shape) for entry in layout):
        raise origin.damaged("an array is of unknown type or shape")
    return meta, layout


def _describe(meta: Mapping[str, Any], arrays: Arrays) -> tuple[bytes, bytes]:
    layout = [[name, array.dtype.str, list(array.shape), zlib.crc32(_bytes(array))] for name, array in arrays.items()]
    try:
        description = json.dumps({"meta": dict(meta), "arrays": layout}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"snapshot description: {error}", remedy="give plain JSON values") from error
    payload = sum(array.nbytes for array in arrays.values())
    total = _HEAD.size + _HEAD_CRC.size + len(description) + payload
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, zlib.crc32(description), len(description), total)
    return head + _HEAD_CRC.pack(zlib.crc32(head)), description


def _plain(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if little.dtype.str not in _DTYPES:
        raise SnapshotError(f"array {name!r} of {array.dtype} cannot be saved", remedy=f"one of {', '.join(_DTYPES)}")
    return little


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
