"""Commands of an operator on the state of a daemon: show and reset.

A reset takes the lock of the directory, so a running daemon is never disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexd.config.model import Config
from flexd.core.errors import SketchError, SnapshotError
from flexd.core.fault_points import fault_point
from flexd.daemon import factory
from flexd.daemon.state_files import StateLock, check_owner, mark_unusable, newer_files
from flexd.sketch import snapshot
from flexd.sketch.restore import RestoredState, SnapshotMeta, find_newest
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore

LOCK_WAIT_SECONDS = 3.0
"""A daemon that waits for its state (``state.on_unusable: wait``) has the lock for a moment whenever files change."""


@dataclass(frozen=True)
class SavedSnapshot:
    """A snapshot of the rotation.

    Attributes:
        problem: why it cannot be read; "" if it can.
        format: of its sketches; 0 if it cannot be read.
        accesses: counted by its tables, undecayed.
        messages: sum of its stream positions.
    """

    name: str
    bytes: int
    unix_seconds: float
    format: int = 0
    accesses: int = 0
    messages: int = 0
    problem: str = ""


@dataclass(frozen=True)
class StateReport:
    """The state of a directory, and what a start with the configuration would make of it.

    Attributes:
        problems: why a start would be refused, beside the snapshots.
    """

    directory: Path
    snapshots: tuple[SavedSnapshot, ...]
    preview: RestoredState
    problems: tuple[str, ...]

    @property
    def starts(self) -> bool:
        return self.preview.starts and not self.problems


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
    store = _reader(directory)
    problems = list(newer_files(directory).values())
    try:
        check_owner(directory, config.job)
    except SnapshotError as error:
        problems.append(error.message)
    return StateReport(
        directory,
        tuple(saved for path in store.paths() if (saved := _describe(path)) is not None),
        find_newest(store, config.keyspace().tables, factory.sketch_settings(config)),
        tuple(problems),
    )


def reset(config: Config, *, keep_positions: bool) -> tuple[Path, list[str]]:
    """Set the newest snapshot aside and delete the others, so that the next start is empty.

    Files of a newer format are set aside too.

    Args:
        keep_positions: count from the positions of the newest snapshot on, instead of all that the stream still holds.

    Returns:
        (the directory, the names of what left).

    Raises:
        StateLockedError: a daemon uses the directory.
        UnusableStateError: it has the state of another job.
        SnapshotError: something cannot be moved or written, or there are no positions to keep.
    """
    directory = directory_of(config)
    lock = StateLock(directory, LOCK_WAIT_SECONDS)
    try:
        check_owner(directory, config.job)
        return directory, _reset(config, directory, keep_positions)
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
    for file in newer_files(directory):
        mark_unusable(directory, file)
        moved.append(file.name)
    return moved


def _save_empty(config: Config, store: SnapshotStore, old: list[Path]) -> None:
    problems = []
    for path in old:
        try:
            saved = SnapshotMeta.of(snapshot.read(path, with_arrays=False)[0])
        except (SnapshotError, SketchError) as error:
            problems.append(f"{path.name}: {error.message}")
            continue
        meta, arrays = SketchSet(config.keyspace().tables, factory.sketch_settings(config)).state()
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
    shown = SavedSnapshot(path.name, status.st_size, status.st_mtime)
    try:
        saved = SnapshotMeta.of(snapshot.read(path, with_arrays=False)[0])
        accesses = sum(int(table["samples"]) for table in saved.sketches["sketches"])
        return SavedSnapshot(
            shown.name, shown.bytes, shown.unix_seconds, int(saved.sketches["format"]), accesses,
            sum(saved.positions.values()),
        )  # fmt: skip
    except (SnapshotError, SketchError) as error:
        return SavedSnapshot(shown.name, shown.bytes, shown.unix_seconds, problem=error.message)
    except (KeyError, TypeError, ValueError) as error:
        return SavedSnapshot(shown.name, shown.bytes, shown.unix_seconds, problem=f"damaged: {error!r}")


def _reader(directory: Path) -> SnapshotStore:
    return SnapshotStore(directory / "snapshots", 1, read_only=True)
