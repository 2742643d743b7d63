"""Plans that are carried out: re-plan and apply."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, Model, Reason
from flexd.api.migration import MigrationReport
from flexd.api.plan import PlanReport

WaitSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class ReplanRequest(CommandRequest):
    """Body of ``POST /v1/replan``."""

    reason: Reason = "requested by hand"
    """Recorded with the plan."""
    wait_seconds: WaitSeconds = 0.0
    """Time to wait for the migration to end; 0 returns as soon as the plan is made."""
    force: bool = False
    """Carry it out although a gate is closed: the profile is too thin, or it saves too little; recorded."""


class ApplyRequest(CommandRequest):
    """Body of ``POST /v1/proposals/{plan_id}/apply``."""

    reason: Reason = "applied by hand"
    """Recorded with the migration."""
    wait_seconds: WaitSeconds = 0.0
    """Time to wait for the migration to end; 0 returns as soon as it is started."""
    force: bool = False
    """Carry the plan out although a gate was closed; recorded."""


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
    migration: MigrationReport | None = None
    """Its migration, if anything moves."""
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""
    """One sentence for people."""
