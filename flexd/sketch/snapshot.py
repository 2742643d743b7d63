"""Snapshots on disk, one checksummed file each, written atomically; and the saving of counters and stream positions
together: when, in which order, and what became of it."""

import contextlib
import json
import logging
import math
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Arrays
from flexd.core.durable import UNUSABLE, replace_file, sync_directory
from flexd.core.errors import SnapshotError
from flexd.core.supervision import fault_point
from flexd.sketch.sketch_set import SketchSet
from flexd.stream.types import Positions, Source

# Of any snapshot: its format is the one that its description states (``flexd.sketch.sketch_set.STATE_FORMAT``).
_MARK = b"FLEXDSN2"
# Mark, bytes of the description, its CRC-32.
_HEAD = struct.Struct("<8sQI")
_DTYPES = ("|u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8")
_NAME = re.compile(r"^snapshot-(\d{12})\.flexd$")


class SnapshotStore:
    """A directory of numbered snapshots, the newest ``keep`` of them. One process writes to it.

    Only the owner can read the files (``replace_file``).

    A file is a head, a description (JSON: ``meta``, and name, dtype, shape and CRC-32 of each array), and the arrays,
    all little-endian.

    Args:
        read_only: for a reader beside the writer: nothing is made or removed, and a missing directory has no snapshots.

    Raises:
        SnapshotError: the directory cannot be made or listed.
    """

    def __init__(self, directory: Path, keep: int, *, read_only: bool = False) -> None:
        self.directory = directory
        self.keep = keep
        if read_only:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left_over in directory.glob("snapshot-*.flexd.tmp"):
                left_over.unlink()
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
        number = 1 + (int(present[0].stem.removeprefix("snapshot-")) if present else 0)
        path = self.directory / f"snapshot-{number:012d}.flexd"
        replace_file(path, _encode(meta, arrays), "snapshot")
        for old in present[self.keep - 1 :]:
            with contextlib.suppress(OSError):
                old.unlink(missing_ok=True)
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


