"""The shared secret of daemon and ranks."""

from __future__ import annotations

from pathlib import Path

from flexd.errors import ConfigError


def read_secret(path: str | Path, named_by: str) -> bytes:
    """The file's bytes without surrounding white space.

    Args:
        named_by: what gave the path, for the error text (a key path, an argument).

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"{named_by}: {path}: {error.strerror}", remedy="mount the secret, readable by this user"
        ) from error
    if not secret:
        raise ConfigError(f"{named_by}: {path} is empty", remedy="write at least 16 random bytes to it")
    return secret
