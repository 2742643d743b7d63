"""``state.sqlite``: what a daemon remembers beside its counters and the placement, and the decisions in it that survive
a restart: a pause, a throttle, a rollback, plans that were not shown to win.

A record is one JSON document with a digest, which notices a bit that changes on disk. ``FORMAT`` is that of the tables
and of every document in them: it grows with any change that an older flexd could not read, and a file of an older
format is changed to this one when it is opened.
"""

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexd.config.base import describe_faults
from flexd.config.sections import ThrottleConfig
from flexd.control.daemon.pusher import ThrottleLimits
from flexd.core.durable import UNUSABLE, sync_directory
from flexd.core.errors import SnapshotError, StateVersionError

NAME = "state.sqlite"
FORMAT = 3
"""``PRAGMA user_version`` of the file."""
BUSY_SECONDS = 2.0
_TABLES = {
    "migrations": "serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, document TEXT NOT NULL, digest",
    "actions": "serial INTEGER PRIMARY KEY AUTOINCREMENT, document TEXT NOT NULL, digest",
    "documents": "name TEXT PRIMARY KEY, document TEXT NOT NULL, digest",
}
_DIGESTS = "; ".join(
    f"CREATE TRIGGER {table}_{event.split()[0]} AFTER {event} ON {table} BEGIN"
    f" UPDATE {table} SET digest = digest_of(CAST(document AS BLOB)) WHERE rowid = NEW.rowid; END"
    for table in _TABLES
    for event in ("INSERT", "UPDATE OF document")
)
# SQL that makes a file of the next format from one of an older format.
_UPGRADES = {
    1: "ALTER TABLE decisions RENAME TO documents",
    2: "; ".join(
        f"ALTER TABLE {table} ADD COLUMN digest; UPDATE {table} SET digest = digest_of(CAST(document AS BLOB))"
        for table in _TABLES
    )
    + f"; {_DIGESTS}",
}

logger = logging.getLogger("flexd")

Result = TypeVar("Result")
Statement = tuple[str, tuple[object, ...]]
"""SQL with the values of its parameters."""


class _UnusableFileError(sqlite3.DatabaseError):
    """The file is a database, but not a daemon's state."""


