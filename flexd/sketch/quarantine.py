"""Quarantined snapshots: kept beside the rotation because a daemon could not continue from them, or not wholly.

They stay until an operator removes them (``flexd state discard``); only more of them than the limits allow push out the
oldest. The newest one always stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexd.core.durable import sync_directory
from flexd.core.errors import SnapshotError
from flexd.core.fault_points import fault_point

Reason = Literal["damaged", "newer", "unusable", "emptied", "converted", "reset", "replaced"]
REASONS: tuple[Reason, ...] = ("damaged", "newer", "unusable", "emptied", "converted", "reset", "replaced")
"""``damaged`` bytes; a ``newer`` format; ``unusable``: no table fits; tables were ``emptied`` or ``converted`` when it
was restored; an operator's ``reset``; ``replaced`` by an import."""
DIRECTORY = "quarantine"
KEEP = 4
MAX_BYTES = 8 * 2**30
_NAME = re.compile(r"^snapshot-(\d{12})-([a-z]+)(?:-(\d+))?\.flexd$")


@dataclass(frozen=True)
class QuarantinedSnapshot:
    """A snapshot that was quarantined.

    Attributes:
        unix_seconds: when it was written.
    """

    path: Path
    reason: Reason
    bytes: int
    unix_seconds: float


class Quarantine:
    """The folder ``quarantine`` of a snapshot directory. One process writes to it.

    Args:
        directory: of the snapshots.
        keep, max_bytes: of all quarantined snapshots.
    """

    def __init__(self, directory: Path, keep: int = KEEP, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory / DIRECTORY
        self.keep = keep
        self.max_bytes = max_bytes

    def add(self, snapshot: Path, reason: Reason, *, move: bool) -> Path:
        """Keep a snapshot.

        Args:
            move: take it out of the rotation; otherwise it stays there too, without using more space where the file
                system has hard links.

        Raises:
            SnapshotError: it cannot be kept; it is where it was.
        """
        try:
            self.directory.mkdir(exist_ok=True, mode=0o700)
            target = self._target(snapshot, reason)
            if not target.exists():
                _link(snapshot, target)
            sync_directory(self.directory)
            # The name of a new folder is an entry of the directory above it.
            sync_directory(self.directory.parent)
            fault_point("quarantine.linked")
            if move:
                snapshot.unlink(missing_ok=True)
                sync_directory(snapshot.parent)
        except OSError as error:
            raise SnapshotError(
                f"{snapshot} cannot be quarantined: {error.strerror or error}",
                remedy="make room in the state directory, or copy the file elsewhere",
            ) from error
        self._prune(target)
        return target

    def list(self) -> list[QuarantinedSnapshot]:
        """Return the snapshots, the one added last first. A folder that cannot be read has none."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                match = _NAME.match(path.name)
                if match is None or match[2] not in REASONS:
                    continue
                with contextlib.suppress(OSError):
                    status = path.stat()
                    added = (int(match[1]), int(match[3] or 0), path.name)
                    shown = QuarantinedSnapshot(path, _reason(match[2]), status.st_size, status.st_mtime)
                    found.append((added, shown))
        return [snapshot for _, snapshot in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def discard(self, name: str) -> int:
        """Delete one snapshot that was quarantined. Returns its size.

        Raises:
            SnapshotError: there is none of that name, or it cannot be deleted.
        """
        for snapshot in self.list():
            if snapshot.path.name == name:
                try:
                    snapshot.path.unlink()
                    sync_directory(self.directory)
                except OSError as error:
                    raise SnapshotError(f"{snapshot.path}: {error.strerror}", remedy="check its permissions") from error
                return snapshot.bytes
        raise SnapshotError(f"no snapshot {name!r} was quarantined", remedy="list them with `flexd state show`")

    def _target(self, snapshot: Path, reason: Reason) -> Path:
        """Return the name to keep it under: the present one if the same file was kept before."""
        target = self.directory / f"{snapshot.stem}-{reason}.flexd"
        number = 1
        while target.exists() and not _same(target, snapshot):
            number += 1
            target = self.directory / f"{snapshot.stem}-{reason}-{number}.flexd"
        return target

    def _prune(self, newest: Path) -> None:
        others = [snapshot for snapshot in self.list() if snapshot.path != newest]
        left = self.max_bytes - newest.stat().st_size
        for position, snapshot in enumerate(others):
            left -= snapshot.bytes
            if position + 1 >= self.keep or left < 0:
                with contextlib.suppress(OSError):
                    snapshot.path.unlink()


def _reason(word: str) -> Reason:
    return next(reason for reason in REASONS if reason == word)


def _same(a: Path, b: Path) -> bool:
    if os.path.samefile(a, b):
        return True
    # Copied where the file system has no hard links.
    one, two = a.stat(), b.stat()
    return (one.st_size, one.st_mtime_ns) == (two.st_size, two.st_mtime_ns)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
        return
    except FileNotFoundError:
        raise
    except OSError:
        pass
    temporary = target.with_suffix(".tmp")
    shutil.copy2(source, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.rename(target)
