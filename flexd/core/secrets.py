"""Shared secrets in files that are read again when they change: at most two keys, so that one can replace the other
without an interruption."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flexd.core.errors import ConfigError


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


MIN_SECRET_BYTES = 16
MAX_KEYS = 2
MAX_FILE_BYTES = 4096
RELOAD_SECONDS = 1.0
"""Time between two checks for a changed file."""

logger = logging.getLogger(__name__)


def read_keys(path: str | Path, named_by: str) -> tuple[bytes, ...]:
    """Read the keys of a file, one a line, without surrounding white space: the first signs, all are accepted.

    Args:
        named_by: origin of the path for the error text (a key path, an argument).

    Raises:
        ConfigError: the file cannot be read, is empty or too large, has more than ``MAX_KEYS`` keys, or one of them is
            shorter than ``MIN_SECRET_BYTES``.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{named_by}: {path}: {error.strerror}", remedy="mount the secret, readable by this user"
        ) from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(
            f"{named_by}: {path} is empty", remedy=f"write at least {MIN_SECRET_BYTES} random bytes to it, as hex"
        )
    if len(text) > MAX_FILE_BYTES or len(keys) > MAX_KEYS:
        raise ConfigError(
            f"{named_by}: {path} has more than {MAX_KEYS} lines or {MAX_FILE_BYTES} bytes",
            remedy="write one key a line: the key in use, and during a rotation the other one",
        )
    if min(len(key) for key in keys) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{named_by}: {path} has a key of fewer than {MIN_SECRET_BYTES} bytes",
            remedy="make one with: openssl rand -hex 32",
        )
    return keys


class KeyFile:
    """A secret file, read again when it changes. Invalid new content is logged and the old keys stay; thread-safe.

    Args:
        named_by: origin of the path for error texts.
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: see ``read_keys``.
    """

    def __init__(self, path: str | Path, named_by: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._named_by = named_by
        self._lock = threading.Lock()
        self._file = WatchedFiles([self._path], clock)
        self._keys = read_keys(path, named_by)

    def keys(self) -> tuple[bytes, ...]:
        """Return at least one key: the first signs, all are accepted."""
        with self._lock:
            if self._file.changed(RELOAD_SECONDS):
                self._reload()
            return self._keys

    def _reload(self) -> None:
        try:
            self._keys = read_keys(self._path, self._named_by)
        except ConfigError as error:
            logger.error("%s; the keys read before stay in use", error)
        else:
            logger.info("%s: %s has changed: %d keys are in use", self._named_by, self._path, len(self._keys))


Secret = KeyFile | bytes | None
"""Source of keys: a file that may change, a fixed key, or none (loopback only)."""


def accepted_keys(secret: Secret) -> tuple[bytes, ...]:
    """Return the keys that verify signatures; one empty key without a secret."""
    return secret.keys() if isinstance(secret, KeyFile) else (secret or b"",)
