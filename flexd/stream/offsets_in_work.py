"""Skip offsets at which the daemon died twice: a message that kills its reader must not stop its partition for ever."""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from flexd.core.durable import quarantine_file, replace_file
from flexd.core.errors import SnapshotError, StateVersionError

_log = logging.getLogger(__name__)

DEATHS_UNTIL_SKIPPED = 2
MARKER_NAME, RECORD_NAME = "offsets-in-work", "poison-offsets.json"
_BYTES = 4096
_RANGE = struct.Struct("<qqHB")
_RANGE_AT, _NAME_AT = 8, 8 + _RANGE.size
_MAX_NAME_BYTES = _BYTES - _NAME_AT
_MAX_RECORDED = 64
_FORGET_SECONDS = 7 * 86400.0
"""A recorded offset may belong to another message after the topic was deleted and created again."""
RECORD_FORMAT = 1
_Key = tuple[str, int, int, bool]


@dataclass(frozen=True)
class PoisonOffset:
    """A range of offsets that was in work when the process died.

    Attributes:
        first, last: both inclusive.
        counting: the process died while it counted the message; otherwise while it read the batch.
        deaths: times in a row that the process died there; skipped from ``DEATHS_UNTIL_SKIPPED`` on.
        died_at: Unix time of the last death.
    """

    partition: str
    first: int
    last: int
    counting: bool
    deaths: int
    died_at: float


