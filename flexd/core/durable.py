"""Small files of the state directory: whole or as they were, durable, readable by their owner only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from flexd.core.errors import SnapshotError

UNUSABLE = ".unusable"
"""Behind the name of a file that was put aside; the newest such file is kept."""


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes the file anew: under another name, synced, renamed, the directory synced. Mode 0600.

    Raises:
        SnapshotError: it cannot be written; the file is as it was, and nothing half-made stays.
    """
    # Known to whoever copies the directory as half made (flexd.ha.term_directories).
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise SnapshotError(
            f"{path}: cannot be written: {error.strerror or error}",
            remedy="check the state directory's space and permissions",
        ) from error


def quarantine_file(path: Path) -> None:
    """Out of the way, for people to look at; a file that cannot be moved stays."""
    with contextlib.suppress(OSError):
        path.replace(path.with_name(path.name + UNUSABLE))


def sync_directory(directory: Path) -> None:
    """Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
