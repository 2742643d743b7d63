"""A lease in a directory on a volume that all daemons mount.

Every write creates a file ``lease-<revision>``: it is completed under a temporary name and then *linked* to its name,
which fails if the name exists. So of two writers one wins, and no writer waits for another, as it could with a lock
whose owner is stopped. The highest revision is the current one and is never removed, so a writer that was stopped while
its revision was superseded finds a higher one afterwards and has lost.

The file system must provide atomic ``link`` and ``rename``: local ones and NFS do; mounted object stores do not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from pathlib import Path

from flexd.core.durable import sync_directory
from flexd.core.errors import LeaseError
from flexd.ha.lease_store import MAX_DURATION_SECONDS, MAX_HOLDER_CHARACTERS, MAX_TERM, LeaseRecord

_NAME = re.compile(r"^lease-(\d{1,18})$")
_MAX_RECORD_BYTES = 4096
_KEPT_REVISIONS = 4
_READ_TRIES = 8
_ABANDONED_SECONDS = 3600.0


class FileLeaseStore:
    """Implements ``LeaseStore``. Files have mode 0600: all daemons run as one user.

    Args:
        directory: created if missing.

    Raises:
        LeaseError: it cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._remove_abandoned()
        except OSError as error:
            raise self._error("cannot be made", error) from error

    @property
    def location(self) -> str:
        return f"directory {self._directory}"

    def read(self) -> LeaseRecord | None:
        for _ in range(_READ_TRIES):
            revision = self._highest()
            if revision == 0:
                return None
            try:
                with (self._directory / f"lease-{revision}").open("rb") as file:
                    data = file.read(_MAX_RECORD_BYTES + 1)
            except FileNotFoundError:
                continue  # Other writers have superseded and removed this revision.
            except OSError as error:
                raise self._error("cannot be read", error) from error
            return self._parsed(revision, data)
        raise LeaseError(
            f"{self.location}: changes faster than it can be read", remedy="look for daemons with equal identity"
        )

    def compare_and_set(
        self, seen: LeaseRecord | None, holder: str, term: int, duration_seconds: float
    ) -> LeaseRecord | None:
        revision = 1 + (0 if seen is None else int(seen.revision))
        path = self._directory / f"lease-{revision}"
        temporary = self._directory / f".{os.getpid()}-{os.urandom(8).hex()}.tmp"
        body = json.dumps({"holder": holder, "term": term, "duration_seconds": duration_seconds})
        try:
            try:
                _write(temporary, body.encode())
                os.link(temporary, path)
            except FileExistsError:
                return None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
            if self._highest() != revision:
                return None  # A later write removes this revision.
            sync_directory(self._directory)
        except OSError as error:
            raise self._error("cannot be written", error) from error
        self._remove_before(revision - _KEPT_REVISIONS)
        return LeaseRecord(holder, term, duration_seconds, str(revision))

    def close(self) -> None:
        pass

    def _highest(self) -> int:
        try:
            names = os.listdir(self._directory)
        except OSError as error:
            raise self._error("cannot be listed", error) from error
        return max((int(match[1]) for name in names if (match := _NAME.match(name))), default=0)

    def _parsed(self, revision: int, data: bytes) -> LeaseRecord:
        try:
            if len(data) > _MAX_RECORD_BYTES:
                raise ValueError(f"{len(data)} bytes")
            fields = json.loads(data)
            holder, term, duration = fields["holder"], fields["term"], fields["duration_seconds"]
            if not isinstance(holder, str) or len(holder) > MAX_HOLDER_CHARACTERS:
                raise ValueError("holder")
            if type(term) is not int or not 0 < term <= MAX_TERM:
                raise ValueError("term")
            if not isinstance(duration, int | float) or not math.isfinite(duration) or duration > MAX_DURATION_SECONDS:
                raise ValueError("duration_seconds")
            return LeaseRecord(holder, term, float(duration), str(revision))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LeaseError(
                f"{self.location}: lease-{revision} is no lease: {error}",
                remedy="stop all daemons of the job, then remove the directory's files",
            ) from error

    def _remove_before(self, revision: int) -> None:
        """Remove revisions before ``revision``. A failure is harmless: a later write removes them."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                match = _NAME.match(name)
                if match and int(match[1]) < revision:
                    (self._directory / name).unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        """Remove temporary files of killed processes; a young one may be in use by another writer."""
        for entry in self._directory.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                    entry.unlink()

    def _error(self, what: str, error: OSError) -> LeaseError:
        return LeaseError(
            f"{self.location}: {what}: {error.strerror or error}",
            remedy="high_availability.lease.path must be a directory that all daemons can write",
        )


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