def _is_unusable(error: sqlite3.Error) -> bool:
    """Return whether the file's content is at fault, and not the disk, a lock or a permission."""
    # Extended codes have more in their upper bits.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, _UnusableFileError) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class StateDatabase:
    """The SQLite file, mode 0600. Thread-safe; other processes may read it with sqlite3.

    A file whose content cannot be used is moved to ``PATH.unusable``, and a new one is begun.

    Args:
        path: the file; created by the first write.
        read_only: change nothing, not even a file whose content cannot be used: an error says so.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        with self._lock:
            self._close()

    def read(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if there is no file.

        Raises:
            StateVersionError: a newer flexd wrote the file; it is unchanged.
            SnapshotError: the file cannot be read.
        """
        with self._lock, self._named("cannot be read"):
            if self._connection is None and not self._path.exists():
                return []
            return self._on_usable_file(lambda connection: connection.execute(statement, values).fetchall())

    def document(self, name: str) -> str | None:
        """Return a document of ``documents``; None if there is none. Raises as ``read``."""
        rows = self.read("SELECT document FROM documents WHERE name = ?", name)
        return str(rows[0][0]) if rows else None

    def put(self, name: str, document: str) -> None:
        """Replace a document of ``documents``. Raises as ``read``."""
        self.write([("INSERT OR REPLACE INTO documents (name, document) VALUES (?, ?)", (name, document))])

    def write(self, statements: Sequence[Statement]) -> None:
        """Execute all statements or none; they are durable on return. Raises as ``read``."""

        def execute(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    connection.execute(statement, values)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

        with self._lock, self._named("cannot be written"):
            self._on_usable_file(execute)

    def _on_usable_file(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return work(self._opened())
        except sqlite3.Error as error:
            if self._read_only or not _is_unusable(error):
                raise
            self._close()
            quarantine(self._path)
            logger.error(
                "%s cannot be used (%s): it is kept as *%s; no pause, throttle or rollback is in force",
                self._path, error, UNUSABLE,
            )  # fmt: skip
            return work(self._opened())

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        if not self._read_only:
            # SQLite gives its side files the mode of the main one.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connect(self._path, "ro" if self._read_only else "rw")
        try:
            # Checked before anything is changed: the file may belong to another program.
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            _check_format(self._path, version)
            if version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
                tables = "".join(f"CREATE TABLE {name} ({columns});" for name, columns in _TABLES.items())
                connection.executescript(f"BEGIN; {tables} {_DIGESTS}; PRAGMA user_version = {FORMAT}; COMMIT")
            elif version < FORMAT:
                if self._read_only and version in _UPGRADES:
                    raise SnapshotError(
                        f"{self._path} is of format {version}, not {FORMAT}",
                        remedy="start the daemon once, which changes it and keeps what it has",
                    )
                _upgrade(connection, version)
            faults = connection.execute("PRAGMA quick_check(1)").fetchall()
            if faults != [("ok",)]:
                raise _UnusableFileError(str(faults[0][0]))
            for name, columns in _TABLES.items():
                wanted = {column.split()[0] for column in columns.split(", ")}
                lacking = wanted - {str(row[1]) for row in connection.execute(f"PRAGMA table_info({name})")}
                if lacking:
                    raise _UnusableFileError(f"its table {name} lacks {', '.join(sorted(lacking))}")
                self._drop_damaged(connection, name)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _drop_damaged(self, connection: sqlite3.Connection, table: str) -> None:
        """Delete records that are not what was written. With ``read_only`` they are an error."""
        damaged = f"FROM {table} WHERE digest IS NOT digest_of(CAST(document AS BLOB))"
        for (document,) in connection.execute(f"SELECT CAST(document AS BLOB) {damaged}").fetchall():
            if self._read_only:
                raise _UnusableFileError(f"a record of its table {table} was damaged: {document[:200]!r}")
            logger.error("%s: a record of %s was damaged, and is deleted: %.200r", self._path, table, document)
            connection.execute(f"DELETE {damaged}")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise SnapshotError(
                f"{self._path} {what}: {error}", remedy="make room in the state directory, or move the file away"
            ) from error


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None,
        check_same_thread=False,
    )  # fmt: skip
    connection.create_function("digest_of", 1, _digest_of, deterministic=True)
    return connection


def _digest_of(document: bytes | None) -> str:
    return hashlib.sha256(document or b"").hexdigest()[:16]


def _upgrade(connection: sqlite3.Connection, version: int) -> None:
    if version not in _UPGRADES:
        raise _UnusableFileError(f"it is of format {version}, not {FORMAT}")
    steps = "; ".join(_UPGRADES[older] for older in range(version, FORMAT))
    try:
        connection.executescript(f"BEGIN; {steps}; PRAGMA user_version = {FORMAT}; COMMIT")
    except sqlite3.OperationalError as error:
        raise _UnusableFileError(f"it is of format {version} and lacks what that has: {error}") from error


def quarantine(path: Path) -> None:
    """Rename a file, with SQLite's log of it if there is one, so that a start does without it.

    Raises:
        SnapshotError: it cannot be renamed.
    """
    try:
        # The log first: SQLite would apply one that stays to the next file of that name.
        for side in ("-journal", ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{side}").replace(f"{path}{UNUSABLE}{side}")
        sync_directory(path.parent)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be renamed: {error.strerror}", remedy="check its permissions") from error


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote the file."""
    # Opening it reports other errors.
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_connect(path, "ro")) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        _check_format(path, version)


def _check_format(path: Path, version: int) -> None:
    if version > FORMAT:
        raise StateVersionError(
            f"{path} is of format {version}, of a newer flexd; this one reads {FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )


LONGEST_SECONDS = 86_400.0


MAX_ROLLED_BACK = 64
_DOCUMENT = "in force"
_Message = Annotated[str, Field(max_length=2_000)]
_Bytes = Annotated[int, Field(ge=1, le=2**50)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Pause(_Stored):
    """Planning and pushing are on hold since ``unix_seconds``."""

    reason: _Message
    requested_by: _Message = ""
    unix_seconds: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class ThrottleOverride(_Stored):
    """Limits that replace the configured ones; None is no limit.

    Attributes:
        configured: ``control.throttle`` (JSON) when the limits were chosen. A configuration that differs was changed
            later and takes precedence.
    """

    bytes_per_step: _Bytes | None = None
    bytes_per_second: _Bytes | None = None
    configured: _Message = ""

    @property
    def limits(self) -> ThrottleLimits:
        return ThrottleLimits(self.bytes_per_step, self.bytes_per_second)

    @property
    def message(self) -> str:
        """The limits in words, for log lines and the history."""
        per_step, per_second = self.bytes_per_step or "no limit", self.bytes_per_second or "no limit"
        return f"bytes per step {per_step}, bytes per second {per_second}"

    def matches_config(self, throttle: ThrottleConfig) -> bool:
        """Return whether the limits were chosen under this configuration."""
        return self.configured == throttle.model_dump_json()


class HeldPlan(_Stored):
    """Plans of one kind (``NODE``, ``DEVICE``, ``NODE+DEVICE``) that wait because one of them was rolled back: it was
    not shown to win, or a user took it back.

    Attributes:
        seconds: length of this hold; the next one of the kind is twice as long.
    """

    kind: _Message
    reason: _Message
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    until_unix_seconds: Annotated[float, Field(allow_inf_nan=False)]


class Decisions(_Stored):
    """All decisions in force; None or empty where there is none.

    Attributes:
        rollback: the unfinished migrations whose rollback was requested; at most one of them had started. Without
            meaning once another migration has pushed a chunk.
        verification: the migration whose effect is being measured.
    """

    pause: Pause | None = None
    throttle: ThrottleOverride | None = None
    rollback: Annotated[tuple[_Message, ...], Field(max_length=MAX_ROLLED_BACK)] = ()
    held_plans: Annotated[tuple[HeldPlan, ...], Field(max_length=8)] = ()
    verification: _Message = ""


class DecisionFile:
    """The decisions in the state's file. Thread-safe.

    Attributes:
        current: the decisions in force, written to disk or not.
        failures: failed writes since the start; ``retry`` tries again.
        problem: why the newest write failed; empty if it succeeded.

    Raises:
        StateVersionError: a newer flexd wrote the file; it is unchanged.
        SnapshotError: the file exists and cannot be read.
    """

    def __init__(self, file: StateDatabase) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.failures = 0
        self.problem = ""
        self.current = Decisions()
        document = file.document(_DOCUMENT)
        if document is not None:
            try:
                self.current = Decisions.model_validate_json(document)
            except ValidationError as error:
                faults = "; ".join(describe_faults(error, Decisions, {}))
                logger.error("decisions are not usable, no pause, throttle or rollback is in force: %s", faults[:500])

    def update(
        self,
        **changed: Pause | ThrottleOverride | tuple[str, ...] | tuple[HeldPlan, ...] | str | None,
    ) -> None:
        """Change fields of ``current``. They hold at once and are durable on return unless ``problem`` is set."""
        with self._lock:
            self.current = self.current.model_copy(update=changed)
            self._write()

    def hold(self, kinds: Sequence[str], reason: str, first_seconds: float, unix_seconds: float) -> None:
        """Hold plans of these kinds back for ``first_seconds``, or twice the time of the hold before.

        A hold outlives the daemon, until a plan of the kind measures no slower. Users' plans are not held.
        """
        held = self._held()
        for kind in kinds:
            before = held.pop(kind, None)
            seconds = min(LONGEST_SECONDS, first_seconds if before is None else max(first_seconds, 2 * before.seconds))
            held[kind] = HeldPlan(kind=kind, reason=reason, seconds=seconds, until_unix_seconds=unix_seconds + seconds)
        self.update(held_plans=tuple(held.values()))

    def release(self, kind: str) -> None:
        """Release plans of this kind, and forget their back-off."""
        held = self._held()
        if held.pop(kind, None) is not None:
            self.update(held_plans=tuple(held.values()))

    def held_reason(self, kind: str, unix_seconds: float | None = None) -> str:
        """Return why plans of this kind are held back now; empty if they are not."""
        held = self._held().get(kind)
        return "" if held is None else _held_message([held], unix_seconds)

    def held_reasons(self) -> tuple[str, ...]:
        """Return the reasons of all holds in force, each with its kinds."""
        by_reason: dict[tuple[str, float], list[HeldPlan]] = {}
        for held in self.current.held_plans:
            by_reason.setdefault((held.reason, held.until_unix_seconds), []).append(held)
        return tuple(filter(None, map(_held_message, by_reason.values())))

    def _held(self) -> dict[str, HeldPlan]:
        return {held.kind: held for held in self.current.held_plans}

    def retry(self) -> None:
        """Repeat a write that failed."""
        with self._lock:
            if self.problem:
                self._write()

    def _write(self) -> None:
        try:
            self._file.put(_DOCUMENT, self.current.model_dump_json())
            self.problem = ""
        except SnapshotError as error:
            self.failures += 1
            logger.log(logging.DEBUG if self.problem else logging.ERROR, "decisions are not saved: %s", error)
            self.problem = str(error)


def _held_message(held: Sequence[HeldPlan], unix_seconds: float | None = None) -> str:
    """Return why plans of these kinds, held by one decision, wait; empty if they do not."""
    newest, now = held[0], time.time() if unix_seconds is None else unix_seconds
    # A clock that was set back does not extend a hold.
    if min(newest.until_unix_seconds - now, newest.seconds) <= 0:
        return ""
    until, kinds = datetime.fromtimestamp(newest.until_unix_seconds, UTC), ", ".join(each.kind for each in held)
    return f"{newest.reason}; plans for {kinds} wait until {until:%Y-%m-%d %H:%M:%S} UTC"
