"""One file with the state of a daemon, for backup and for a move to another machine.

A tar archive without compression: the newest undamaged snapshot, the journal of the placement, the history, the
decisions, the plan log, the offsets at which the daemon died, and at its end ``flexd-state.json`` with the size and the
SHA-256 of each. An archive that was cut or changed anywhere is refused as a whole. Nothing is unpacked that the list
below does not name.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import flexd
from flexd.config.model import Config
from flexd.config.tables_file import load_tables
from flexd.core.durable import replace_file, sync_directory
from flexd.core.errors import SnapshotError, StateVersionError, UnusableStateError
from flexd.core.fault_points import fault_point
from flexd.daemon import factory
from flexd.daemon.state_admin import directory_of, locked
from flexd.daemon.state_files import FILES, IMPORTING, newer_files, quarantine_state_file
from flexd.ingest.restore import preview
from flexd.sketch import snapshot
from flexd.sketch.snapshot import SnapshotStore

FORMAT = 1
MANIFEST = "flexd-state.json"
_MAX_MANIFEST_BYTES = 2**20
_SNAPSHOT = re.compile(r"^snapshots/snapshot-\d{12}\.flexd$")
_NAMES = frozenset(file.name for file in FILES)
_BLOCK = 2**20
_REPLACED = ".replaced"
_EXTRACTING = ".importing-"


@dataclass(frozen=True)
class Manifest:
    """The list at the end of an archive.

    Attributes:
        files: (bytes, SHA-256) of each file by name.
    """

    job: str
    version: str
    unix_seconds: float
    files: dict[str, tuple[int, str]]


def export_state(config: Config, archive: Path) -> Manifest:
    """Write the archive, durably and as a whole or not at all. May run beside the daemon.

    Raises:
        SnapshotError: there is no undamaged snapshot, or the archive cannot be written.
        StateVersionError: the newest snapshot is of a newer flexd.
    """
    directory = directory_of(config)
    temporary = archive.with_name(f".{archive.name}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
            manifest = _write(config, directory, out)
            out.flush()
            os.fsync(out.fileno())
        fault_point("export.written")
        temporary.rename(archive)
        sync_directory(archive.absolute().parent)
    except (OSError, tarfile.TarError, sqlite3.Error) as error:
        raise SnapshotError(f"{archive} cannot be written: {error}", remedy="give a path with enough space") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return manifest


def import_state(config: Config, archive: Path, *, replace: bool) -> Manifest:
    """Make the state of the archive that of ``state.dir``. Interrupted, it leaves the old state, or is run again.

    Args:
        replace: quarantine the state that the directory has.

    Raises:
        StateLockedError: a daemon uses the directory.
        UnusableStateError: the configuration could not continue from the archive's counters.
        SnapshotError: the archive is damaged, or the directory has state and ``replace`` is False.
    """
    factory.make_state_directory(config)
    directory = config.state.dir
    with locked(directory):
        unfinished = (directory / IMPORTING).exists()
        present = _present(directory)
        if present and not replace and not unfinished:
            raise SnapshotError(
                f"state.dir: {directory} has state: {', '.join(present)}",
                remedy="import with --replace, which quarantines it, or give another state.dir",
            )
        for left in directory.glob(f"{_EXTRACTING}*"):
            shutil.rmtree(left, ignore_errors=True)
        made = directory / f"{_EXTRACTING}{os.getpid()}"
        try:
            manifest = _extract(archive, made)
            _check(config, made)
            fault_point("import.extracted")
            _install(directory, made)
        except (OSError, tarfile.TarError) as error:
            raise SnapshotError(
                f"{archive} cannot be imported: {error}", remedy="check the file and the disk"
            ) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return manifest


def _write(config: Config, directory: Path, out: BinaryIO) -> Manifest:
    files: dict[str, tuple[int, str]] = {}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, file: BinaryIO) -> None:
            size = os.fstat(file.fileno()).st_size
            hashed = _Hashed(file)
            tar.addfile(_member(name, size), hashed)
            files[name] = (size, hashed.digest)

        with _newest(directory) as (path, file):
            add(f"snapshots/{path.name}", file)
        for each in FILES:
            with suppress(FileNotFoundError), _opened(directory / each.name) as data:
                add(each.name, data)
        manifest = Manifest(config.job, flexd.__version__, time.time(), files)
        content = json.dumps(
            {
                "format": FORMAT, "job": manifest.job, "flexd": manifest.version,
                "unix_seconds": manifest.unix_seconds, "files": files,
            },
            indent=1,
        ).encode()  # fmt: skip
        tar.addfile(_member(MANIFEST, len(content)), io.BytesIO(content))
    return manifest


@contextmanager
def _newest(directory: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Open the newest undamaged snapshot. An open file stays, although the daemon's rotation may remove its name."""
    problems = []
    store = SnapshotStore(directory / "snapshots", 1, read_only=True)
    for path in store.paths():
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue
        with file:
            try:
                snapshot.read(path)
            except StateVersionError:
                raise
            except SnapshotError as error:
                problems.append(error.message)
                continue
            yield path, file
            return
    raise SnapshotError(
        f"{store.directory}: {'; '.join(problems) or 'there are no snapshots'}", remedy="there is nothing to export"
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path.suffix != ".sqlite":
        with path.open("rb") as file:
            yield file
        return
    if not path.exists():
        raise FileNotFoundError(path)
    # A copy that has what is still in the database's log.
    with tempfile.TemporaryDirectory(prefix="flexd-export-") as scratch:
        copy = Path(scratch) / path.name
        with closing(sqlite3.connect(path, timeout=5.0)) as data, closing(sqlite3.connect(copy)) as out:
            data.backup(out)
        with copy.open("rb") as file:
            yield file


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


def _extract(archive: Path, made: Path) -> Manifest:
    """Write the files of the archive below ``made`` and check them against its list."""
    size = archive.stat().st_size
    free = shutil.disk_usage(made.parent).free
    if size > free:
        raise SnapshotError(f"{archive} has {size} bytes, {made.parent} {free} free", remedy="make room")
    made.mkdir(mode=0o700)
    found: dict[str, tuple[int, str]] = {}
    manifest: Manifest | None = None
    with tarfile.open(archive, mode="r:") as tar:
        for member in tar:
            name = member.name
            known = name in _NAMES or name == MANIFEST or _SNAPSHOT.match(name) is not None
            # A sparse member would claim more bytes than the archive has.
            if not known or manifest is not None or name in found or not member.isreg() or member.issparse():
                raise _damaged(archive, f"unexpected member {name[:100]!r}")
            if member.size > size or (name == MANIFEST and member.size > _MAX_MANIFEST_BYTES):
                raise _damaged(archive, f"member {name!r} of {member.size} bytes")
            data = tar.extractfile(member)
            if data is None:
                raise _damaged(archive, f"member {name!r} has no data")
            if name == MANIFEST:
                manifest = _parse(archive, data.read())
            else:
                found[name] = _save(made / name, data)
    if manifest is None:
        raise _damaged(archive, "its list is missing: the file was cut")
    if found != manifest.files:
        wrong = sorted(
            name for name in found.keys() | manifest.files.keys() if found.get(name) != manifest.files.get(name)
        )
        raise _damaged(archive, f"{', '.join(wrong)[:300]}: not as in its list")
    return manifest


def _parse(archive: Path, content: bytes) -> Manifest:
    try:
        document: dict[str, Any] = json.loads(content)
        number = int(document["format"])
        if number > FORMAT:
            raise StateVersionError(
                f"{archive} is of format {number}, of a newer flexd; this one reads {FORMAT}",
                remedy="import it with the flexd that wrote it, or a newer one",
            )
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in document["files"].items()}
        return Manifest(str(document["job"]), str(document["flexd"]), float(document["unix_seconds"]), files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(archive, f"its list is malformed: {error!r}"[:300]) from error


def _save(path: Path, data: Any) -> tuple[int, str]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hashed = hashlib.sha256()
    size = 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        while block := data.read(_BLOCK):
            hashed.update(block)
            size += len(block)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    sync_directory(path.parent)
    return size, hashed.hexdigest()


def _check(config: Config, made: Path) -> None:
    """Raises UnusableStateError if a daemon of this configuration would not start from the files."""
    problems = list(newer_files(made).values())
    tables = config.keyspace().tables if config.tables else load_tables(made)  # those of the ranks are in the archive
    found = preview(SnapshotStore(made / "snapshots", 1, read_only=True), tables, factory.sketch_settings(config))
    if problems or not found.starts or found.path is None:
        raise UnusableStateError(
            "the archive cannot be continued from: " + "; ".join([*problems, *found.refused] or ["it has no snapshot"]),
            remedy="use the flexd and the configuration that wrote it",
        )


def _present(directory: Path) -> list[str]:
    store = SnapshotStore(directory / "snapshots", 1, read_only=True)
    names = [f"snapshots/{path.name}" for path in store.paths()]
    return names + [file.name for file in FILES if (directory / file.name).exists()]


def _install(directory: Path, made: Path) -> None:
    """Quarantine the old state and move the new one in. Until the mark is gone no daemon starts."""
    mark = directory / IMPORTING
    replace_file(mark, [b"run `flexd state import` again\n"])
    fault_point("import.moving")
    store = SnapshotStore(directory / "snapshots", 1)
    for path in reversed(store.paths()):
        store.quarantine.add(path, "replaced", move=True)
    for file in FILES:
        if (directory / file.name).exists():
            quarantine_state_file(directory, file, _REPLACED)
    for source in sorted(path for path in made.rglob("*") if path.is_file()):
        target = directory / source.relative_to(made)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        source.rename(target)
        sync_directory(target.parent)
    sync_directory(directory)
    fault_point("import.moved")
    mark.unlink()
    sync_directory(directory)


def _damaged(archive: Path, what: str) -> SnapshotError:
    return SnapshotError(f"{archive} is damaged: {what}", remedy="export it again")
