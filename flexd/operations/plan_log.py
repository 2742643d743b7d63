"""The log of plans that moved rows: an append-only file of JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flexd.core.errors import SnapshotError, StateVersionError

MAX_ENTRIES = 1_000
FORMAT = 1
"""Of an entry; those without one are of format 1."""


class PlanLog:
    """Keeps the newest entries: beyond twice ``MAX_ENTRIES`` the oldest are dropped. Skips a line torn by a crash.

    Raises:
        StateVersionError: a newer flexd wrote an entry; the file is unchanged.
        SnapshotError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise SnapshotError(f"plan log {path}: {error}", remedy="move the file away") from error
        lines = content.splitlines()
        _check_lines(path, lines)
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        self.entries: list[dict[str, Any]] = entries[-MAX_ENTRIES:]
        self._lines = len(lines)
        # An entry appended to a torn line would be unreadable with it.
        self._rewrite = bool(content) and not content.endswith(b"\n")

    @property
    def newest(self) -> dict[str, Any] | None:
        return self.entries[-1] if self.entries else None

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry; it is durable on return."""
        self.entries.append(entry)
        try:
            if self._rewrite or self._lines >= 2 * MAX_ENTRIES:
                self._rewrite = True
                self.entries = self.entries[-MAX_ENTRIES:]
                temporary = self._path.with_suffix(".tmp")
                self._write(temporary, self.entries, "w")
                temporary.replace(self._path)
                self._lines, self._rewrite = len(self.entries), False
            else:
                # A failed append may leave half a line: rewrite the file next time unless this one succeeds.
                self._rewrite = True
                self._write(self._path, [entry], "a")
                self._lines, self._rewrite = self._lines + 1, False
        except OSError as error:
            raise SnapshotError(
                f"plan log {self._path}: {error.strerror}", remedy="make room in the state directory"
            ) from error

    @staticmethod
    def _write(path: Path, entries: list[dict[str, Any]], mode: str) -> None:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mode == "a" else os.O_TRUNC), 0o600), mode
        ) as f:
            f.writelines(json.dumps({"format": FORMAT, **entry}) + "\n" for entry in entries)
            f.flush()
            os.fsync(f.fileno())


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote an entry."""
    try:
        content = path.read_bytes()
    except OSError:
        return  # Reading it reports that.
    _check_lines(path, content.splitlines())


def _check_lines(path: Path, lines: list[bytes]) -> None:
    for line in lines:
        number = _document(line).get("format")
        if isinstance(number, int) and number > FORMAT:
            raise StateVersionError(
                f"{path} has entries of format {number}, of a newer flexd; this one reads {FORMAT}",
                remedy="run the flexd that wrote it, or a newer one",
            )


def _document(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _entry(line: bytes) -> dict[str, Any] | None:
    entry = _document(line)
    entry.pop("format", None)
    return entry or None
