"""The history's SQLite file: bounded, mode 0600, quarantined if it is corrupt."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path

from flexd.control.daemon.migration_states import FINAL_STATES, MigrationState, TransitionEvent
from flexd.core.errors import SnapshotError, StateVersionError
from flexd.operations.history.records import (
    ActionRecord,
    EffectRecord,
    Entry,
    MigrationRecord,
    TransitionRecord,
    VerdictRecord,
)
from flexd.operations.history.side_tables import EFFECTS, VERDICTS

FORMAT = 1
"""``PRAGMA user_version`` of the file."""
_STEPS: dict[int, str] = {}
"""SQL that brings each older format to the next one."""
BUSY_SECONDS = 2.0
KEPT_TRANSITIONS = 256
"""Transitions kept of one migration: the first and the newest."""
ENDED_UNSEEN = "the daemon ended while it was unfinished"

_COLUMNS = tuple(field.name for field in fields(MigrationRecord))
_TRANSITION_COLUMNS = tuple(field.name for field in fields(TransitionRecord))
_ACTION_COLUMNS = tuple(field.name for field in fields(ActionRecord))
_NUMERIC = {"int": "INTEGER", "float": "REAL", "bool": "INTEGER", "str": "TEXT"}
_SIDE_FILES = ("", "-wal", "-shm")


def _definition(kind: type[MigrationRecord] | type[TransitionRecord] | type[ActionRecord]) -> str:
    return ", ".join(f'"{field.name}" {_NUMERIC[str(field.type)]} NOT NULL' for field in fields(kind))


_SCHEMA = f"""
CREATE TABLE migrations (
    serial INTEGER PRIMARY KEY AUTOINCREMENT, {_definition(MigrationRecord)}, UNIQUE (migration_id)
);
CREATE TABLE transitions (
    serial INTEGER NOT NULL REFERENCES migrations ON DELETE CASCADE, {_definition(TransitionRecord)},
    PRIMARY KEY (serial, number)
) WITHOUT ROWID;
PRAGMA user_version = {FORMAT};
"""
_ACTIONS = f"CREATE TABLE IF NOT EXISTS actions (serial INTEGER PRIMARY KEY AUTOINCREMENT, {_definition(ActionRecord)})"
"""Not part of the format: older files have no such table, and older daemons ignore it."""
_HAS_ACTIONS = "SELECT 1 FROM sqlite_master WHERE name = 'actions'"
_NAMES = ", ".join(f'"{name}"' for name in _COLUMNS)
_NEWER = ", ".join(f'"{name}" = excluded."{name}"' for name in _COLUMNS)
_UPSERT = (
    f"INSERT INTO migrations ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    f"ON CONFLICT (migration_id) DO UPDATE SET {_NEWER} RETURNING serial"
)
_TRANSITION_NAMES = ", ".join(f'"{name}"' for name in _TRANSITION_COLUMNS)
_ADD_TRANSITION = (
    f"INSERT OR REPLACE INTO transitions (serial, {_TRANSITION_NAMES}) "
    f"VALUES ({', '.join('?' * (len(_TRANSITION_COLUMNS) + 1))})"
)
_ACTION_NAMES = ", ".join(f'"{name}"' for name in _ACTION_COLUMNS)
_ADD_ACTION = f"INSERT INTO actions ({_ACTION_NAMES}) VALUES ({', '.join('?' * len(_ACTION_COLUMNS))})"


class _UnusableFileError(sqlite3.DatabaseError):
    """The file is a database, but not a history."""


def _is_unusable(error: sqlite3.Error) -> bool:
    """Return whether the file's content is at fault, and not the disk, a lock or a permission."""
    if isinstance(error, _UnusableFileError):
        return True
    # Extended codes have more in their upper bits.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class HistoryStore:
    """The SQLite file. One thread writes, any may read; another process may read it with sqlite3.

    Args:
        path: the file; created when it is opened.
        keep: limit of migrations, and of actions: the oldest are deleted. May be set at any time.
        on_quarantine: called with the reason when an unusable file was moved to ``PATH.unusable``.
    """

    def __init__(self, path: Path, keep: int, on_quarantine: Callable[[str], None]) -> None:
        self._path = path
        self.keep = keep
        self._on_quarantine = on_quarantine
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Create or check the file. Migrations that a crash left unfinished are recorded as failed.

        Raises:
            StateVersionError: a newer flexd wrote the file; it is unchanged.
            SnapshotError: the file can be neither used nor made.
        """
        if self._connection is not None:
            return
        with self._named("cannot be opened"):
            try:
                self._connection = self._opened()
            except sqlite3.Error as error:
                if not _is_unusable(error):
                    raise
                self._quarantine(str(error))
                self._connection = self._opened()
            self._fail_unfinished(self._connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, in one transaction.

        Raises:
            SnapshotError: they cannot be written. A corrupt file is quarantined first, and they go to a new one.
        """
        self.open()
        with self._named("cannot be written"):
            try:
                self._write(entries)
            except sqlite3.Error as error:
                if not _is_unusable(error):
                    raise
                self.close()
                self._quarantine(str(error))
                self._connection = self._opened()
                self._write(entries)

    def newest(self, limit: int, state: MigrationState | None = None) -> tuple[MigrationRecord, ...]:
        """Return migrations, the newest first.

        Raises:
            SnapshotError: the file cannot be read.
        """
        where, values = ("", ()) if state is None else ("WHERE state = ?", (state.name,))
        with self._reading() as connection:
            rows = () if connection is None else connection.execute(
                f"SELECT {_NAMES} FROM migrations {where} ORDER BY serial DESC LIMIT ?", (*values, limit)
            ).fetchall()  # fmt: skip
        return tuple(_record(row) for row in rows)

    def find(self, migration_id: str) -> tuple[MigrationRecord, tuple[TransitionRecord, ...]] | None:
        """Return a migration with its transitions, the oldest first; None if there is none.

        Raises:
            SnapshotError: the file cannot be read.
        """
        with self._reading() as connection:
            if connection is None:
                return None
            found = connection.execute(
                f"SELECT serial, {_NAMES} FROM migrations WHERE migration_id = ?", (migration_id,)
            ).fetchone()
            if found is None:
                return None
            rows = connection.execute(
                f"SELECT {_TRANSITION_NAMES} FROM transitions WHERE serial = ? ORDER BY number", (found[0],)
            ).fetchall()
        return _record(found[1:]), tuple(TransitionRecord(*row) for row in rows)

    def newest_actions(self, limit: int) -> tuple[ActionRecord, ...]:
        """Return actions, the newest first; none from the file of a daemon that kept none.

        Raises:
            SnapshotError: the file cannot be read.
        """
        with self._reading() as connection:
            if connection is None or not connection.execute(_HAS_ACTIONS).fetchall():
                return ()
            rows = connection.execute(
                f"SELECT {_ACTION_NAMES} FROM actions ORDER BY serial DESC LIMIT ?", (limit,)
            ).fetchall()
        return tuple(ActionRecord(*row) for row in rows)

    def effects(self, migration_ids: Sequence[str]) -> dict[str, EffectRecord]:
        """Return the kept effects by migration; none from the file of a daemon that kept none.

        Raises:
            SnapshotError: the file cannot be read.
        """
        with self._reading() as connection:
            return {} if connection is None else EFFECTS.of_migrations(connection, migration_ids)

    def verdicts(self, migration_ids: Sequence[str]) -> dict[str, VerdictRecord]:
        """Return the kept verdicts by migration; none from the file of a daemon that kept none.

        Raises:
            SnapshotError: the file cannot be read.
        """
        with self._reading() as connection:
            return {} if connection is None else VERDICTS.of_migrations(connection, migration_ids)

    def newest_verdict(self) -> VerdictRecord | None:
        """Return the verdict on the newest migration that has one; None without any.

        Raises:
            SnapshotError: the file cannot be read.
        """
        with self._reading() as connection:
            return None if connection is None else VERDICTS.newest(connection)

    def _write(self, entries: Sequence[Entry]) -> None:
        connection = self._connection
        assert connection is not None  # noqa: S101
        with _transaction(connection):
            for entry in entries:
                if isinstance(entry, ActionRecord):
                    connection.execute(_ADD_ACTION, astuple(entry))
                    continue
                if isinstance(entry, EffectRecord):
                    EFFECTS.write(connection, entry)
                    continue
                if isinstance(entry, VerdictRecord):
                    VERDICTS.write(connection, entry)
                    continue
                (serial,) = connection.execute(_UPSERT, astuple(entry.record)).fetchone()
                if entry.transition is not None:
                    connection.execute(_ADD_TRANSITION, (serial, *astuple(entry.transition)))
                    connection.execute(
                        "DELETE FROM transitions WHERE serial = ? AND number > 0 AND number <= ?",
                        (serial, entry.transition.number - KEPT_TRANSITIONS + 1),
                    )
            for table in ("migrations", "actions"):
                connection.execute(
                    f"DELETE FROM {table} WHERE serial <= (SELECT serial FROM {table} ORDER BY serial DESC LIMIT 1 "
                    "OFFSET ?)", (self.keep,),
                )  # fmt: skip

    def _opened(self) -> sqlite3.Connection:
        # SQLite gives its side files the mode of the main one.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            # Checked before anything is changed: the file may belong to another program.
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
                connection.executescript(f"{_SCHEMA}{_ACTIONS};")
            else:
                _check_format(self._path, version)
                _upgrade(connection, version)
            faults = connection.execute("PRAGMA quick_check(1)").fetchall()
            if faults != [("ok",)]:
                raise _UnusableFileError(str(faults[0][0]))
            for table, columns in (("migrations", _COLUMNS), ("transitions", ("serial", *_TRANSITION_COLUMNS))):
                _check_columns(connection, table, columns)
            # Only now is it known to be a history.
            connection.execute(_ACTIONS)
            _check_columns(connection, "actions", ("serial", *_ACTION_COLUMNS))
            for beside in (EFFECTS, VERDICTS):
                connection.execute(beside.create)
                _check_columns(connection, beside.name, beside.columns)
            connection.execute("PRAGMA journal_mode = WAL")
            # Survives a crash of the process; after a power failure only the newest entries may be missing.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            # SQLite's default of 1,000 pages would be four megabytes beside a file of a few hundred kilobytes.
            connection.execute("PRAGMA wal_autocheckpoint = 128")
            connection.execute("PRAGMA journal_size_limit = 1048576")
        except BaseException:
            connection.close()
            raise
        return connection

    def _fail_unfinished(self, connection: sqlite3.Connection) -> None:
        final = [state.name for state in FINAL_STATES]
        with _transaction(connection):
            marks = ", ".join("?" * len(final))
            open_ones = connection.execute(
                f"SELECT serial, state, rows_pushed, rows_applied, last_version FROM migrations "
                f"WHERE state NOT IN ({marks})", final,
            ).fetchall()  # fmt: skip
            for serial, state, pushed, applied, version in open_ones:
                (number,) = connection.execute(
                    "SELECT COALESCE(MAX(number), -1) + 1 FROM transitions WHERE serial = ?", (serial,)
                ).fetchone()
                failed = TransitionRecord(
                    number, time.time(), TransitionEvent.FAIL.value, state, MigrationState.FAILED.name, ENDED_UNSEEN,
                    pushed, applied, version,
                )  # fmt: skip
                connection.execute(_ADD_TRANSITION, (serial, *astuple(failed)))
                connection.execute(
                    "UPDATE migrations SET state = ?, problem = ?, ended_unix_seconds = ? WHERE serial = ?",
                    (failed.after, failed.reason, failed.unix_seconds, serial),
                )
            connection.execute("UPDATE migrations SET settled = 1")

    def _quarantine(self, reason: str) -> None:
        for suffix in _SIDE_FILES:
            side = Path(f"{self._path}{suffix}")
            if side.exists():
                side.replace(f"{self._path}.unusable{suffix}")
        self._on_quarantine(reason)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        if not self._path.exists():
            yield None
            return
        with self._named("cannot be read"):
            connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS, isolation_level=None
            )
            try:
                yield connection
            finally:
                connection.close()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise SnapshotError(
                f"migration history {self._path} {what}: {error}",
                remedy="make room in the state directory, or move the file away",
            ) from error


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote the file."""
    with contextlib.suppress(sqlite3.Error):  # Opening it reports that.
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
        with contextlib.closing(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            _check_format(path, version)


def _check_format(path: Path, version: int) -> None:
    if version > FORMAT:
        raise StateVersionError(
            f"{path} is of format {version}, of a newer flexd; this one reads {FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )


def _upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Bring an older file to the present format, step by step, each in one transaction."""
    for number in range(version, FORMAT):
        if number not in _STEPS:
            raise _UnusableFileError(f"it is of format {number}, not {FORMAT}")
        with _transaction(connection):
            for statement in _STEPS[number].split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")


def _check_columns(connection: sqlite3.Connection, table: str, columns: Sequence[str]) -> None:
    found = {str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")}
    if not found >= set(columns):
        raise _UnusableFileError(f"its table {table} lacks {', '.join(sorted(set(columns) - found))}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _record(row: tuple[object, ...]) -> MigrationRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["settled"] = bool(values["settled"])
    return MigrationRecord(**values)  # type: ignore[arg-type]
