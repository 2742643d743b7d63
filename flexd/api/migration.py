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
    from flexd.operations.history import HistorySnapshot

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


class HistoryStatus(Model):
    """The file of the history of migrations; counters run since the daemon started."""

    entries: int = 0
    """Entries written."""
    lost: int = 0
    """Entries dropped unwritten."""
    failures: int = 0
    """Writes that failed, and are tried again."""
    quarantined: int = 0
    """Files that were not usable and were quarantined."""

    FAMILIES = (counter("flexd_history_lost_entries", "Entries of the history that were dropped unwritten.", "lost"),)


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
    history: HistoryStatus = HistoryStatus()
    """The file of the history."""

    FAMILIES = (
        counter("flexd_migrations", "Migrations ended, by final state.", "ended", ("state",)),
        counter("flexd_migration_rows", "Rows whose tier changed on every rank.", "rows"),
        counter("flexd_migration_bytes", "Row values and optimizer state copied.", "bytes"),
        counter("flexd_migration_chunks", "Chunks applied by every rank.", "chunks"),
    )


def migration_counts(executions: Executions, illegal_transitions: int, history: HistorySnapshot) -> MigrationCounts:
    """Return the counters of all migrations since the daemon started."""
    return MigrationCounts(
        ended=with_zeros(sorted(state.value for state in FINAL_STATES), executions.migrations),
        **executions.migrated,
        illegal_transitions=illegal_transitions,
        history=HistoryStatus.from_object(history),
    )
