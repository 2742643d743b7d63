"""The placement on the daemon's disk: every chunk is durable here before it is sent to any rank.

So a restarted daemon can rebuild the placement at any version that the ranks have agreed on. All ranks may have dropped
the versions beyond it, which are then numbered again: a record of version v voids the earlier ones >= v. Chunks of
earlier migrations are merged, one for each: the placements between migrations stay, so that one can be taken back.

File format: magic, then frames of ``u32 payload bytes, u32 crc32, payload``; a payload is one JSON line and raw little
endian arrays. The first frame is a *segment* (a whole placement, of one job attempt), the rest are *chunks*.
"""

import contextlib
import json
import logging
import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flexd.control.daemon.migration import MigrationRecord
from flexd.control.protocol.messages import rows_body
from flexd.core.arrays import BoolArray, Int64Array, UInt8Array
from flexd.core.durable import quarantine_file, sync_directory
from flexd.core.errors import PlacementError, SnapshotError, StateVersionError
from flexd.core.placement import Delta, Placement
from flexd.core.supervision import fault_point

logger = logging.getLogger(__name__)

FORMAT = 2
"""Of the file: the last character of its magic. A newer flexd raises it and reads the formats before it: 1 has no
merged chunks."""
_MAGIC_OF_ANY = b"FLEXDPJ"
_MAGIC = _MAGIC_OF_ANY + str(FORMAT).encode()
_READABLE = (_MAGIC_OF_ANY + b"1", _MAGIC)
# Chunk rows that merging would save before it is done (or half the segment's rows, if more).
_COMPACT_ROWS = 65_536
# Bytes of voided chunks that the file may hold beyond the size of its live content before it is rewritten.
_DEAD_BYTES = 2**20

_ROLLBACK_ROWS = 2**21
# Rows and chunks kept beside the segment so that migrations can be rolled back: 10 bytes per row, in memory too.
_ROLLBACK_CHUNKS = 4_096
# Typical bytes of a frame's header, and of a row: an int64 key with two tiers.
_HEADER_BYTES, _ROW_BYTES = 200, 10
_FRAME = struct.Struct("<II")


@dataclass(frozen=True)
class Chunk:
    """Rows that change their tier at a version.

    Attributes:
        migration: that it belongs to, as of then; of one that was read from the file, ids, trigger and versions only.
        versions: that it leads over; 1 unless chunks were merged.
    """

    version: int
    delta: Delta
    migration: MigrationRecord | None = None
    versions: int = 1

    @property
    def before(self) -> int:
        """The version that it starts from."""
        return self.version - self.versions


def chunk_payload(chunk: Chunk) -> bytes:
    """Return the payload of a chunk's frame."""
    delta, migration = chunk.delta, chunk.migration
    header: dict[str, Any] = {"kind": "chunk", "version": chunk.version, "rows": len(delta)}
    if chunk.versions > 1:
        header["versions"] = chunk.versions
    if migration is not None:
        header |= {"migration": migration.migration_id, "plan": migration.plan_id, "base": migration.base_version}
        header["trigger"] = migration.trigger
        if migration.returns_to is not None:
            header["returns_to"] = migration.returns_to
    return payload_of(header, delta.keys, delta.old_tiers, delta.new_tiers)


def migration_of(header: dict[str, Any]) -> MigrationRecord | None:
    """Return the migration of a chunk; None if the header names none."""
    if "migration" not in header:
        return None
    return MigrationRecord(
        migration_id=header["migration"], plan_id=header["plan"], base_version=header["base"],
        returns_to=header.get("returns_to"), trigger=header.get("trigger", ""),
    )  # fmt: skip


