"""The lock of a state directory: two daemons would overwrite each other's snapshots."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from flexd.core.errors import StateLockedError

FILE_NAME = "lock"
_POLL_SECONDS = 0.05


class StateLock:
    """Locks the directory until ``release`` or the end of the process.

    Args:
        wait_seconds: longest time to wait for another process that holds it.

    Raises:
        StateLockedError: another process holds it, or the directory cannot be locked.
    """

    def __init__(self, directory: Path, wait_seconds: float = 0.0) -> None:
        path = directory / FILE_NAME
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
