"""What the verbs of the admin API take and answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from flexd.server.migration_report import MigrationReport
from flexd.server.model import Model
from flexd.server.plan_report import PlanReport

MAX_REASON_CHARACTERS = 500
MAX_WHO_CHARACTERS = 200


class ReplanRequest(BaseModel):
    """Body of ``POST /v1/replan``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = "asked for by hand"
    """Recorded with the plan."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0
    """How long to wait for the migration to end; 0 returns as soon as the plan is made."""
    force: bool = False
    """Also from a profile that is too thin (a closed gate); recorded."""
    who: Annotated[str, Field(max_length=MAX_WHO_CHARACTERS)] = ""
    """Asks for it; recorded."""


class ApplyRequest(BaseModel):
    """Body of ``POST /v1/proposals/{plan_id}/apply``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = "applied by hand"
    """Recorded with the migration."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0
    """How long to wait for the migration to end; 0 returns as soon as it is started."""
    force: bool = False
    """Also if it was made from a profile that was too thin; recorded."""
    who: Annotated[str, Field(max_length=MAX_WHO_CHARACTERS)] = ""
    """Asks for it; recorded."""


class PauseRequest(BaseModel):
    """Body of ``POST /v1/pause``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = "asked for by hand"
    """Shown in the status until ``resume``; recorded."""
    who: Annotated[str, Field(max_length=MAX_WHO_CHARACTERS)] = ""
    """Asks for it; recorded."""


class AskedRequest(BaseModel):
    """Body of ``POST /v1/resume`` and ``POST /v1/config/reload``; may be left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = ""
    """Recorded."""
    who: Annotated[str, Field(max_length=MAX_WHO_CHARACTERS)] = ""
    """Asks for it; recorded."""


ReplanOutcome = Literal["unchanged", "accepted", "committed", "superseded", "aborted", "failed", "timed_out"]


class ReplanResult(Model):
    """What became of a re-plan."""

    outcome: ReplanOutcome
    """``unchanged``: nothing to move. ``accepted``: the migration runs (no wait was asked for). ``committed``: every
    rank has applied it. ``timed_out``: still running at the end of the wait; it goes on."""
    plan: PlanReport | None = None
    """The plan."""
    migration: MigrationReport | None = None
    """Its migration, if anything moves."""
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""
    """One sentence for people."""


def replan_status(result: ReplanResult) -> int:
    """The HTTP status it is answered with: 202 while the migration goes on."""
    return 202 if result.outcome in ("accepted", "timed_out") else 200


class PauseState(Model):
    """Whether planning and pushing are held."""

    paused: bool
    """Whether they are held now."""
    reason: str | None = None
    """What the pause was asked for."""
    changed: bool = True
    """False if it was so already."""
