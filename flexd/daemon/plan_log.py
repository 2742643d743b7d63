"""Which plans moved rows: an append-only file of JSON lines that outlives the daemon."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flexd.errors import SnapshotError

MAX_ENTRIES = 1_000


class PlanLog:
    """Bounded: past twice ``MAX_ENTRIES`` the oldest are dropped. A torn last line (a crash) is left out.

    Raises:
        SnapshotError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[dict[str, Any]] = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise SnapshotError(f"plan log {path}: {error}", remedy="move the file away") from error
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                self.entries.append(entry)
        self.entries = self.entries[-MAX_ENTRIES:]

    @property
    def newest(self) -> dict[str, Any] | None:
        return self.entries[-1] if self.entries else None

    def append(self, entry: dict[str, Any]) -> None:
        """Durable when it returns."""
        self.entries.append(entry)
        try:
            if len(self.entries) > 2 * MAX_ENTRIES:
                self.entries = self.entries[-MAX_ENTRIES:]
                temporary = self._path.with_suffix(".tmp")
                self._write(temporary, self.entries, "w")
                temporary.replace(self._path)
            else:
                self._write(self._path, [entry], "a")
        except OSError as error:
            raise SnapshotError(
                f"plan log {self._path}: {error.strerror}", remedy="make room in the state directory"
            ) from error

    @staticmethod
    def _write(path: Path, entries: list[dict[str, Any]], mode: str) -> None:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mode == "a" else os.O_TRUNC), 0o600), mode
        ) as f:
            f.writelines(json.dumps(entry) + "\n" for entry in entries)
            f.flush()
            os.fsync(f.fileno())
