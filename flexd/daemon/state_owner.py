"""The job that a state directory belongs to: its counts, placement, decisions and history mean nothing to another."""

from __future__ import annotations

import logging
from pathlib import Path

from flexd.core.durable import replace_file
from flexd.core.errors import SnapshotError, UnusableStateError
from flexd.daemon.state_lock import StateLock

logger = logging.getLogger("flexd")

NAME = "job"
"""File with the name of the job."""


def open_state(directory: Path, job: str) -> StateLock:
    """Lock a state directory for a job, and note the job's name in it.

    Raises:
        StateLockedError: another process holds it, or it cannot be locked.
        UnusableStateError: it belongs to another job; nothing has changed.
    """
    lock = StateLock(directory)
    try:
        check_owner(directory, job)
        if _owner(directory) is None:
            _write_owner(directory, job)
    except BaseException:
        lock.release()
        raise
    return lock


def check_owner(directory: Path, job: str) -> None:
    """Raise UnusableStateError if the directory has the state of another job. Changes nothing."""
    owner = _owner(directory)
    if owner is not None and owner != job:
        raise UnusableStateError(
            f"state.dir: {directory} has the state of job {owner!r}, not of {job!r}",
            remedy=f"give job {job!r} a state.dir of its own, or move this one away if job {owner!r} has ended",
        )


def _owner(directory: Path) -> str | None:
    path = directory / NAME
    try:
        return path.read_text(errors="replace").removesuffix("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableStateError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from error


def _write_owner(directory: Path, job: str) -> None:
    try:
        replace_file(directory / NAME, [f"{job}\n".encode()])
    except SnapshotError as error:
        # A full disk does not prevent the start; the next one tries again.
        logger.warning("the state is not marked as that of job %r: %s", job, error)
