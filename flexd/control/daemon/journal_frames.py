"""The frames of the placement journal's file, and the chunks in them.

A frame is ``u32 payload bytes, u32 crc32, payload``; a payload is one JSON line and raw little endian arrays.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.migration_record import MigrationRecord
from flexd.core.placement import Delta

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

HEADER_BYTES = 200
"""Typical bytes of a frame's header."""
_CHUNK_ROW_BYTES = 10
"""An int64 key with two tiers."""
_FRAME = struct.Struct("<II")
_MAX_ID_CHARACTERS = 400


@dataclass(frozen=True)
class Chunk:
    """Rows that change their tier at a version.

    Attributes:
        migration: that it belongs to, as of then; of one that was read from the file, ids and versions only.
    """

    version: int
    delta: Delta
    migration: MigrationRecord | None = None

    @property
    def frame_bytes(self) -> int:
        """Its size in the file, to within the length of its names."""
        return HEADER_BYTES + _CHUNK_ROW_BYTES * len(self.delta)


def chunk_payload(chunk: Chunk) -> bytes:
    """Return the payload of a chunk's frame."""
    delta, migration = chunk.delta, chunk.migration
    header: dict[str, Any] = {"kind": "chunk", "version": chunk.version, "rows": len(delta)}
    if migration is not None:
        header |= {"migration": migration.migration_id, "plan": migration.plan_id, "base": migration.base_version}
        if migration.returns_to is not None:
            header["returns_to"] = migration.returns_to
    return payload_of(header, delta.keys, delta.old_tiers, delta.new_tiers)


def migration_of(header: dict[str, Any]) -> MigrationRecord | None:
    """Return the migration of a chunk; None if the header does not name it validly: the chunk can be applied anyway."""
    names, versions = (header.get("migration"), header.get("plan")), (header.get("base"), header.get("returns_to", 0))
    if not all(isinstance(name, str) and len(name) <= _MAX_ID_CHARACTERS for name in names):
        return None
    if not all(isinstance(version, int) and version >= 0 for version in versions):
        return None
    return MigrationRecord(
        migration_id=str(names[0]), plan_id=str(names[1]), base_version=header["base"],
        returns_to=header.get("returns_to"),
    )  # fmt: skip


def payload_of(header: dict[str, Any], keys: Int64Array, *tiers: UInt8Array) -> bytes:
    """Return a payload of rows with one or two tiers each."""
    line = json.dumps(header, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return b"".join([line, keys.astype("<i8").tobytes(), *(part.astype(np.uint8).tobytes() for part in tiers)])


def framed(payload: bytes) -> bytes:
    """Return the frame of a payload."""
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield whole frames from the file's position on; end at the first that is torn or corrupt."""
    size = os.fstat(file.fileno()).st_size
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        length, crc = _FRAME.unpack(head)
        if length > size - file.tell():
            return  # Not read: a torn length may have any value, and memory would be allocated for all of it.
        payload = file.read(length)
        if zlib.crc32(payload) != crc:
            return
        line, _, arrays = payload.partition(b"\n")
        try:
            header = json.loads(line)
        except ValueError:
            return
        if not isinstance(header, dict):
            return
        yield header, arrays
