"""Decisions that survive a restart of the daemon: a pause, a throttle, a rollback, plans that were not shown to win."""

from __future__ import annotations

import logging
import threading
import time
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexd.config.base import describe_faults
from flexd.config.sections import ThrottleConfig
from flexd.control.daemon.pusher import ThrottleLimits
from flexd.core.errors import SnapshotError
from flexd.operations.state_database import StateDatabase

LONGEST_SECONDS = 86_400.0


logger = logging.getLogger("flexd")

MAX_ROLLED_BACK = 64
NAME = "in force"
"""Of the document."""
_Message = Annotated[str, Field(max_length=2_000)]
_Bytes = Annotated[int, Field(ge=1, le=2**50)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Pause(_Stored):
    """Planning and pushing are on hold since ``unix_seconds``."""

    reason: _Message
    requested_by: _Message = ""
    unix_seconds: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class ThrottleOverride(_Stored):
    """Limits that replace the configured ones; None is no limit.

    Attributes:
        configured: ``control.throttle`` (JSON) when the limits were chosen. A configuration that differs was changed
            later and takes precedence.
    """

    bytes_per_step: _Bytes | None = None
    bytes_per_second: _Bytes | None = None
    configured: _Message = ""

    @property
    def limits(self) -> ThrottleLimits:
        return ThrottleLimits(self.bytes_per_step, self.bytes_per_second)

    @property
    def message(self) -> str:
        """The limits in words, for log lines and the history."""
        per_step, per_second = self.bytes_per_step or "no limit", self.bytes_per_second or "no limit"
        return f"bytes per step {per_step}, bytes per second {per_second}"

    def matches_config(self, throttle: ThrottleConfig) -> bool:
        """Return whether the limits were chosen under this configuration."""
        return self.configured == throttle.model_dump_json()


class HeldPlan(_Stored):
    """Plans of one kind (``NODE``, ``DEVICE``, ``NODE+DEVICE``) that wait because one of them was not shown to win.

    Attributes:
        seconds: length of this hold; the next one of the kind is twice as long.
    """

    kind: _Message
    reason: _Message
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    until_unix_seconds: Annotated[float, Field(allow_inf_nan=False)]


class Decisions(_Stored):
    """All decisions in force; None or empty where there is none.

    Attributes:
        rollback: the unfinished migrations whose rollback was requested; at most one of them had started. Without
            meaning once another migration has pushed a chunk.
        verification: the migration whose effect is being measured.
    """

    pause: Pause | None = None
    throttle: ThrottleOverride | None = None
    rollback: Annotated[tuple[_Message, ...], Field(max_length=MAX_ROLLED_BACK)] = ()
    held_plans: Annotated[tuple[HeldPlan, ...], Field(max_length=8)] = ()
    verification: _Message = ""


class DecisionFile:
    """The decisions in the state's file. Thread-safe.

    Attributes:
        current: the decisions in force, written to disk or not.
        failures: failed writes since the start; ``retry`` tries again.
        problem: why the newest write failed; empty if it succeeded.

    Raises:
        StateVersionError: a newer flexd wrote the file; it is unchanged.
        SnapshotError: the file exists and cannot be read.
    """

    def __init__(self, file: StateDatabase) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.failures = 0
        self.problem = ""
        self.current = Decisions()
        document = file.document(NAME)
        if document is not None:
            try:
                self.current = Decisions.model_validate_json(document)
            except ValidationError as error:
                faults = "; ".join(describe_faults(error, Decisions, {}))
                logger.error("decisions are not usable, no pause, throttle or rollback is in force: %s", faults[:500])

    def update(
        self,
        **changed: Pause | ThrottleOverride | tuple[str, ...] | tuple[HeldPlan, ...] | str | None,
    ) -> None:
        """Change fields of ``current``. They hold at once and are durable on return unless ``problem`` is set."""
        with self._lock:
            self.current = self.current.model_copy(update=changed)
            self._write()

    def hold(self, kind: str, reason: str, first_seconds: float, unix_seconds: float) -> None:
        """Hold plans of this kind back for ``first_seconds``, or twice the time of the hold before.

        A hold outlives the daemon, until a plan of the kind measures no slower. Users' plans are not held.
        """
        before = self._held(kind)
        seconds = first_seconds if before is None else max(first_seconds, 2 * before.seconds)
        seconds = min(seconds, LONGEST_SECONDS)
        held = HeldPlan(kind=kind, reason=reason, seconds=seconds, until_unix_seconds=unix_seconds + seconds)
        self.update(held_plans=(*self._others(kind), held))

    def release(self, kind: str) -> None:
        """Release plans of this kind, and forget their back-off."""
        if self._held(kind) is not None:
            self.update(held_plans=self._others(kind))

    def held_reason(self, kind: str, unix_seconds: float | None = None) -> str:
        """Return why plans of this kind are held back now; empty if they are not."""
        held = self._held(kind)
        unix_seconds = time.time() if unix_seconds is None else unix_seconds
        # A clock that was set back does not extend a hold.
        left = 0.0 if held is None else min(held.until_unix_seconds - unix_seconds, held.seconds)
        if held is None or left <= 0:
            return ""
        until = datetime.fromtimestamp(held.until_unix_seconds, UTC)
        return f"{held.reason}; plans for {kind} wait until {until:%Y-%m-%d %H:%M:%S} UTC"

    def held_reasons(self) -> tuple[str, ...]:
        """Return the reasons of all holds in force."""
        return tuple(filter(None, (self.held_reason(held.kind) for held in self.current.held_plans)))

    def _held(self, kind: str) -> HeldPlan | None:
        return next((held for held in self.current.held_plans if held.kind == kind), None)

    def _others(self, kind: str) -> tuple[HeldPlan, ...]:
        return tuple(held for held in self.current.held_plans if held.kind != kind)

    def retry(self) -> None:
        """Repeat a write that failed."""
        with self._lock:
            if self.problem:
                self._write()

    def _write(self) -> None:
        try:
            self._file.put(NAME, self.current.model_dump_json())
            self.problem = ""
        except SnapshotError as error:
            self.failures += 1
            logger.log(logging.DEBUG if self.problem else logging.ERROR, "decisions are not saved: %s", error)
            self.problem = str(error)
