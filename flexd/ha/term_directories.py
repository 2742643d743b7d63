"""State directories by term: a leader that has lost its lease unnoticed writes where no other daemon reads.

A process may be stopped for any time between checking the clock and the write that follows, so no check prevents that
write. Instead every leader has ``term-<number>`` in the shared state directory to itself: it copies the directory of
the newest earlier term and continues with the copy. The lease numbers the terms.

A copy may be torn at the end, as after a crash, because its owner may still be writing. All readers allow for that:
snapshots are complete or absent, the journal and the plan log end at the first bad record, and SQLite copies its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sqlite3
from pathlib import Path

from flexd.core.durable import sync_directory
from flexd.core.errors import SnapshotError

_log = logging.getLogger(__name__)

_TERM = re.compile(r"^term-(\d{10})$")
_UNFINISHED = ".unfinished-"
_SQLITE = (".sqlite", ".sqlite3", ".db")
_LEFT_BEHIND = re.compile(r"^(lock|dead-letters.*|.*\.tmp|.*-wal|.*-shm|.*-journal)$")
"""Not copied: samples of rejected messages, temporary files, and side files that SQLite merges while it copies."""
_KEPT_TERMS = 3


def highest_term(state_dir: Path) -> int:
    """Return the highest term with a directory; 0 without any. Raises SnapshotError if it cannot be listed."""
    return max((number for number, _ in _terms(state_dir)), default=0)


def newest_directory(state_dir: Path) -> Path:
    """Return the directory of the newest term, else ``state_dir``. Raises SnapshotError as ``highest_term``."""
    term = highest_term(state_dir)
    return state_dir / f"term-{term:010d}" if term else state_dir


def open_term_directory(state_dir: Path, term: int) -> Path:
    """Create this term's directory from the newest earlier one and remove old ones.

    The first term starts from ``state_dir`` itself, where a daemon without a lease keeps its state.

    Raises:
        SnapshotError: the disk is full, the directory is not writable, or the term or a later one has a directory.
    """
    newest = highest_term(state_dir)
    if newest >= term:
        raise SnapshotError(
            f"state.dir: {state_dir} has a directory of term {newest} already, this is term {term}",
            remedy="daemons of one job must use one lease",
        )
    before = state_dir / f"term-{newest:010d}" if newest else state_dir
    made, target = state_dir / f"{_UNFINISHED}{term}-{os.getpid()}", state_dir / f"term-{term:010d}"
    try:
        shutil.rmtree(made, ignore_errors=True)
        _copy(before, made, top=before == state_dir)
        # Fails if another process has filled the directory: no daemon continues with a directory that is not its own.
        made.rename(target)
        sync_directory(state_dir)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise SnapshotError(
            f"state.dir: {before} cannot be copied to {target.name}: {error.strerror or error}",
            remedy="make room in the state directory, and let all daemons write it",
        ) from error
    _log.info("term %d continues from %s", term, before)
    _remove_old(state_dir, term)
    return target


def _terms(state_dir: Path) -> list[tuple[int, Path]]:
    try:
        entries = list(state_dir.iterdir())
    except OSError as error:
        raise SnapshotError(f"state.dir: {state_dir}: {error.strerror}", remedy="make it readable") from error
    return sorted((int(match[1]), entry) for entry in entries if (match := _TERM.match(entry.name)))


def _copy(source: Path, target: Path, top: bool = False) -> None:
    """Copy regular files recursively. Skips a file that its owner removes meanwhile."""
    target.mkdir(mode=0o700)
    for entry in sorted(source.iterdir()):
        if _LEFT_BEHIND.match(entry.name) or entry.is_symlink():
            continue
        if entry.is_dir():
            # The top level may hold the lease and directories of earlier attempts.
            if not top or entry.name in ("snapshots", "placement"):
                _copy(entry, target / entry.name)
        elif entry.is_file():
            with contextlib.suppress(FileNotFoundError):
                _copy_file(entry, target / entry.name)
    sync_directory(target)


def _copy_file(source: Path, target: Path) -> None:
    if source.suffix == ".flexd":
        # A snapshot never changes once it has its final name.
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    if source.suffix in _SQLITE:
        _copy_database(source, target)
        return
    # The source is opened first: if it is gone, no empty file may remain, which differs in meaning from no file.
    with source.open("rb") as data:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            shutil.copyfileobj(data, out, 2**20)
            out.flush()
            os.fsync(out.fileno())


def _copy_database(source: Path, target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with (
            contextlib.closing(sqlite3.connect(source, timeout=5.0)) as data,
            contextlib.closing(sqlite3.connect(target)) as out,
        ):
            data.backup(out)
    except sqlite3.Error as error:
        # The history is for users: a leader without it is better than no leader.
        _log.warning("%s is not copied to the new term: %s", source, error)
        target.unlink(missing_ok=True)


def _remove_old(state_dir: Path, term: int) -> None:
    for entry in state_dir.glob(f"{_UNFINISHED}*"):
        number = entry.name.removeprefix(_UNFINISHED).partition("-")[0]
        if number.isdigit() and int(number) < term:
            shutil.rmtree(entry, ignore_errors=True)
    for _, path in _terms(state_dir)[:-_KEPT_TERMS]:
        shutil.rmtree(path, ignore_errors=True)
