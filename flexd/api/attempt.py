"""The attempts of the job: the one that holds it, those that wait for it, those that ended lately."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, FiniteOrNone, Model

if TYPE_CHECKING:
    from flexd.api.operator_commands import OperatorCommands
    from flexd.control.daemon.attempts import Attempt
    from flexd.control.daemon.coordinator import Coordinator

MAX_NAME_CHARACTERS = 200
AttemptStateName = Literal["HOLDS", "WAITING", "ENDED"]


class AttemptReport(Model):
    """One launch of the training job."""

    attempt: str
    """Its name: by default torchrun's run id and restart count, and a number of the launch."""
    state: AttemptStateName
    """``HOLDS``: its ranks get the migrations. ``WAITING``: refused, another one holds the job. ``ENDED``."""
    preferred: bool = False
    """True while the job is kept for it because an operator prefers it."""
    world_size: int = 0
    """Ranks that it has; 0 if not known."""
    ranks: int = 0
    """Ranks heard lately."""
    hosts: tuple[str, ...] = ()
    """Addresses of its ranks."""
    since_unix_seconds: FiniteOrNone = None
    """When it got the job, was heard first, or ended."""
    reason: str | None = None
    """Why it waits or has ended; null if it holds the job."""


class AttemptList(Model):
    """The attempts: the holder, then those that wait, then those that ended within the last hour, newest first."""

    attempts: tuple[AttemptReport, ...] = ()
    """At most one holder, 64 that wait and 64 that ended."""


class AttemptRequest(CommandRequest):
    """Body of ``POST /v1/attempts/prefer`` and ``/forget``."""

    attempt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    """The attempt, which may have any characters in its name."""


class AttemptResult(Model):
    """The state after ``prefer`` or ``forget``."""

    attempt: str
    """The attempt."""
    changed: bool = True
    """False if the state was the same before."""
    attempts: tuple[AttemptReport, ...] = ()
    """All attempts, as in ``AttemptList``."""


def attempt_report(attempt: Attempt) -> AttemptReport:
    """Return one attempt."""
    return AttemptReport.from_object(
        attempt, attempt=attempt.name, state=attempt.state.name, reason=attempt.reason or None
    )


class AttemptCommands:
    """Commands on the attempts. Each raises ApiError if there is no such attempt (404)."""

    def __init__(self, coordinator: Coordinator, operator: OperatorCommands) -> None:
        self._coordinator = coordinator
        self._operator = operator

    def attempts(self) -> AttemptList:
        """Return the attempt that holds the job, those that wait, and those that ended within an hour."""
        return AttemptList(attempts=self._reports())

    def prefer(self, attempt: str, reason: str = "", who: str = "") -> AttemptResult:
        changed = self._coordinator.prefer_attempt(attempt)
        if changed:
            self._operator.record_attempt("prefer", who, reason, attempt)
        return AttemptResult(attempt=attempt, changed=changed, attempts=self._reports())

    def forget(self, attempt: str, reason: str = "", who: str = "") -> AttemptResult:
        self._coordinator.forget_attempt(attempt)
        self._operator.record_attempt("forget", who, reason, attempt)
        return AttemptResult(attempt=attempt, attempts=self._reports())

    def _reports(self) -> tuple[AttemptReport, ...]:
        return tuple(attempt_report(each) for each in self._coordinator.attempts())
