"""A migration, as the admin API tells it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexd.server.model import Measured, Model

MigrationStateName = Literal[
    "PENDING", "PUSHING", "APPLYING", "COMMITTED", "ABORTING", "ABORTED", "SUPERSEDED", "FAILED"
]

Share = Annotated[float, Field(ge=0, le=1)]


class MigrationStepReport(Model):
    """A part of a migration. Parts overlap: chunks travel one behind the other."""

    name: str
    """``wait``, ``push``, ``agree``, ``apply`` or ``stop``."""
    completion: Share
    """How far it has come."""


class MigrationReport(Model):
    """A migration in flight, or the newest one."""

    migration_id: str
    """Id of the migration."""
    plan_id: str
    """The plan it carries out."""
    parent_plan_id: str | None = None
    """The plan that the placement before it came from."""
    trigger: str | None = None
    """What led to it: ``interval``, ``drift``, ``topology`` or ``manual``."""
    who: str = ""
    """Who or what asked for it."""
    reason: str = ""
    """Why, in their words."""
    state: MigrationStateName
    """Where it stands."""
    progress: Share = 0.0
    """Share of its rows that every rank has applied."""
    steps: tuple[MigrationStepReport, ...] = ()
    """Its parts: ``wait`` for its turn, ``push``, ``agree`` and ``apply`` of its rows, ``stop`` after an abort."""
    eta_seconds: Measured = None
    """Until every rank has applied it, at the present rate; null if that is not known."""
    rows: int = 0
    """Rows it moves."""
    rows_applied: int = 0
    """Of which on every rank."""
    chunks: int = 0
    """Chunks it is pushed in."""
    chunks_pushed: int = 0
    """Of which pushed."""
    chunks_applied: int = 0
    """Of which applied by every rank."""
    bytes: int = 0
    """Row values and optimizer state of the rows it promotes, each once."""
    bytes_applied: int = 0
    """Of which on every rank."""
    base_version: int = 0
    """Placement version that it started from."""
    last_version: int = 0
    """Highest placement version that it has pushed; 0 before its first chunk."""
    started_unix_seconds: Measured = None
    """When it was started."""
    problem: str | None = None
    """Why it failed or is held up."""
