"""Skip offsets at which the daemon died twice: a message that kills its reader must not stop its partition for ever."""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from pathlib import Path

from flexd.core.durable import replace_file
from flexd.core.errors import SnapshotError

_log = logging.getLogger(__name__)

DEATHS_UNTIL_SKIPPED = 2
MARKER_NAME, RECORD_NAME = "offsets-in-work", "poison-offsets.json"
_BYTES = 4096
_TEXT_AT = 3
"""Byte 0 of the marker tells whether a range is in work, bytes 1 and 2 how long its name is, which follows."""
_MAX_RECORDED = 64
_FORGET_SECONDS = 7 * 86400.0
"""A recorded offset may belong to another message after the topic was deleted and created again."""


class OffsetsInWork:
    """The range of offsets that is being read or counted now, in a file that survives the process.

    ``begin`` writes the range into a page of shared memory (no system call); the kernel keeps the page when the process
    is killed, also for lack of memory. A process that finds a range begun and not ended knows that its predecessor died
    there. A death is forgotten when the same range is passed alive. A crash of the whole machine leaves no reliable
    mark, and messages do not cause one.

    Ranges are compared as a whole: a batch by its first and last offset, a message by its own. Reading a batch and
    counting a message of the same offset are different work, so that success of one does not hide a death in the other.

    ``begin`` and ``end`` belong to one thread.

    Args:
        directory: of the files; None keeps and skips nothing. An unwritable one is logged and treated so.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._page: mmap.mmap | None = None
        self._deaths: dict[str, int] = {}
        """Deaths in a row at each range at which there was one."""
        self._current = ""
        if directory is None:
            return
        self._record = directory / RECORD_NAME
        try:
            self._page = _open(directory / MARKER_NAME)
        except OSError as error:
            _log.warning("offsets in work cannot be recorded in %s: %s", directory, error)
            return
        self._deaths = _read(self._record)
        if self._page[0]:
            died_at = self._page[_TEXT_AT : _TEXT_AT + int.from_bytes(self._page[1:_TEXT_AT], "little")]
            self._page[0] = 0
            self._add_death(died_at.decode(errors="replace"))

    def begin(self, partition: str, first: int, last: int, *, counting: bool = False) -> bool:
        """Record that a range is read or counted from now on. Return False if it must be skipped instead."""
        if self._page is None:
            return True
        # Clear until the next range is written whole: a range that is half written is none, nor is a skipped one.
        self._page[0] = 0
        self._forget_current()
        name = f"{partition} {first} {last} {'counted' if counting else 'read'}"
        if self._deaths and self._deaths.get(name, 0) >= DEATHS_UNTIL_SKIPPED:
            return False
        text = name.encode()
        if len(text) <= _BYTES - _TEXT_AT:
            self._page[1 : _TEXT_AT + len(text)] = len(text).to_bytes(2, "little") + text
            self._page[0] = 1
        self._current = name
        return True

    def end(self) -> None:
        """Record that nothing is in work."""
        if self._page is not None:
            self._page[0] = 0
            self._forget_current()

    def close(self) -> None:
        """End, and release the file."""
        self.end()
        if self._page is not None:
            self._page.close()
            self._page = None

    def _forget_current(self) -> None:
        """Forget the deaths at the range that was in work, which is passed alive now."""
        if self._deaths and self._deaths.pop(self._current, 0):
            self._save()

    def _add_death(self, name: str) -> None:
        deaths = self._deaths.pop(name, 0) + 1
        self._deaths[name] = deaths
        skipped = ": they are skipped" if deaths >= DEATHS_UNTIL_SKIPPED else ""
        _log.warning("the last process died at offsets %s, %d times in a row%s", name, deaths, skipped)
        self._save()

    def _save(self) -> None:
        newest = dict(list(self._deaths.items())[-_MAX_RECORDED:])
        try:
            replace_file(self._record, [json.dumps(newest).encode()])
        except SnapshotError as error:
            _log.warning("offsets at which the process died are not recorded: %s", error)


def _read(path: Path) -> dict[str, int]:
    """Return the recorded deaths by range; none if there is no file, or if it is damaged or old."""
    try:
        if path.stat().st_mtime < time.time() - _FORGET_SECONDS:
            return {}
        return {str(name): int(deaths) for name, deaths in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("%s is not used: %r", path, error)
        return {}


def _open(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Space is reserved now: a write to a page of a full disk would end the process.
        os.posix_fallocate(descriptor, 0, _BYTES)
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)
