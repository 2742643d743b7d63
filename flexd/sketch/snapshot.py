"""Snapshots on disk: one checksummed file each, written atomically."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from flexd.core.durable import UNUSABLE, sync_directory
from flexd.core.errors import SnapshotError
from flexd.core.fault_points import fault_point
from flexd.sketch import frame
from flexd.sketch.frame import Arrays

_REMEDY = "the previous one is used"
_NAME = re.compile(r"^snapshot-(\d{12})\.flexd$")
_TEMPORARY = re.compile(r"^\.snapshot-\d{12}\.tmp$")
_WRITE_BYTES = 16 * 2**20


class SnapshotStore:
    """A directory of numbered snapshots, the newest ``keep`` of them. One process writes to it.

    A file is written under a temporary name, synced, renamed, and the directory synced, so a file of that name is
    complete, and a crash at any point leaves the previous one. Only the owner can read the files. Their format is that
    of ``flexd.sketch.frame``.

    Args:
        read_only: for a reader beside the writer: nothing is made or removed, and a missing directory has no snapshots.

    Raises:
        SnapshotError: the directory cannot be made or listed.
    """

    def __init__(self, directory: Path, keep: int, *, read_only: bool = False) -> None:
        if keep < 1:
            raise SnapshotError(f"keep {keep} snapshots", remedy="keep at least one")
        self.directory = directory
        self.keep = keep
        if read_only:
            return
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
        """Return the snapshot files, newest first.

        Raises:
            SnapshotError: the directory cannot be listed.
        """
        try:
            found = [entry for entry in self.directory.iterdir() if _NAME.match(entry.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SnapshotError(f"snapshot directory {self.directory}: {error}", remedy="make it readable") from error
        return sorted(found, reverse=True)

    def save(self, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
        """Make one snapshot durable, then remove those beyond ``keep``.

        Args:
            meta: JSON-able.
            arrays: numeric, by name.

        Raises:
            SnapshotError: it cannot be written (disk full, ...) or an array is of an unsupported type. Earlier
                snapshots are unchanged and no temporary file remains.
        """
        present = self.paths()
        number = 1 + max((number_of(path) for path in present), default=0)
        path = self.directory / f"snapshot-{number:012d}.flexd"
        temporary = self.directory / f".snapshot-{number:012d}.tmp"
        framed = frame.encode(meta, arrays)
        try:
            temporary.unlink(missing_ok=True)
            _write(temporary, framed)
            fault_point("snapshot.written")
            temporary.rename(path)
            fault_point("snapshot.renamed")
            sync_directory(self.directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise SnapshotError(
                f"snapshot {path}: {error.strerror or error}", remedy="free disk space or set state.dir"
            ) from error
        self._prune([path, *present])
        return path

    def mark_unusable(self, path: Path) -> Path:
        """Take a snapshot out of the rotation: rename it, and delete the one that was set aside before.

        Raises:
            SnapshotError: it cannot be renamed; it is where it was.
        """
        target = path.with_name(path.name + UNUSABLE)
        try:
            path.rename(target)
            sync_directory(self.directory)
            for before in self.directory.glob(f"*{UNUSABLE}"):
                if before != target:
                    before.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(f"{path}: {error.strerror or error}", remedy="check its permissions") from error
        return target

    def _prune(self, newest_first: list[Path]) -> None:
        for path in newest_first[self.keep :]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Read one snapshot file: (meta, arrays).

    Raises:
        SnapshotError: it cannot be read, is of another format, or any byte of it is missing or changed.
    """
    try:
        with path.open("rb") as file:
            return frame.read(file, os.fstat(file.fileno()).st_size, f"snapshot {path}", _REMEDY)
    except (OSError, MemoryError) as error:
        raise SnapshotError(f"snapshot {path}: {error}", remedy=_REMEDY) from error


def read_meta(path: Path) -> dict[str, Any]:
    """Read what a snapshot has beside its arrays, which are not checked.

    Raises:
        StateVersionError: a newer flexd wrote it.
        SnapshotError: it cannot be read or is damaged.
    """
    try:
        with path.open("rb") as file:
            return frame.read_meta(file, os.fstat(file.fileno()).st_size, f"snapshot {path}", _REMEDY)
    except (OSError, MemoryError) as error:
        raise SnapshotError(f"snapshot {path}: {error}", remedy=_REMEDY) from error


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


def number_of(path: Path) -> int:
    """Return the number in a snapshot's name; 0 for another file."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else 0
