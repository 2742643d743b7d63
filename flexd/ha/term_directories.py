"""A directory for every term of leadership: a leader that was deposed without noticing writes where nobody reads.

Between a look at the clock and the write that follows it a process may be stopped for any time, so no check can keep it
from writing. Instead every leader has ``term-<number>`` in the shared state directory to itself: it copies what the
newest term before it has left there, and goes on with the copy. Terms are numbered by the lease.

A copy may be torn at the end, as after a crash: its owner may still be writing. Everything in it is read with that in
mind: snapshots are whole or not there, the journal and the plan log end at the first bad record, SQLite files are
copied by SQLite.
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
"""Samples for people, half-made files, and what SQLite merges while it copies."""
_KEPT_TERMS = 3


def highest_term(state_dir: Path) -> int:
    """Of all directories there; 0 without any. Raises SnapshotError if it cannot be listed."""
    return max((number for number, _ in _terms(state_dir)), default=0)


def open_term_directory(state_dir: Path, term: int) -> Path:
    """Makes this term's directory out of the newest before it (or of ``state_dir`` itself, where a daemon without a
    lease has left its state) and removes those of long ago.

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
        # Fails if somebody else has made one with content: nobody goes on with a directory that is not its own.
        made.rename(target)
        sync_directory(state_dir)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise SnapshotError(
            f"state.dir: {before} cannot be copied to {target.name}: {error.strerror or error}",
            remedy="make room in the state directory, and let all daemons write it",
        ) from error
    _log.info("term %d goes on from %s", term, before)
    _remove_old(state_dir, term)
    return target


def _terms(state_dir: Path) -> list[tuple[int, Path]]:
    try:
        entries = list(state_dir.iterdir())
    except OSError as error:
        raise SnapshotError(f"state.dir: {state_dir}: {error.strerror}", remedy="make it readable") from error
    return sorted((int(match[1]), entry) for entry in entries if (match := _TERM.match(entry.name)))


def _copy(source: Path, target: Path, top: bool = False) -> None:
    """Regular files, recursively. A file that its owner removes meanwhile is left out."""
    target.mkdir(mode=0o700)
    for entry in sorted(source.iterdir()):
        if _LEFT_BEHIND.match(entry.name) or entry.is_symlink():
            continue
        if entry.is_dir():
            # At the top there may be the lease, and what earlier tries have left.
            if not top or entry.name in ("snapshots", "placement"):
                _copy(entry, target / entry.name)
        elif entry.is_file():
            with contextlib.suppress(FileNotFoundError):
                _copy_file(entry, target / entry.name)
    sync_directory(target)


def _copy_file(source: Path, target: Path) -> None:
    if source.suffix == ".flexd":
        # A snapshot never changes once it has its name.
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    if source.suffix in _SQLITE:
        _copy_database(source, target)
        return
    # The source first: one that is gone must not leave an empty file, which says something else than none.
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
        # History is for people: a leader without it is better than no leader.
        _log.warning("%s is not taken over: %s", source, error)
        target.unlink(missing_ok=True)


def _remove_old(state_dir: Path, term: int) -> None:
    for entry in state_dir.glob(f"{_UNFINISHED}*"):
        number = entry.name.removeprefix(_UNFINISHED).partition("-")[0]
        if number.isdigit() and int(number) < term:
            shutil.rmtree(entry, ignore_errors=True)
    for _, path in _terms(state_dir)[:-_KEPT_TERMS]:
        shutil.rmtree(path, ignore_errors=True)
