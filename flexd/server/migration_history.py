"""The history of migrations, and what an abort brings about, as the admin API tells them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from flexd.server.migration_report import MigrationReport, MigrationStateName
from flexd.server.model import Measured, Model
from flexd.server.verbs import MAX_REASON_CHARACTERS, MAX_WHO_CHARACTERS

MAX_LISTED = 1000


class MigrationEntry(Model):
    """One migration of the history."""

    migration_id: str
    """Id of the migration."""
    plan_id: str
    """The plan it carried out."""
    parent_plan_id: str | None = None
    """The plan that the placement before it came from."""
    trigger: str | None = None
    """What led to it: ``interval``, ``drift``, ``topology`` or ``manual``."""
    who: str = ""
    """Who or what asked for it."""
    reason: str = ""
    """Why, in their words."""
    state: MigrationStateName
    """Where it stands, or how it ended."""
    problem: str | None = None
    """Why it ended early."""
    rows: int = 0
    """Rows that it was to move; 0 if it never started."""
    rows_pushed: int = 0
    """Of which sent to the ranks."""
    rows_applied: int = 0
    """Of which applied by every rank."""
    chunks_pushed: int = 0
    """Chunks sent to the ranks."""
    chunks_applied: int = 0
    """Of which applied by every rank."""
    bytes: int = 0
    """Row values and optimizer state of promoted rows that were applied, each once."""
    pushed_bytes: int = 0
    """Sent over the control channel to each rank."""
    base_version: int = 0
    """Placement version that it started from."""
    last_version: int = 0
    """Highest placement version that it pushed; 0 if none."""
    created_unix_seconds: Measured = None
    """When it was asked for."""
    started_unix_seconds: Measured = None
    """When its first chunk was made."""
    ended_unix_seconds: Measured = None
    """When it ended."""
    seconds: Measured = None
    """From being asked for to its end."""
    settled: bool = False
    """Whether nothing of it is on its way any more, so that rows and bytes are final."""


class TransitionReport(Model):
    """One change of a migration's state."""

    number: int
    """Counts from 0, its submission."""
    unix_seconds: Measured = None
    """When."""
    event: str | None = None
    """What happened; null for the submission."""
    before: MigrationStateName | None = None
    """State before; null for the submission."""
    after: MigrationStateName
    """State after."""
    reason: str = ""
    """Why, if that is known."""
    rows_pushed: int = 0
    """Sent to the ranks by then."""
    rows_applied: int = 0
    """Applied by every rank by then."""
    version: int = 0
    """Highest placement version that it had pushed by then; 0 before its first chunk."""


class MigrationDetail(MigrationEntry):
    """One migration of the history, with everything that it went through."""

    transitions: tuple[TransitionReport, ...] = ()
    """In order; of very many the first and the newest are kept."""


class ActionEntry(Model):
    """Something else that was asked of the daemon."""

    unix_seconds: Measured = None
    """When."""
    kind: str
    """``pause``, ``resume``, ``throttle``, ``reload``, or ``override`` of gates that were closed."""
    who: str = ""
    """Who asked for it."""
    reason: str = ""
    """Why, in their words."""
    detail: str = ""
    """What it came to."""


class MigrationList(Model):
    """The newest first, of each."""

    migrations: tuple[MigrationEntry, ...] = ()
    """At most as many as were asked for."""
    actions: tuple[ActionEntry, ...] = ()
    """What else was asked for, at most as many; none if migrations in one state were asked for."""
    problem: str | None = None
    """Why the newest are not in the history's file yet, if so."""


class AbortRequest(BaseModel):
    """Body of ``POST /v1/abort``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rollback: bool = False
    """Go back to the placement that the migration started from."""
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = ""
    """Recorded with the migration."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 10.0
    """How long to wait for its end, and for that of the rollback; 0 returns as soon as it is asked to stop."""
    who: Annotated[str, Field(max_length=MAX_WHO_CHARACTERS)] = ""
    """Asks for it; recorded."""


AbortOutcome = Literal["stopped", "rolled_back", "ended", "accepted", "timed_out", "rollback_failed"]


class AbortResult(Model):
    """What became of an abort."""

    outcome: AbortOutcome
    """``stopped``: at a chunk; nothing of it is on its way. ``rolled_back``: that, and every rank is back where it
    started. ``ended``: it had ended otherwise before it could be stopped. ``accepted``, ``timed_out``: still stopping
    or rolling back, and goes on. ``rollback_failed``: stopped, but the rollback ended before all of it was applied."""
    migration: MigrationReport
    """The migration, and where it stopped."""
    rollback: MigrationReport | None = None
    """The way back, if that was asked for."""
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""
    """One sentence for people."""


class RollbackPreview(Model):
    """What a rollback would move if it began now. What is on its way to the ranks comes on top."""

    to_version: int
    """Version of the placement that it would bring back."""
    promotions: int = 0
    """Rows that would get copies back."""
    demotions: int = 0
    """Rows that would lose copies."""
    bytes: int = 0
    """Row values and optimizer state of the promoted rows, each once."""


class AbortPreview(Model):
    """What an abort would come to now."""

    migration: MigrationReport
    """That would stop behind the chunks pushed so far; or, for a rollback alone, that ended with an earlier daemon."""
    rows_pushed: int = 0
    """Rows of these chunks: on every rank by then."""
    waiting: tuple[str, ...] = ()
    """Ids of migrations behind it that would not be started."""
    rollback: RollbackPreview | None = None
    """The way back, if that was asked for."""


def abort_status(result: AbortResult) -> int:
    """The HTTP status it is answered with: 202 while something goes on."""
    return 202 if result.outcome in ("accepted", "timed_out") else 200