def read(path: Path, *, with_arrays: bool = True) -> tuple[dict[str, Any], Arrays]:
    """Read one snapshot file: (meta, writable arrays). No allocation is larger than the file, whatever it claims.

    Args:
        with_arrays: False leaves them unread, and unchecked.

    Raises:
        SnapshotError: it cannot be read, is of another format, or any byte of it is missing or changed.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mark, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
            if mark != _MARK or length > size:
                raise ValueError("not a flexd snapshot, or its head is damaged")
            text = file.read(length)
            if zlib.crc32(text) != checksum:
                raise ValueError("the description is damaged")
            description = json.loads(text)
            layout = [(name, np.dtype(dtype), tuple(shape), crc) for name, dtype, shape, crc in description["arrays"]]
            whole = _HEAD.size + length + sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in layout)
            if size != whole:
                raise ValueError(f"{size} bytes of {whole}")
            arrays: Arrays = {}
            for name, dtype, shape, crc in layout if with_arrays else ():
                array = arrays[name] = np.empty(shape, dtype)
                if file.readinto(_bytes(array)) != array.nbytes or zlib.crc32(_bytes(array)) != crc:
                    raise ValueError(f"array {name!r} is damaged")
            return description["meta"], arrays
    except (OSError, MemoryError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise SnapshotError(f"snapshot {path}: {error}", remedy="the previous one is used") from error


def _encode(meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> list[bytes | memoryview]:
    # Return a file as successive parts; contiguous arrays are not copied.
    plain = {
        name: np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")) for name, array in arrays.items()
    }  # fmt: skip
    for name, array in plain.items():
        if array.dtype.str not in _DTYPES:
            raise SnapshotError(
                f"array {name!r} of {array.dtype} cannot be saved", remedy=f"one of {', '.join(_DTYPES)}"
            )
    layout = [[name, array.dtype.str, array.shape, zlib.crc32(_bytes(array))] for name, array in plain.items()]
    try:
        text = json.dumps({"meta": dict(meta), "arrays": layout}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"snapshot description: {error}", remedy="give plain JSON values") from error
    return [_HEAD.pack(_MARK, len(text), zlib.crc32(text)), text, *map(_bytes, plain.values())]


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


_log = logging.getLogger(__name__)


class SnapshotCycle:
    """Belongs to the ingest thread; ``request`` may be called by any.

    Attributes:
        interval_seconds: between two snapshots; a change (by any thread) is effective after the next one.
        background: snapshots are written while ingest continues; False stops ingest until they are on disk.
        saved: snapshots on disk since the start.
        bytes: size of the newest one; 0 before.
        saved_at: monotonic seconds of the newest snapshot, NaN before the first.
        pause_seconds: for which the newest copy of the counters stopped ingest.

    Args:
        store: where state is saved; None saves nothing.
        generation: returns the number of the newest profile.
    """

    background = True

    def __init__(
        self,
        store: SnapshotStore | None,
        interval_seconds: float,
        source: Source,
        sketches: SketchSet,
        generation: Callable[[], int],
    ) -> None:
        self._store = store
        self._source = source
        self._sketches = sketches
        self._generation = generation
        self.interval_seconds = interval_seconds
        self._requested = threading.Event()
        self._next = time.monotonic() + interval_seconds
        self._writing: Future[None] | None = None
        self._positions: Positions = {}
        self.saved = self.commit_failures = self.bytes = 0
        self.saved_at = self.pause_seconds = math.nan

    def request(self) -> None:
        """Make the next snapshot due now."""
        self._requested.set()

    def is_due(self) -> bool:
        """Return whether a snapshot is to be begun now, and then count the interval anew."""
        if self.pending or not (self._requested.is_set() or time.monotonic() >= self._next):
            return False
        self._requested.clear()
        self._next = time.monotonic() + self.interval_seconds
        return True

    @property
    def pending(self) -> bool:
        """True from ``begin`` to ``finish``."""
        return self._writing is not None

    @property
    def written(self) -> bool:
        """True if ``finish`` would not wait."""
        return self._writing is not None and self._writing.done()

    def begin(self) -> None:
        """Make counters and positions durable. The order of the steps makes every access count once.

        1. Between two polls, when every message that the source has returned is counted, copy sketches, positions and
           profile generation while nothing else can change them. They go into one file: if they were saved apart, a
           crash between the two would count the messages in between twice or never.
        2. Write the snapshot and wait until it is on disk. Ingest continues meanwhile.
        3. Only then commit to the source (``finish``): the positions of step 1, not those reached since. The
           commit serves the broker's displays; a restart reads the snapshot's positions, so a crash between 2 and 3
           loses nothing.

        Raises:
            SnapshotError: the counters are damaged.
        """
        store, sketches = self._store, self._sketches
        if store is None:
            return
        fault_point("snapshot.begin")
        # 1.
        began = time.monotonic()
        with sketches.lock:
            if sketches.damage is not None:
                raise SnapshotError("the counters are damaged and not saved", remedy="start the daemon again")
            description, arrays = sketches.state()
            self._positions = self._source.positions()
            meta = {"sketches": description, "positions": self._positions, "generation": self._generation()}
        self.pause_seconds = time.monotonic() - began
        fault_point("snapshot.copied")

        # 2.
        writing: Future[None] = Future()

        def write() -> None:
            try:
                path = store.save(meta, arrays)
                with contextlib.suppress(OSError):
                    self.bytes = path.stat().st_size
            except BaseException as error:
                writing.set_exception(error)
            else:
                writing.set_result(None)

        self._writing = writing
        if self.background:
            threading.Thread(target=write, name="flexd-snapshot", daemon=True).start()
        else:
            write()

    def finish(self) -> None:
        """Run step 3 of ``begin``.

        Raises:
            SnapshotError: step 2 failed; the previous snapshot and its positions stay valid together.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        self.saved += 1
        self.saved_at = time.monotonic()
        # 3.
        failure = self._source.commit(self._positions)
        fault_point("snapshot.committed")
        if failure is not None:
            self.commit_failures += 1
            _log.warning("ingest: commit: %s", failure)
