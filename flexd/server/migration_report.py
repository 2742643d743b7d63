"""A migration, as the admin API tells it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexd.server.model import Measured, Model

MigrationState = Literal["PENDING", "PUSHING", "APPLYING", "COMMITTED", "ABORTING", "ABORTED", "SUPERSEDED", "FAILED"]

Share = Annotated[float, Field(ge=0, le=1)]


class MigrationReport(Model):
    """A migration in flight, or the newest one."""

    migration_id: str
    """Id of the migration."""
    plan_id: str
    """The plan it carries out."""
    state: MigrationState
    """Where it stands."""
    progress: Share = 0.0
    """Share of its chunks that every rank has applied."""
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
    """Row values and optimizer state it copies, over all ranks."""
    started_unix_seconds: Measured = None
    """When it was started."""
    problem: str | None = None
    """Why it failed or is held up."""
