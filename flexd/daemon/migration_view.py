"""Migrations as the admin API tells them. Reads, never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from flexd.api.abort import RollbackPreview
from flexd.api.migration import (
    ActionEntry,
    MigrationDetail,
    MigrationEntry,
    MigrationReport,
    MigrationStep,
    TransitionReport,
)
from flexd.control.daemon.journal import JournalledMigration
from flexd.control.daemon.migration_states import MigrationState
from flexd.operations.executions import Execution, RollbackPlan
from flexd.operations.history.history import HistorySnapshot
from flexd.operations.history.records import ActionRecord, MigrationRecord, TransitionRecord
from flexd.operations.history.store import ENDED_UNSEEN
from flexd.server.figures import HistoryFigures as HistoryFiguresReport

_UNKNOWN = ("parent_plan_id", "trigger", "problem", "started_unix_seconds", "ended_unix_seconds")
"""Empty in a record where the API says null."""


def migration_report(execution: Execution) -> MigrationReport:
    """A migration that this daemon has started."""
    plan, migration = execution.plan, execution.migration
    progress = migration.progress
    record = MigrationRecord.of(migration, settled=False)
    # Until it starts, its plan knows what it will come to.
    planned = replace(record, rows=record.rows or (0 if plan is None else len(plan.delta)))
    return ended_report(planned).model_copy(
        update={
            "progress": 1.0 if record.state == MigrationState.COMMITTED.name else _share(planned),
            "steps": tuple(MigrationStep(name=step.name, completion=step.completion) for step in progress.steps),
            "eta_seconds": progress.eta_seconds,
            "bytes": progress.bytes_to_copy or (0 if plan is None else plan.migration_bytes),
        }
    )


def ended_report(record: MigrationRecord) -> MigrationReport:
    """A migration as its record tells it: of an earlier daemon nothing more is known."""
    return MigrationReport(
        **_told(record)
        | {
            "progress": _share(record),
            "chunks": record.chunks_pushed,
            "bytes_applied": record.copied_bytes,
            "started_unix_seconds": record.created_unix_seconds,
        }
    )


def interrupted_report(migration: JournalledMigration) -> MigrationReport:
    """A migration of an earlier daemon that the history has lost."""
    return MigrationReport(
        migration_id=migration.migration_id, plan_id=migration.plan_id, state="FAILED",
        base_version=migration.base_version, problem=ENDED_UNSEEN,
    )  # fmt: skip


def rollback_preview(rollback_plan: RollbackPlan) -> RollbackPreview:
    """What a rollback would move."""
    delta = rollback_plan.delta
    promotions = int((delta.new_tiers > delta.old_tiers).sum())
    return RollbackPreview(
        to_version=rollback_plan.to_version, promotions=promotions, demotions=len(delta) - promotions,
        bytes=rollback_plan.bytes_to_copy,
    )  # fmt: skip


def migration_entry(record: MigrationRecord) -> MigrationEntry:
    """A migration of the history."""
    return MigrationEntry(**_told(record) | {"bytes": record.copied_bytes, "seconds": record.seconds})


def action_entry(record: ActionRecord) -> ActionEntry:
    """What else was asked for."""
    return ActionEntry(**asdict(record))


def migration_detail(record: MigrationRecord, transitions: Sequence[TransitionRecord]) -> MigrationDetail:
    """A migration of the history with what it went through."""
    return MigrationDetail(
        **migration_entry(record).model_dump(),
        transitions=tuple(
            TransitionReport(**asdict(each) | {"event": each.event or None, "before": each.before or None})
            for each in transitions
        ),
    )


def history_figures(figures: HistorySnapshot) -> HistoryFiguresReport:
    """For the metrics page."""
    return HistoryFiguresReport(figures.entries, figures.lost, figures.failures, figures.quarantined)


def _told(record: MigrationRecord) -> dict[str, Any]:
    """What a record and the API call by the same name. The API says null of what is not known."""
    fields = asdict(record)
    return fields | {name: fields[name] or None for name in _UNKNOWN}


def _share(record: MigrationRecord) -> float:
    return min(1.0, record.rows_applied / record.rows) if record.rows else 0.0
