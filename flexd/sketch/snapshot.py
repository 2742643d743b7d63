"""Snapshots on disk: one file each, complete or not there, checked when read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.errors import SnapshotError

Arrays = dict[str, npt.NDArray[Any]]

MAGIC = b"FLEXDSNP"
FORMAT_VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
"""Magic, format version, CRC-32 of the description, its bytes, bytes of the whole file."""
_HEAD_CRC = struct.Struct("<I")
_DTYPES = ("|u1", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8")
_NAME = re.compile(r"^snapshot-(\d{12})\.flexd$")
_TEMPORARY = re.compile(r"^\.snapshot-\d{12}\.tmp$")
_WRITE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class LoadedSnapshot:
    """What was saved, and which newer files could not be used.

    Attributes:
        meta: as given to ``save``.
        arrays: by name; writable copies.
        path: the file it came from.
        problems: one line for each newer file that is damaged or of another format.
    """

    meta: dict[str, Any]
    arrays: Arrays
    path: Path
    problems: list[str]


class SnapshotStore:
    """A directory of numbered snapshots, the newest ``keep`` of them. One process writes to it.

    A file is written under a temporary name, synced, renamed, and the directory synced; so a snapshot that has its
    name is complete, and a crash at any point leaves the previous one. Files are readable by their owner only.

    Layout (all integers little-endian): head (magic, format version, CRC-32 of the description, its length, length of
    the file), CRC-32 of the head, description (JSON: ``meta`` and name, dtype, shape, CRC-32 of each array), arrays.

    Raises:
        SnapshotError: the directory cannot be made or listed.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise SnapshotError(f"keep {keep} snapshots", remedy="keep at least one")
        self.directory = directory
        self.keep = keep
        self._damaged: set[Path] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for entry in directory.iterdir():
                if _TEMPORARY.match(entry.name):
                    entry.unlink()
        except OSError as error:
            raise SnapshotError(
                f"snapshot directory {directory}: {error}", remedy="make it writable or set state.dir"
            ) from error

    def paths(self) -> list[Path]:
        """Snapshots there are, newest first. Raises SnapshotError if the directory cannot be listed."""
        try:
            found = [entry for entry in self.directory.iterdir() if _NAME.match(entry.name)]
        except OSError as error:
            raise SnapshotError(f"snapshot directory {self.directory}: {error}", remedy="make it readable") from error
        return sorted(found, reverse=True)

    def save(self, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
        """Makes one snapshot durable, then removes those beyond ``keep``.

        Args:
            meta: JSON-able.
            arrays: numeric, by name.

        Raises:
            SnapshotError: it cannot be written (disk full, ...) or an array is of no known type. Earlier snapshots are
                as they were and no temporary file stays.
        """
        present = self.paths()
        number = 1 + max((_number(path) for path in present), default=0)
        path = self.directory / f"snapshot-{number:012d}.flexd"
        temporary = self.directory / f".snapshot-{number:012d}.tmp"
        plain = {name: _plain(name, array) for name, array in arrays.items()}
        head, description = _describe(meta, plain)
        try:
            temporary.unlink(missing_ok=True)
            _write(temporary, [head, description, *(_bytes(a) for a in plain.values())])
            temporary.rename(path)
            _sync_directory(self.directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise SnapshotError(
                f"snapshot {path}: {error.strerror or error}", remedy="free disk space or set state.dir"
            ) from error
        self._prune([path, *present])
        return path

    def load_newest(self) -> LoadedSnapshot | None:
        """The newest snapshot that is whole; None if there is none.

        Raises:
            SnapshotError: the directory cannot be listed, or there are snapshots and all are unusable.
        """
        problems: list[str] = []
        for path in self.paths():
            try:
                meta, arrays = read(path)
            except SnapshotError as error:
                problems.append(str(error))
                self._damaged.add(path)
                continue
            return LoadedSnapshot(meta, arrays, path, problems)
        if problems:
            raise SnapshotError("; ".join(problems), remedy="move the files away to start from empty sketches")
        return None

    def _prune(self, newest_first: list[Path]) -> None:
        whole = [path for path in newest_first if path not in self._damaged]
        for path in set(newest_first) - set(whole[: self.keep]):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                self._damaged.discard(path)


def read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """One snapshot file: (meta, arrays).

    Raises:
        SnapshotError: it cannot be read, is of another format, or a single byte of it is missing or changed.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size + _HEAD_CRC.size)
            length, checksum = _parse_head(path, head, size)
            description = file.read(length)
            if len(description) != length or zlib.crc32(description) != checksum:
                raise _damaged(path, "the description is damaged")
            meta, layout = _parse_description(path, description)
            expected = len(head) + length + sum(entry.nbytes for entry in layout)
            if expected != size:
                raise _damaged(path, f"{size} bytes, {expected} described")
            arrays: Arrays = {}
            for entry in layout:
                array = np.empty(entry.shape, dtype=entry.dtype)
                if file.readinto(_bytes(array)) != entry.nbytes or zlib.crc32(_bytes(array)) != entry.crc:
                    raise _damaged(path, f"array {entry.name!r} is damaged")
                arrays[entry.name] = array
    except (OSError, MemoryError) as error:
        raise SnapshotError(f"snapshot {path}: {error}", remedy="the previous one is used") from error
    return meta, arrays


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    crc: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def _damaged(path: Path, what: str) -> SnapshotError:
    return SnapshotError(f"snapshot {path}: {what}", remedy="the previous one is used")


def _parse_head(path: Path, head: bytes, size: int) -> tuple[int, int]:
    if len(head) < _HEAD.size + _HEAD_CRC.size:
        raise _damaged(path, f"cut short at {size} bytes")
    magic, version, checksum, length, total = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise _damaged(path, "no flexd snapshot")
    if version != FORMAT_VERSION:
        raise _damaged(path, f"format version {version}, this flexd reads {FORMAT_VERSION}")
    if _HEAD_CRC.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
        raise _damaged(path, "the head is damaged")
    if total != size:
        raise _damaged(path, f"{size} bytes of {total}")
    return int(length), int(checksum)


def _parse_description(path: Path, text: bytes) -> tuple[dict[str, Any], list[_Entry]]:
    try:
        description = json.loads(text)
        layout = [
            _Entry(str(name), str(dtype), tuple(int(n) for n in shape), int(crc))
            for name, dtype, shape, crc in description["arrays"]
        ]
        meta = dict(description["meta"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"the description makes no sense: {error!r}") from error
    if any(entry.dtype not in _DTYPES or any(n < 0 for n in entry.shape) for entry in layout):
        raise _damaged(path, "an array is of unknown type or shape")
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
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _write(path: Path, parts: list[bytes | memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(path: Path) -> int:
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else 0