class OffsetsInWork:
    """The range of offsets that is being read or counted now, in a file that survives the process.

    ``begin`` writes the range into a page of shared memory (no system call, 0.2 us); the kernel keeps
    the page when the process is killed, also for lack of memory. A process that finds a range begun and not ended knows
    that its predecessor died there. A death is forgotten when the same range is passed alive. A crash of the whole
    machine leaves no reliable mark, and messages do not cause one.

    Ranges are compared as a whole: a batch by its first and last offset, a message by its own. Reading a batch and
    counting a message of the same offset are different work, so that success of one does not hide a death in the other.

    ``begin`` and ``end`` belong to one thread.

    Args:
        directory: of the files; None keeps and skips nothing. An unwritable one is logged and treated so.

    Raises:
        StateVersionError: a newer flexd wrote the record; nothing has changed.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._view: mmap.mmap | None = None
        self._record_path = None if directory is None else directory / RECORD_NAME
        self._known: dict[_Key, PoisonOffset] = {}
        self._on_trial: _Key | None = None
        self._partition: str | None = None
        self._named = False
        self._name_bytes = 0
        self._lock = threading.Lock()
        if directory is None:
            return
        self._load(directory / RECORD_NAME)
        try:
            self._view = _open(directory / MARKER_NAME)
        except OSError as error:
            _log.warning("offsets in work cannot be recorded in %s: %s", directory, error)
            self._known = {}
            return
        self._record_death(self._view)

    def skipped(self) -> tuple[PoisonOffset, ...]:
        """Return the ranges that are skipped (any thread)."""
        with self._lock:
            return tuple(known for known in self._known.values() if known.deaths >= DEATHS_UNTIL_SKIPPED)

    def begin(self, partition: str, first: int, last: int, *, counting: bool = False) -> bool:
        """Record that a range is read or counted from now on. Return False if it must be skipped instead."""
        if self._known and not self._may_read((partition, first, last, counting)):
            return False
        view = self._view
        if view is not None:
            # The flag is cleared first: a range that is half written is none.
            view[0] = 0
            if partition != self._partition:
                self._write_name(view, partition)
            if self._named:
                _RANGE.pack_into(view, _RANGE_AT, first, last, self._name_bytes, counting)
                view[0] = 1
        return True

    def end(self) -> None:
        """Record that nothing is in work."""
        if self._view is not None:
            self._view[0] = 0
        if self._on_trial is not None:
            self._acquit()

    def close(self) -> None:
        """End, and release the file."""
        self.end()
        view, self._view = self._view, None
        if view is not None:
            view.close()

    def _may_read(self, key: _Key) -> bool:
        if self._on_trial is not None and self._on_trial != key:
            self._acquit()
        known = self._known.get(key)
        if known is None:
            return True
        if known.deaths >= DEATHS_UNTIL_SKIPPED:
            return False
        self._on_trial = key
        return True

    def _acquit(self) -> None:
        """Forget the deaths at a range that was passed alive."""
        key, self._on_trial = self._on_trial, None
        if key is not None:
            with self._lock:
                self._known.pop(key, None)
            self._save()

    def _write_name(self, view: mmap.mmap, partition: str) -> None:
        name = partition.encode()
        self._partition, self._named, self._name_bytes = partition, len(name) <= _MAX_NAME_BYTES, len(name)
        if self._named:
            view[_NAME_AT : _NAME_AT + len(name)] = name

    def _record_death(self, view: mmap.mmap) -> None:
        if view[0] != 1:
            return
        first, last, name_bytes, counting = _RANGE.unpack_from(view, _RANGE_AT)
        partition = view[_NAME_AT : _NAME_AT + min(name_bytes, _MAX_NAME_BYTES)].decode(errors="replace")
        view[0] = 0
        key = (partition, first, last, bool(counting))
        before = self._known.pop(key, None)
        deaths = 1 if before is None else before.deaths + 1
        self._known[key] = PoisonOffset(*key, deaths, time.time())
        _log.warning(
            "the last process died at offsets %d to %d of %s, %d times in a row%s", first, last, partition, deaths,
            ": they are skipped" if deaths >= DEATHS_UNTIL_SKIPPED else "",
        )  # fmt: skip
        self._save()

    def _load(self, path: Path) -> None:
        try:
            known = read_record(path)
        except StateVersionError:
            raise
        except SnapshotError as error:
            _log.warning("%s", error)
            quarantine_file(path)
            return
        self._known = {(item.partition, item.first, item.last, item.counting): item for item in known}

    def _save(self) -> None:
        assert self._record_path is not None  # noqa: S101
        with self._lock:
            offsets = [asdict(item) for item in self._known.values()][-_MAX_RECORDED:]
        text = json.dumps({"format": RECORD_FORMAT, "offsets": offsets}).encode()
        try:
            replace_file(self._record_path, [text])
        except SnapshotError as error:
            _log.warning("offsets at which the process died are not recorded: %s", error)


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote the record."""
    try:
        read_record(path)
    except StateVersionError:
        raise
    except SnapshotError:
        pass  # The start reports that.


def read_record(path: Path) -> tuple[PoisonOffset, ...]:
    """Return the recorded ranges that are not forgotten yet; none if there is no file.

    Raises:
        SnapshotError: the file is damaged or cannot be read.
        StateVersionError: a newer flexd wrote it.
    """
    try:
        document = json.loads(path.read_bytes())
        number = document["format"]
        if isinstance(number, int) and number > RECORD_FORMAT:
            raise StateVersionError(
                f"{path} is of format {number}, of a newer flexd; this one reads {RECORD_FORMAT}",
                remedy="run the flexd that wrote it, or a newer one",
            )
        if number != RECORD_FORMAT:
            raise ValueError(f"format {number!r}")
        known = [
            PoisonOffset(
                str(item["partition"]), int(item["first"]), int(item["last"]), bool(item["counting"]),
                int(item["deaths"]), float(item["died_at"]),
            )
            for item in document["offsets"][-_MAX_RECORDED:]
        ]  # fmt: skip
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path} is not used: {error!r}"[:500], remedy="remove it") from error
    since = time.time() - _FORGET_SECONDS
    return tuple(item for item in known if item.died_at >= since)


def _open(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Space is reserved now: a write to a page of a full disk would end the process.
        os.posix_fallocate(descriptor, 0, _BYTES)
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)
