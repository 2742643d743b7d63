"""Abort of migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, Model
from flexd.api.migration import MigrationReport

if TYPE_CHECKING:
    from flexd.operations.executions import RollbackPlan


class AbortRequest(CommandRequest):
    """Body of ``POST /v1/abort``."""

    rollback: bool = False
    """Restore the placement that the migration started from."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 10.0
    """How long to wait for the end of the migration and of the rollback; 0 returns as soon as the abort is accepted."""


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


def rollback_preview(rollback_plan: RollbackPlan) -> RollbackPreview:
    """Return what a rollback would move."""
    delta = rollback_plan.delta
    promotions = int((delta.new_tiers > delta.old_tiers).sum())
    return RollbackPreview(
        to_version=rollback_plan.to_version, promotions=promotions, demotions=len(delta) - promotions,
        bytes=rollback_plan.bytes_to_copy,
    )  # fmt: skip
