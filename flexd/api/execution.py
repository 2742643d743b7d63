"""Plans that are carried out, and migrations that are stopped: re-plan, apply, abort, rollback."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, Reason, RequestBody
from flexd.api.plan import PlanReport
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.core.model import Model

WaitSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class ReplanRequest(CommandRequest):
    """Body of ``POST /v1/replan``."""

    reason: Reason = "requested by hand"
    """Recorded with the plan."""
    wait_seconds: WaitSeconds = 0.0
    """Time to wait for the migration to end; 0 returns as soon as the plan is made."""
    force: bool = False
    """Carry it out although a gate is closed: the profile is too thin, or it saves too little; recorded."""


class ApplyRequest(ReplanRequest):
    """Body of ``POST /v1/proposals/{plan_id}/apply``."""

    reason: Reason = "applied by hand"
    """Recorded with the migration."""


ReplanOutcome = Literal[
    "unchanged", "withheld", "accepted", "committed", "superseded", "aborted", "failed", "timed_out"
]


class ReplanResult(Model):
    """The result of a re-plan."""

    outcome: ReplanOutcome
    """``unchanged``: nothing to move. ``withheld``: it would save less than ``planner.min_saving``, and nothing moves.
    ``accepted``: the migration runs (no wait was requested). ``committed``: every rank has applied it. ``timed_out``:
    still running at the end of the wait; it goes on."""
    plan: PlanReport | None = None
    """The plan."""
    migration: MigrationRecord | None = None
    """Its migration, if anything moves."""
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""
    """One sentence for people."""


class AbortRequest(CommandRequest):
    """Body of ``POST /v1/abort``."""

    rollback: bool = False
    """Restore the placement that the migration started from."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 10.0
    """Time to wait for the end of the migration and of the rollback; 0 returns as soon as the abort is accepted."""


class AbortPreviewRequest(RequestBody):
    """Body of ``POST /v1/abort/preview``."""

    rollback: bool = False
    """Count the rows that a rollback would move."""


AbortOutcome = Literal["stopped", "rolled_back", "ended", "accepted", "timed_out", "rollback_failed"]


class AbortResult(Model):
    """The result of an abort."""

    outcome: AbortOutcome
    """``stopped``: at a chunk, and no chunk is in flight. ``rolled_back``: stopped, and every rank has the placement
    that it started from. ``ended``: it ended before it could be stopped. ``accepted``, ``timed_out``: still stopping
    or rolling back, which goes on. ``rollback_failed``: stopped, but its rollback ended before all was applied."""
    migration: MigrationRecord
    """The migration, and where it stopped."""
    rollback: MigrationRecord | None = None
    """The rollback, if one was requested."""
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""
    """One sentence for people."""


class RollbackPreview(Model):
    """The rows that a rollback would move if it began now, without those of chunks that are in flight."""

    to_version: int
    """Version of the placement that it would restore."""
    promotions: int = 0
    """Rows that would get copies back."""
    demotions: int = 0
    """Rows that would lose copies."""
    bytes: int = 0
    """Row values and optimizer state of the promoted rows, each once."""


class AbortPreview(Model):
    """The effect that an abort would have now."""

    migration: MigrationRecord
    """The migration that would stop after the chunks pushed so far; for a rollback alone, the one that ended with an
    earlier daemon."""
    waiting: tuple[str, ...] = ()
    """Ids of migrations behind it that would not be started."""
    rollback: RollbackPreview | None = None
    """The rollback, if one was requested."""
