"""The state directory: its lock, the job that it belongs to, the formats of its files, and its show and reset.

Formats are checked together before a daemon opens any file. Each class that reads a file refuses a newer format by
itself too. Checked here, one start names all of them, and none is opened, changed or replaced. A reset takes the lock,
so a running daemon is never disturbed.
"""

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any

from flexd.config.model import Config
from flexd.control.daemon import journal
from flexd.core import units
from flexd.core.durable import UNUSABLE, replace_file
from flexd.core.errors import SketchError, SnapshotError, StateLockedError, StateVersionError, UnusableStateError
from flexd.core.model import ALWAYS, DETAIL, HIDDEN, Model, Show
from flexd.core.supervision import fault_point
from flexd.daemon.config_file import sketch_settings
from flexd.operations import decisions
from flexd.sketch import snapshot
from flexd.sketch.restore import UNUSABLE_REMEDY, Outcome, RestoredState, SnapshotMeta, find_newest
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore

LOCK_FILE = "lock"
_POLL_SECONDS = 0.05


class StateLock:
    """Locks the directory until ``release`` or the end of the process.

    Args:
        wait_seconds: longest time to wait for another process that holds it.

    Raises:
        StateLockedError: another process holds it, or the directory cannot be locked.
    """

    def __init__(self, directory: Path, wait_seconds: float = 0.0) -> None:
        path = directory / LOCK_FILE
        try:
            # A file object, so that an error during construction closes the file and releases the lock.
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
        except OSError as error:
            raise StateLockedError(
                f"state.dir: {path} cannot be opened: {error.strerror}", remedy="give a writable directory"
            ) from error
        descriptor = self._file.fileno()
        try:
            _lock(descriptor, time.monotonic() + wait_seconds)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            self._file.close()
            if not isinstance(error, BlockingIOError):
                raise StateLockedError(
                    f"state.dir: {path} cannot be locked: {error.strerror}", remedy="use a file system that has flock"
                ) from error
            raise StateLockedError(
                f"state.dir: {directory} is used by another daemon, process {holder}",
                remedy="stop it, or give this daemon a directory of its own",
            ) from None
        with contextlib.suppress(OSError):
            # A full disk does not prevent the start: only the holder's process id is missing.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Unlock the directory. Further calls do nothing."""
        self._file.close()


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_SECONDS)


JOB_FILE = "job"
"""File with the name of the job."""


