"""Files of rows: windows of one dim-group's rows with their optimizer state, written and read one after another.

A window says which keys its rows have and has a checksum, so a file can be read by any rank of any number of ranks,
with one window in memory, and damage is found before a row is used.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from flexd.core.errors import CheckpointError

_HEADER = struct.Struct("<8sHHIQQqIII12x")
_MARK = b"flexrows"
_VERSION = 1
_SLOT_TYPES = {0: None, 4: np.dtype("<u4"), 8: np.dtype("<i8")}
_DAMAGED = "load an earlier checkpoint"

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowWindow:
    """Rows of one dim-group.

    Attributes:
        group: number of the dim-group in the job that saved.
        first_key, key_step: the row in slot s has key ``first_key + key_step * s``.
        slots: int64 [n], ascending.
        packed: uint8 [n, bytes of a row and its state].
    """

    group: int
    first_key: int
    key_step: int
    slots: Int64Array
    packed: Bytes

    @property
    def keys(self) -> Int64Array:
        """int64 [n]."""
        return self.slots * self.key_step + self.first_key


class RowFileWriter:
    """A new file of windows, in any order. ``close`` leaves it on the disk, not in a cache.

    Raises:
        OSError: the file exists or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self.nbytes = self.rows = 0

    def write(self, window: RowWindow) -> None:
        slots, count = window.slots, len(window.slots)
        slot_bytes = 4 if int(slots[-1]) < 2**32 else 8
        if int(slots[-1]) - int(slots[0]) + 1 == count:
            slot_bytes = 0  # consecutive: the first says it all
        of_slots = _SLOT_TYPES[slot_bytes]
        listed = b"" if of_slots is None else slots.astype(of_slots).tobytes()
        packed = np.ascontiguousarray(window.packed)
        fields = (
            _MARK, _VERSION, slot_bytes, window.group, count, int(slots[0]), window.first_key, window.key_step,
            packed.shape[1],
        )  # fmt: skip
        checksum = zlib.crc32(packed.data, zlib.crc32(listed, zlib.crc32(_HEADER.pack(*fields, 0))))
        for piece in (_HEADER.pack(*fields, checksum), listed, packed.data):
            self._file.write(piece)
        self.nbytes += _HEADER.size + len(listed) + packed.nbytes
        self.rows += count

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()


class RowFileReader:
    """Reads the windows of a file in their order. Use it as a context manager.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}", remedy=_DAMAGED) from error

    def read(self) -> RowWindow | None:
        """Return the next window; None at the end.

        Raises:
            CheckpointError: it cannot be read, or is not what was written.
        """
        header = self._exactly(_HEADER.size, may_end=True)
        if not header:
            return None
        mark, version, slot_bytes, group, count, first, first_key, key_step, row_bytes, checksum = _HEADER.unpack(
            header
        )
        if mark != _MARK or version != _VERSION or slot_bytes not in _SLOT_TYPES:
            raise self._damaged("is no file of rows of this version")
        listed = self._exactly(slot_bytes * count)
        packed = np.frombuffer(self._exactly(row_bytes * count), dtype=np.uint8).reshape(count, row_bytes)
        unsigned = _HEADER.pack(mark, version, slot_bytes, group, count, first, first_key, key_step, row_bytes, 0)
        if zlib.crc32(packed.data, zlib.crc32(listed, zlib.crc32(unsigned))) != checksum:
            raise self._damaged("has rows that differ from the saved ones (checksum)")
        of_slots = _SLOT_TYPES[slot_bytes]
        slots = (
            np.arange(first, first + count, dtype=np.int64)
            if of_slots is None
            else np.frombuffer(listed, dtype=of_slots).astype(np.int64)
        )
        return RowWindow(group, first_key, key_step, slots, packed)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RowFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exactly(self, count: int, *, may_end: bool = False) -> bytearray:
        # Damaged lengths must not allocate: what is there is known.
        left = os.fstat(self._file.fileno()).st_size - self._file.tell()
        if left == 0 and may_end:
            return bytearray()
        if count > left:
            raise self._damaged("ends too early")
        found = bytearray(count)
        try:
            read = self._file.readinto(found) if count else 0  # type: ignore[attr-defined]
        except OSError as error:
            raise self._damaged(f"cannot be read: {error.strerror}") from error
        if read != count:
            raise self._damaged("ends too early")
        return found

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}", remedy=_DAMAGED)