def payload_of(header: dict[str, Any], keys: Int64Array, *tiers: UInt8Array) -> bytes:
    """Return a payload of rows with one or two tiers each."""
    line = json.dumps(header, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return line + rows_body(keys, *tiers)


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


@dataclass(frozen=True)
class Segment:
    """The ranks that hold the placement. ``topology`` names the exact set of rank processes (an opaque digest)."""

    attempt: str
    generation: int
    topology: str


class PlacementJournal:
    """Thread-safe. One process at a time may use a directory.

    The file is at most twice its live content (the segment and the chunks that are not voided) plus 1 MiB and the
    newest chunk.

    Args:
        directory: created if missing; holds ``placement.journal`` (mode 0600).

    Attributes:
        segment: the ranks that hold the placement; None before the first ``begin``.
        truncated_bytes: bytes of a torn or corrupt tail that were truncated on opening; 0 if the file was whole.

    Raises:
        StateVersionError: a newer flexd wrote the file; it is unchanged.
        SnapshotError: the directory or file cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = Path(directory) / "placement.journal"
        self._lock = threading.RLock()
        self.truncated_bytes = 0
        self.segment: Segment | None = None
        self._base = Placement.empty()
        self._chunks: list[Chunk] = []
        self._file: BinaryIO | None = None
        self._size = 0
        # False while a power failure may still restore the file that was replaced.
        self._name_synced = True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._path.exists():
                self._load()
        except OSError as error:
            raise self._error("cannot be read", error) from error
        if self.truncated_bytes:
            logger.warning(
                "%s: %d bytes were torn or damaged, and are dropped; placements behind version %d are read from the "
                "ranks. If no daemon crashed, check the disk", self._path, self.truncated_bytes, self.last_version,
            )  # fmt: skip

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @property
    def last_version(self) -> int:
        """The newest version written; the ranks may not have it."""
        with self._lock:
            return self._chunks[-1].version if self._chunks else self._base.version

    @property
    def newest_migration(self) -> MigrationRecord | None:
        """The migration of the newest chunk; None if it is not known, or no longer."""
        with self._lock:
            return self._chunks[-1].migration if self._chunks else None

    def migrations(self) -> tuple[MigrationRecord, ...]:
        """Return the migrations whose placements before and after are known, the oldest first, without the moves of
        verifications; ``last_version`` is that of their newest chunk."""
        with self._lock:
            known = {chunk.before for chunk in self._chunks}
            newest = {each.migration.migration_id: each for each in self._chunks if each.migration is not None}
            return tuple(
                chunk.migration.model_copy(update={"last_version": chunk.version})
                for chunk in newest.values()
                if chunk.migration is not None and chunk.migration.base_version in known
                and not chunk.migration.verifies
            )  # fmt: skip

    def begin(self, segment: Segment, placement: Placement) -> None:
        """Replace the content by a whole placement, durably.

        Raises:
            SnapshotError: it cannot be written, and the old content stays; or the directory cannot be synced: the new
                content is valid, and nothing is appended until the directory can be synced.
        """
        with self._lock:
            fault_point("journal.begin")
            self._rewrite(segment, placement, [])
            fault_point("journal.begun")

    def append(self, chunk: Chunk) -> None:
        """Append one chunk, durably; this voids earlier records of this and later versions.

        Raises:
            PlacementError: the placement at ``version - 1`` is not known.
            SnapshotError: it cannot be written; nothing is recorded.
        """
        version = chunk.version
        with self._lock:
            kept = [each for each in self._chunks if each.version < version]
            before = kept[-1].version if kept else self._base.version
            if self.segment is None or before != chunk.before:
                raise PlacementError(
                    f"chunk {version} cannot follow versions {self._base.version}..{self.last_version}",
                    remedy="number chunks from the version that all ranks agreed on",
                )
            rows = len(self._base) + sum(len(each.delta) for each in kept)
            # Chunks that are pushed and never agreed on are numbered and written again and again.
            if self._size > 2 * (_HEADER_BYTES * (1 + len(kept)) + _ROW_BYTES * rows) + _DEAD_BYTES:
                # If it fails, the old file holds the same; whether the chunk can be appended is found out next.
                with contextlib.suppress(SnapshotError):
                    self._rewrite(self.segment, self._base, kept)
            fault_point("journal.append")
            self._write_frame(chunk_payload(chunk))
            fault_point("journal.appended")
            self._chunks = [*kept, chunk]

    def placement_at(self, version: int, known: Placement | None = None) -> Placement:
        """Return the placement at a version. Raises SnapshotError: the journal does not hold it.

        Args:
            known: one of an earlier version that all ranks had agreed on, which is built on if possible.
        """
        with self._lock:
            held = {self._base.version, *(chunk.version for chunk in self._chunks)}
            if version not in held:
                raise SnapshotError(
                    f"{self._path}: holds versions {self._base.version}..{self.last_version}, not {version}",
                    remedy="the placement is requested from the ranks instead",
                )
            start = self._base if known is None or known.version not in held or known.version > version else known
            chunks = [chunk for chunk in self._chunks if start.version < chunk.version <= version]
            return _apply_all(start, chunks, version)

    def compact(self, version: int) -> None:
        """Merge chunks up to ``version``, which all ranks hold, once they are many.

        Each migration before the newest becomes one chunk, and so do the moves of one verification. Beyond
        ``_ROLLBACK_ROWS`` or ``_ROLLBACK_CHUNKS`` the oldest become a part of the segment.

        Raises:
            SnapshotError: the compacted file cannot be written; the journal's content stays as it was.
        """
        with self._lock:
            newest = self.newest_migration
            ended = version if newest is None else min(version, newest.rollback_version)
            runs = [list(run) for _, run in groupby((each for each in self._chunks if each.version <= ended), _owner)]
            saved = sum(len(chunk.delta) for run in runs for chunk in run[1:])
            if self.segment is None or (saved <= max(_COMPACT_ROWS, len(self._base) // 2) and _fit(self._chunks)[0]):
                return
            chunks = [*map(_merged, runs), *(each for each in self._chunks if each.version > ended)]
            if not _fit(chunks)[0]:
                # To half of the bounds, so that not every chunk rewrites the file.
                first = int(np.argmax(_fit(chunks, 0.5)))
                chunks = chunks[min(first, len(runs)) :]
            if not _fit(chunks)[0]:
                chunks = [chunk for chunk in chunks if chunk.version > version]
            base = chunks[0].before if chunks else min(version, self.last_version)
            self._rewrite(self.segment, self.placement_at(base), chunks)

    def _rewrite(self, segment: Segment, base: Placement, chunks: list[Chunk]) -> None:
        temporary = self._path.with_suffix(".tmp")
        header = {
            "kind": "segment", "attempt": segment.attempt, "generation": segment.generation,
            "topology": segment.topology, "version": base.version, "rows": len(base),
        }  # fmt: skip
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC)
                file.write(framed(payload_of(header, base.keys, base.tiers)))
                for chunk in chunks:
                    file.write(framed(chunk_payload(chunk)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
            fault_point("journal.renamed")
            # From here on the file is the new one, even if something fails: writes to the old one would be lost.
            self.close()
            self._name_synced = False
            self.segment, self._base, self._chunks = segment, base, chunks
            self._open_for_append()
            self._sync_name()
        except OSError as error:
            raise self._error("cannot be written", error) from error

    def _sync_name(self) -> None:
        if not self._name_synced:
            sync_directory(self._path.parent)
            self._name_synced = True

    def _open_for_append(self) -> BinaryIO:
        self._file = open(self._path, "r+b", buffering=0)  # noqa: SIM115
        self._size = self._file.seek(0, os.SEEK_END)
        return self._file

    def _write_frame(self, payload: bytes) -> None:
        frame = framed(payload)
        try:
            file = self._file or self._open_for_append()
            # Also removes what an earlier failed write may have left.
            file.truncate(self._size)
            file.seek(self._size)
            view = memoryview(frame)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
            self._sync_name()
        except OSError as error:
            raise self._error("cannot be written", error) from error
        self._size += len(frame)

    def _load(self) -> None:
        size = self._path.stat().st_size
        good = 0
        check_version(self._path)
        with open(self._path, "rb") as file:
            if file.read(len(_MAGIC)) in _READABLE:
                good = file.tell()
                for header, arrays in frames(file):
                    if not self._load_frame(header, arrays):
                        break
                    good = file.tell()
        if not good and size:
            # Not the end that a crash tore: an operator may want to see what it was.
            self.truncated_bytes = size
            quarantine_file(self._path)
            return
        if good < size:
            self.truncated_bytes = size - good
            os.truncate(self._path, good)
        if self.segment is None:
            return  # Nothing in it is usable; ``begin`` replaces the file.
        self._open_for_append()

    def _load_frame(self, header: dict[str, Any], arrays: bytes) -> bool:
        """Load one frame into memory; False if it is not valid at this place."""
        try:
            version, rows = int(header["version"]), int(header["rows"])
            keys = np.frombuffer(arrays, "<i8", rows).astype(np.int64)
            rest = np.frombuffer(arrays, np.uint8, offset=8 * rows)
            if header["kind"] == "segment" and self.segment is None and len(rest) == rows:
                self.segment = Segment(str(header["attempt"]), int(header["generation"]), str(header["topology"]))
                self._base = Placement.of(keys, rest.copy(), version)
                return True
            if header["kind"] != "chunk" or self.segment is None or len(rest) != 2 * rows:
                return False
            delta = Delta(keys, rest[:rows].copy(), rest[rows:].copy())
            chunk = Chunk(version, delta, migration_of(header), max(1, int(header.get("versions", 1))))
            kept = bisect_right(self._chunks, chunk.before, key=lambda each: each.version)
            if chunk.before != (self._chunks[kept - 1].version if kept else self._base.version):
                return False
            self._chunks[kept:] = [chunk]
            return True
        except (KeyError, ValueError, TypeError, PlacementError):
            return False

    def _error(self, what: str, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"{self._path}: {what}: {error.strerror}", remedy="check the state directory's space and permissions"
        )


class AgreedPlacement:
    """Holds the agreed placement: before any rank is live, the newest placement of the journal.

    Any thread may read ``placement`` and ``version``; the rest belongs to the coordinator's thread.
    """

    def __init__(self, journal: PlacementJournal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self.version = journal.last_version
        self._placement = journal.placement_at(self.version)

    @property
    def placement(self) -> Placement:
        with self._lock:
            if self._placement.version != self.version:
                self._placement = self._journal.placement_at(self.version, self._placement)
            return self._placement

    def continue_from(self, version: int, digest: int, segment: Segment) -> bool:
        """Continue from the version that the ranks of ``segment`` agreed on; False if the journal does not have it.

        Raises:
            SnapshotError: the journal cannot be written.
        """
        try:
            placement = self._journal.placement_at(version)
        except SnapshotError:
            placement = Placement.empty(version)
        if placement.digest() != digest and version == 0:
            placement = Placement.empty()
        if placement.digest() != digest:
            return False
        self.restart_from(placement, segment)
        return True

    def restart_from(self, placement: Placement, segment: Segment) -> None:
        """Continue from this placement, durably. Raises SnapshotError if the journal cannot be written."""
        try:
            known = (
                self._journal.segment == segment
                and self._journal.placement_at(placement.version).digest() == placement.digest()
            )
        except SnapshotError:
            known = False
        if not known:
            self._journal.begin(segment, placement)
        with self._lock:
            self._placement, self.version = placement, placement.version

    def advance(self, version: int) -> None:
        """Record that all ranks hold ``version``.

        Raises:
            SnapshotError: the journal could not be compacted; nothing else is lost.
        """
        if version <= self.version:
            return
        with self._lock:
            self.version = version
            fault_point("chunk.agreed")
            self._journal.compact(version)


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote the journal."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError:
        return  # Reading it reports that.
    version = magic.removeprefix(_MAGIC_OF_ANY)
    if magic.startswith(_MAGIC_OF_ANY) and version.isdigit() and int(version) > FORMAT:
        raise StateVersionError(
            f"{path} is of format {int(version)}, of a newer flexd; this one reads {FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )


def _owner(chunk: Chunk) -> str:
    """Return what is merged: a migration, or the moves of a verification."""
    migration = chunk.migration
    if migration is None:
        return ""
    return migration.trigger if migration.verifies else migration.migration_id


def _merged(chunks: list[Chunk]) -> Chunk:
    """Return one chunk that does what successive ones do."""
    if len(chunks) == 1:
        return chunks[0]
    keys, old, new = (
        np.concatenate([getattr(chunk.delta, name) for chunk in chunks]) for name in ("keys", "old_tiers", "new_tiers")
    )
    changed, first = np.unique(keys, return_index=True)
    last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
    differs = old[first] != new[last]
    delta = Delta(changed[differs], old[first][differs], new[last][differs])
    newest = chunks[-1]
    return Chunk(newest.version, delta, newest.migration, newest.version - chunks[0].before)


def _fit(chunks: list[Chunk], share: float = 1.0) -> BoolArray:
    """Return bool[n + 1]: whether the chunks from each on are within this share of what is kept for rollbacks."""
    rows = np.array([*(len(chunk.delta) for chunk in chunks), 0])[::-1].cumsum()[::-1]
    fits: BoolArray = (rows <= share * _ROLLBACK_ROWS) & (np.arange(len(rows))[::-1] <= share * _ROLLBACK_CHUNKS)
    return fits


def _apply_all(base: Placement, chunks: list[Chunk], version: int) -> Placement:
    if not chunks:
        return base
    changed = np.concatenate([chunk.delta.keys for chunk in chunks])
    tiers = np.concatenate([chunk.delta.new_tiers for chunk in chunks])
    keys, last = np.unique(changed[::-1], return_index=True)
    kept = ~np.isin(base.keys, keys)
    return Placement.of(
        np.concatenate([base.keys[kept], keys]), np.concatenate([base.tiers[kept], tiers[::-1][last]]), version
    )  # fmt: skip
