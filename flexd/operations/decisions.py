"""Decisions that survive a restart of the daemon: a pause, a throttle, a rollback, plans that were not shown to win."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexd.config.links import ThrottleConfig
from flexd.config.text import describe_faults
from flexd.control.daemon.throttle import ThrottleLimits
from flexd.core.durable import quarantine_file, replace_file
from flexd.core.errors import SnapshotError, StateVersionError

logger = logging.getLogger("flexd")

MAX_BYTES = 2**16
MAX_ROLLED_BACK = 64
FORMAT = 1
_Words = Annotated[str, Field(max_length=2_000)]
_Bytes = Annotated[int, Field(ge=1, le=2**50)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Pause(_Stored):
    """Planning and pushing are on hold since ``unix_seconds``."""

    reason: _Words
    who: _Words = ""
    unix_seconds: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class ThrottleOverride(_Stored):
    """Limits that replace the configured ones; None is no limit.

    Attributes:
        configured: ``control.throttle`` (JSON) when the limits were chosen. A configuration that differs was changed
            later and takes precedence.
    """

    bytes_per_step: _Bytes | None = None
    bytes_per_second: _Bytes | None = None
    adaptive: bool = False
    configured: _Words = ""

    @property
    def limits(self) -> ThrottleLimits:
        return ThrottleLimits(self.bytes_per_step, self.bytes_per_second)

    @property
    def words(self) -> str:
        """The limits in words, for log lines and the history."""
        return (
            f"bytes a step {self.bytes_per_step or 'no limit'}, bytes a second {self.bytes_per_second or 'no limit'}, "
            f"adaptive {'on' if self.adaptive else 'off'}"
        )

    def matches_config(self, throttle: ThrottleConfig) -> bool:
        """Return whether the limits were chosen under this configuration."""
        return self.configured == throttle.model_dump_json()


class RequestedRollback(_Stored):
    """The unfinished migrations whose rollback was requested; at most one of them had started.

    Without meaning once another migration has pushed a chunk.
    """

    migration_ids: Annotated[tuple[_Words, ...], Field(min_length=1, max_length=MAX_ROLLED_BACK)]


class HeldPlan(_Stored):
    """Plans of one kind (``NODE``, ``DEVICE``, ``NODE+DEVICE``) that wait because one of them was not shown to win.

    Attributes:
        seconds: length of this hold; the next one of the kind is twice as long.
    """

    kind: _Words
    reason: _Words
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    until_unix_seconds: Annotated[float, Field(allow_inf_nan=False)]


class RunningVerification(_Stored):
    """The migration whose effect is being measured."""

    migration_id: _Words


class Decisions(_Stored):
    """All decisions in force; None where there is none."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    pause: Pause | None = None
    throttle: ThrottleOverride | None = None
    rollback: RequestedRollback | None = None
    held_plans: Annotated[tuple[HeldPlan, ...], Field(max_length=8)] = ()
    verification: RunningVerification | None = None


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote the file."""
    try:
        with path.open("rb") as file:
            _check_content(path, file.read(MAX_BYTES + 1))
    except OSError:
        return  # Reading it reports that.


def _check_content(path: Path, content: bytes) -> None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return
    number = document.get("format") if isinstance(document, dict) else None
    if isinstance(number, int) and not isinstance(number, bool) and number > FORMAT:
        raise StateVersionError(
            f"{path} is of format {number}, of a newer flexd; this one reads {FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )


class DecisionFile:
    """``decisions.json`` of the state directory. Thread-safe.

    A file that cannot be used is kept as ``decisions.json.unusable``, and no decision is in force.

    Attributes:
        current: the decisions in force, written to disk or not.
        failures: failed writes since the start; ``retry`` tries again.
        quarantined: files that could not be used.
        problem: why the newest write failed; empty if it succeeded.

    Raises:
        StateVersionError: a newer flexd wrote the file; it is unchanged.
        SnapshotError: the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.failures = self.quarantined = 0
        self.problem = ""
        self.current = self._read()

    def update(
        self,
        **changed: Pause | ThrottleOverride | RequestedRollback | RunningVerification | tuple[HeldPlan, ...] | None,
    ) -> None:
        """Change fields of ``current``. They hold at once and are durable on return unless ``problem`` is set."""
        with self._lock:
            self.current = self.current.model_copy(update=changed)
            self._write()

    def retry(self) -> None:
        """Repeat a write that failed."""
        with self._lock:
            if self.problem:
                self._write()

    def _read(self) -> Decisions:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return Decisions()
        except OSError as error:
            raise SnapshotError(
                f"{self._path}: cannot be read: {error.strerror}",
                remedy="let the daemon's user read it, or move it away",
            ) from error
        _check_content(self._path, content)
        try:
            if len(content) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            return Decisions.model_validate_json(content)
        except ValueError as error:
            faults = describe_faults(error, Decisions, {}) if isinstance(error, ValidationError) else [str(error)]
            self.quarantined += 1
            quarantine_file(self._path)
            logger.error(
                "%s is not usable (%s): it is kept as *.unusable; no pause, throttle or rollback is in force",
                self._path, "; ".join(faults)[:500],
            )  # fmt: skip
            return Decisions()

    def _write(self) -> None:
        try:
            replace_file(self._path, [self.current.model_dump_json().encode() + b"\n"])
        except SnapshotError as error:
            self.failures += 1
            logger.log(
                logging.DEBUG if self.problem else logging.ERROR,
                "decisions are not saved: %s",
                error,
            )
            self.problem = str(error)
        else:
            self.problem = ""
