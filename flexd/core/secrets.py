"""Secrets and TLS contexts of files that are read again when they change.

A secret has at most two keys, so that one can replace the other without an interruption.
"""

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from flexd.core.errors import ConfigError


def tls_context(
    protocol: int, cert_file: Path, key_file: Path, ca_file: Path | None, named_by: str, ca_key: str = "ca_file"
) -> ssl.SSLContext:
    """Return a context with a certificate and, with ``ca_file``, the authority that the other end is verified against.

    Args:
        protocol: ``ssl.PROTOCOL_TLS_SERVER`` or ``PROTOCOL_TLS_CLIENT``.
        named_by: key path of the files for error texts.
        ca_key: name of the key of ``ca_file``.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """
    context = ssl.SSLContext(protocol)
    try:
        context.load_cert_chain(cert_file, key_file, _no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{named_by}.cert_file: {cert_file} with {key_file}: {_reason(error)}",
            remedy="give a readable PEM certificate and its own key, without a passphrase",
        ) from error
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named_by}.{ca_key}: {ca_file}: {_reason(error)}", remedy="give readable PEM") from error
    return context


def _no_passphrase() -> str:
    # Without this OpenSSL asks on the terminal.
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "no PEM")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


logger = logging.getLogger(__name__)


Value = TypeVar("Value")


class Reloaded(Generic[Value]):
    """A value made of files, made again when they change. A change that cannot be used is logged, and the value made
    before stays. Thread-safe.

    Args:
        load: makes the value; raises ConfigError.
        named_by: names the files in the log.
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: as ``load``.
    """

    def __init__(
        self, paths: Sequence[Path], load: Callable[[], Value], named_by: str, clock: Callable[[], float]
    ) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._named_by = named_by
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_at = clock()
        # Before the files are read: a write during the reading is found by the next look.
        self._seen = self._identity()
        self._value = load()

    def value(self, interval_seconds: float) -> Value:
        """Return the value. Looks at the files once an interval at most."""
        with self._lock:
            now = self._clock()
            if now - self._checked_at >= interval_seconds:
                self._checked_at, seen, self._seen = now, self._seen, self._identity()
                if seen != self._seen:
                    try:
                        self._value = self._load()
                        logger.info("%s: the files have changed and are in use", self._named_by)
                    except ConfigError as error:
                        logger.error("%s; what was read before stays in use", error)
            return self._value

    def _identity(self) -> tuple[object, ...]:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError:
            return ()
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in found)


MIN_SECRET_BYTES = 16
MAX_KEYS = 2
MAX_FILE_BYTES = 4096
# Time between two checks for a changed file.
RELOAD_SECONDS = 1.0


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


class KeyFile(Reloaded[tuple[bytes, ...]]):
    """A secret file, read again when it changes. Thread-safe.

    Args:
        named_by: origin of the path for error texts.
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: see ``read_keys``.
    """

    def __init__(self, path: str | Path, named_by: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__([Path(path)], lambda: read_keys(path, named_by), named_by, clock)

    def keys(self) -> tuple[bytes, ...]:
        """Return at least one key: the first signs, all are accepted."""
        return self.value(RELOAD_SECONDS)


# Source of keys: a file that may change, a fixed key, or none (loopback only).
Secret = KeyFile | bytes | None


def accepted_keys(secret: Secret) -> tuple[bytes, ...]:
    """Return the keys that verify signatures; one empty key without a secret."""
    return secret.keys() if isinstance(secret, KeyFile) else (secret or b"",)
