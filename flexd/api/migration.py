"""Migrations: lists of the history, and their counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexd.api.base import RequestBody
from flexd.control.daemon.migration_record import ActionRecord, MigrationRecord
from flexd.control.daemon.migration_states import FINAL_STATES, MigrationState
from flexd.core.families import counter, with_zeros
from flexd.core.model import Model

if TYPE_CHECKING:
    from flexd.operations.executions import Executions

MAX_LISTED = 1000


class MigrationList(Model):
    """Migrations and other commands, newest first."""

    migrations: tuple[MigrationRecord, ...] = ()
    """At most as many as requested, without their transitions."""
    actions: tuple[ActionRecord, ...] = ()
    """Other commands, at most as many; none if migrations in one state were requested."""
    problem: str | None = None
    """Reason why the newest are not in the history's file yet; null if they are."""


class MigrationsRequest(RequestBody):
    """A list of migrations."""

    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 100
    """Migrations at most, the newest."""
    state: MigrationState | None = None
    """Only those in this state."""


class MigrationCounts(Model):
    """All migrations since the daemon started."""

    ended: dict[str, int] = Field(default_factory=dict)
    """Migrations ended, by final state: ``committed``, ``superseded``, ``aborted``, ``failed``."""
    rows: int = 0
    """Rows whose tier changed on every rank."""
    bytes: int = 0
    """Row values and optimizer state copied."""
    chunks: int = 0
    """Chunks applied by every rank."""
    illegal_transitions: int = 0
    """Transitions that the state table refused: a fault of flexd."""
    lost_entries: int = 0
    """Entries of the history that were dropped unwritten."""

    FAMILIES = (
        counter("flexd_migrations", "Migrations ended, by final state.", "ended", ("state",)),
        counter("flexd_migration_rows", "Rows whose tier changed on every rank.", "rows"),
        counter("flexd_migration_bytes", "Row values and optimizer state copied.", "bytes"),
        counter("flexd_migration_chunks", "Chunks applied by every rank.", "chunks"),
        counter("flexd_history_lost_entries", "Entries of the history that were dropped unwritten.", "lost_entries"),
    )


def migration_counts(executions: Executions, illegal_transitions: int, lost_entries: int) -> MigrationCounts:
    """Return the counters of all migrations since the daemon started."""
    return MigrationCounts(
        ended=with_zeros(sorted(state.value for state in FINAL_STATES), executions.migrations),
        **executions.migrated,
        illegal_transitions=illegal_transitions,
        lost_entries=lost_entries,
    )
