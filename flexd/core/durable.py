"""Write small files of the state directory atomically and durably, readable by their owner only."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from flexd.core.errors import SnapshotError
from flexd.core.supervision import fault_point

# Suffix of a quarantined file; the newest such file is kept.
UNUSABLE = ".unusable"


def replace_file(path: Path, parts: Iterable[bytes | memoryview], points: str = "") -> None:
    """Replace the file: write under another name, sync, rename, sync the directory. Mode 0600.

    A file of that name is complete, and a crash at any point leaves the previous one.

    Args:
        points: fault points ``{points}.written`` and ``{points}.renamed`` are passed.

    Raises:
        SnapshotError: the file cannot be written; it is unchanged, and no partial file stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        fault_point(f"{points}.written")
        temporary.replace(path)
        fault_point(f"{points}.renamed")
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise SnapshotError(
            f"{path}: cannot be written: {error.strerror or error}",
            remedy="check the state directory's space and permissions",
        ) from error


def quarantine_file(path: Path) -> None:
    """Rename an unusable file, so that an operator can inspect it. A file that cannot be renamed stays."""
    with contextlib.suppress(OSError):
        path.replace(path.with_name(path.name + UNUSABLE))


def sync_directory(directory: Path) -> None:
    """Make renames in the directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