def open_state(directory: Path, job: str) -> StateLock:
    """Lock a state directory for a job, and note the job's name in it. Makes it if there is none.

    Raises:
        SnapshotError: it cannot be made.
        StateLockedError: another process holds it, or it cannot be locked.
        UnusableStateError: it belongs to another job; nothing has changed.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SnapshotError(
            f"state.dir: {directory} cannot be made: {error.strerror}", remedy="give a writable directory"
        ) from error
    lock = StateLock(directory)
    try:
        marked = check_owner(directory, job)
    except BaseException:
        lock.release()
        raise
    try:
        if not marked:
            replace_file(directory / JOB_FILE, [f"{job}\n".encode()])
    except SnapshotError as error:
        # A full disk does not prevent the start; the next one tries again.
        logger.warning("the state is not marked as that of job %r: %s", job, error)
    return lock


def check_owner(directory: Path, job: str) -> bool:
    """Return whether the directory is marked as that of this job. Changes nothing.

    Raises:
        UnusableStateError: it has the state of another job, or that cannot be read.
    """
    path = directory / JOB_FILE
    try:
        owner = path.read_text(errors="replace").removesuffix("\n")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnusableStateError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from error
    if owner != job:
        raise UnusableStateError(
            f"state.dir: {directory} has the state of job {owner!r}, not of {job!r}",
            remedy=f"give job {job!r} a state.dir of its own, or move this one away if job {owner!r} has ended",
        )
    return True


logger = logging.getLogger("flexd")


FILES = {"placement/placement.journal": journal.check_version, decisions.NAME: decisions.check_version}
"""Files that have a format version, and what raises StateVersionError if one is of a newer format."""


def newer_files(state_dir: Path) -> dict[str, str]:
    """Return the files of a newer format by name, with what is wrong in words."""
    found = {}
    for name, check in FILES.items():
        try:
            if (state_dir / name).is_file():
                check(state_dir / name)
        except StateVersionError as error:
            found[name] = str(error)
    return found


def check_files(state_dir: Path, *, start_empty: bool) -> None:
    """Check the formats of the state's files.

    Args:
        start_empty: set files of a newer format aside and start without them.

    Raises:
        UnusableStateError: some are of a newer format; nothing has changed.
    """
    found = newer_files(state_dir)
    if found and not start_empty:
        raise UnusableStateError("; ".join(found.values()), remedy=UNUSABLE_REMEDY)
    for name, problem in found.items():
        logger.error("%s: it is now %s%s", problem, name, UNUSABLE)
        decisions.quarantine(state_dir / name)


LOCK_WAIT_SECONDS = 3.0
"""A daemon that waits for its state (``state.on_unusable: wait``) has the lock for a moment whenever files change."""


class SavedSnapshot(Model):
    """A snapshot of the rotation."""

    name: Annotated[str, Show("snapshot")]
    """Name of the file."""
    unix_seconds: Annotated[float, Show("written")] = 0.0
    """When it was written."""
    bytes: Annotated[int, Show("size")] = 0
    """Size of the file."""
    format: Annotated[int, Show(unit=lambda number: str(number or "?"))] = 0
    """Format of its sketches; 0 if it cannot be read."""
    accesses: int = 0
    """Accesses that its tables have counted, undecayed."""
    messages: Annotated[int, DETAIL] = 0
    """Sum of its stream positions."""
    problem: str = ""
    """Reason why it cannot be read; empty if it can."""


class SavedTable(Model):
    """The fate of one table at a start: ``flexd.sketch.restore.TableOutcome``."""

    table: str
    """Name of the table."""
    outcome: Outcome
    """``kept`` as it was, ``emptied`` because its counters are others now, ``new`` or ``removed``."""
    accesses: int = 0
    """Accesses counted in the saved state."""
    detail: str = ""
    """The change, or why the table starts empty; empty if nothing changed."""


class StateReport(Model):
    """The state of a directory, and what a start with the configuration would make of it."""

    directory: str
    """``state.dir``."""
    starts: Annotated[bool, HIDDEN] = False
    """False if a start would be refused."""
    start: Annotated[str, Show("a start")] = ""
    """The same in words."""
    problems: Annotated[tuple[str, ...], Show("problem")] = ()
    """Reasons why it would be refused, and what is wrong with snapshots."""
    restored_from: Annotated[str | None, HIDDEN] = None
    """Name of the snapshot that a start would continue from; null without one."""
    snapshots: tuple[SavedSnapshot, ...] = ()
    """The snapshots, newest first."""
    tables: tuple[SavedTable, ...] = ()
    """The tables of that snapshot and of the configuration."""


class ResetState(Model):
    """The result of a reset."""

    directory: str
    """``state.dir``."""
    removed: Annotated[tuple[str, ...], ALWAYS] = ()
    """Names of the files that left."""


def directory_of(config: Config) -> Path:
    """Return ``state.dir``.

    Raises:
        SnapshotError: it does not exist.
    """
    directory = config.state.dir
    if not directory.is_dir():
        raise SnapshotError(f"state.dir: {directory} does not exist", remedy="give the configuration of the daemon")
    return directory


def report(config: Config) -> StateReport:
    """Return the state. Changes nothing, and may run beside the daemon.

    Raises:
        SnapshotError: the directory cannot be read.
        SketchError: the configuration's tables and sketch settings are impossible.
    """
    directory = directory_of(config)
    store = SnapshotStore(directory / "snapshots", 1, read_only=True)
    problems = list(newer_files(directory).values())
    try:
        check_owner(directory, config.job)
    except SnapshotError as error:
        problems.append(error.message)
    found = find_newest(store, config.keyspace().tables, sketch_settings(config))
    starts = found.starts and not problems
    return StateReport(
        directory=str(directory),
        starts=starts,
        start=_start(found) if starts else "would be REFUSED: see the problems",
        problems=(*problems, *found.problems),
        restored_from=None if found.path is None else found.path.name,
        snapshots=tuple(saved for path in store.paths() if (saved := _describe(path)) is not None),
        tables=tuple(map(SavedTable.from_object, found.outcomes)),
    )


def _start(found: RestoredState) -> str:
    if found.path is None:
        return "would be empty: there are no snapshots"
    lost = sum(outcome.lost for outcome in found.outcomes)
    without = f", without {units.count(lost)} accesses of tables below" if lost else ""
    return f"would continue from {found.path.name}{without}"


def reset(config: Config, *, keep_positions: bool) -> ResetState:
    """Set the newest snapshot aside and delete the others, so that the next start is empty.

    Files of a newer format are set aside too.

    Args:
        keep_positions: count from the positions of the newest snapshot on, instead of all that the stream still holds.

    Raises:
        StateLockedError: a daemon uses the directory.
        UnusableStateError: it has the state of another job.
        SnapshotError: something cannot be moved or written, or there are no positions to keep.
    """
    directory = directory_of(config)
    lock = StateLock(directory, LOCK_WAIT_SECONDS)
    try:
        check_owner(directory, config.job)
        return ResetState(directory=str(directory), removed=tuple(_reset(config, directory, keep_positions)))
    finally:
        lock.release()


def _reset(config: Config, directory: Path, keep_positions: bool) -> list[str]:
    # A rotation that removes nothing.
    store = SnapshotStore(directory / "snapshots", 2**31)
    old = store.paths()
    if keep_positions:
        _save_empty(config, store, old)
        fault_point("reset.saved")
    moved = []
    # The oldest first: interrupted, the directory means what it meant before.
    for path in reversed(old):
        store.mark_unusable(path)
        moved.append(path.name)
        fault_point("reset.moved")
    for name in newer_files(directory):
        decisions.quarantine(directory / name)
        moved.append(name)
    return moved


def _save_empty(config: Config, store: SnapshotStore, old: list[Path]) -> None:
    problems = []
    for path in old:
        try:
            saved = SnapshotMeta.of(snapshot.read(path, with_arrays=False)[0])
        except (SnapshotError, SketchError) as error:
            problems.append(f"{path.name}: {error.message}")
            continue
        meta, arrays = SketchSet(config.keyspace().tables, sketch_settings(config)).state()
        store.save({"sketches": meta, "positions": saved.positions, "generation": saved.generation}, arrays)
        return
    raise SnapshotError(
        f"{store.directory}: no snapshot with stream positions: {'; '.join(problems) or 'there is none'}",
        remedy="reset without --keep-positions",
    )


def _describe(path: Path) -> SavedSnapshot | None:
    try:
        status = path.stat()
    except OSError:
        return None  # The daemon's rotation has removed it.
    shown = SavedSnapshot(name=path.name, unix_seconds=status.st_mtime, bytes=status.st_size)
    try:
        saved = SnapshotMeta.of(snapshot.read(path, with_arrays=False)[0])
        read: dict[str, Any] = {
            "format": int(saved.sketches["format"]),
            "accesses": sum(int(table["samples"]) for table in saved.sketches["sketches"]),
            "messages": sum(saved.positions.values()),
        }
    except (SnapshotError, SketchError) as error:
        read = {"problem": error.message}
    except (KeyError, TypeError, ValueError) as error:
        read = {"problem": f"damaged: {error!r}"}
    return shown.model_copy(update=read)
