"""Files that are read again when they change: secrets and certificates that are rotated under a running process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path


class WatchedFiles:
    """Reports changes of any of some files. Not thread-safe: the caller has a lock, or one thread.

    Args:
        clock: monotonic seconds, for tests.
    """

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._checked_at = clock()
        self._seen = self._identity()

    def changed(self, interval_seconds: float) -> bool:
        """Return whether a file differs from the one of the last change. Looks at the files once an interval at most.

        Call it before the files are read: a write during the reading is reported by a later call.
        """
        now = self._clock()
        if now - self._checked_at < interval_seconds:
            return False
        self._checked_at = now
        identity = self._identity()
        if identity == self._seen:
            return False
        self._seen = identity
        return True

    def _identity(self) -> tuple[object, ...]:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError:
            return ()
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in found)
