"""Migrations as the admin API tells them. Reads, never changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from flexd.control.journal import JournalledMigration
from flexd.control.migration_states import MigrationState
from flexd.daemon.executions import Execution, WayBack
from flexd.history.history import HistoryFigures
from flexd.history.records import ActionRecord, MigrationRecord, TransitionRecord
from flexd.history.store import ENDED_UNSEEN
from flexd.server.figures import HistoryFigures as HistoryFiguresReport
from flexd.server.migration_history import (
    ActionEntry,
    MigrationDetail,
    MigrationEntry,
    RollbackPreview,
    TransitionReport,
)
from flexd.server.migration_report import MigrationReport, MigrationStateName, StepReport


def migration_report(execution: Execution) -> MigrationReport:
    """A migration that this daemon has started."""
    plan, trigger, migration = execution.plan, execution.trigger, execution.migration
    progress = migration.progress
    rows = progress.rows or (0 if plan is None else len(plan.delta))
    state = progress.state
    return MigrationReport(
        migration_id=migration.migration_id,
        plan_id=progress.plan_id,
        parent_plan_id=migration.about.parent_plan_id or None,
        trigger=trigger.kind.value,
        who=trigger.who,
        reason=trigger.reason,
        state=_name(state.name),
        progress=1.0 if state is MigrationState.COMMITTED else min(1.0, progress.rows_applied / rows) if rows else 0.0,
        steps=tuple(StepReport(name=step.name, completion=step.completion) for step in progress.steps),
        eta_seconds=progress.eta_seconds,
        rows=rows,
        rows_applied=progress.rows_applied,
        chunks=progress.chunks_pushed,
        chunks_pushed=progress.chunks_pushed,
        chunks_applied=progress.chunks_applied,
        bytes=progress.bytes_to_copy or (0 if plan is None else plan.migration_bytes),
        bytes_applied=progress.copied_bytes,
        base_version=progress.base_version,
        last_version=progress.last_version,
        started_unix_seconds=progress.created_unix_seconds,
        problem=progress.reason or None,
    )


def ended_report(record: MigrationRecord) -> MigrationReport:
    """A migration of an earlier daemon, by the history."""
    return MigrationReport(
        migration_id=record.migration_id,
        plan_id=record.plan_id,
        parent_plan_id=record.parent_plan_id or None,
        trigger=record.trigger or None,
        who=record.who,
        reason=record.reason,
        state=_name(record.state),
        progress=min(1.0, record.rows_applied / record.rows) if record.rows else 0.0,
        rows=record.rows,
        rows_applied=record.rows_applied,
        chunks=record.chunks_pushed,
        chunks_pushed=record.chunks_pushed,
        chunks_applied=record.chunks_applied,
        bytes_applied=record.copied_bytes,
        base_version=record.base_version,
        last_version=record.last_version,
        started_unix_seconds=record.created_unix_seconds,
        problem=record.problem or None,
    )


def interrupted_report(migration: JournalledMigration) -> MigrationReport:
    """A migration of an earlier daemon that the history has lost."""
    return MigrationReport(
        migration_id=migration.migration_id, plan_id=migration.plan_id, state="FAILED",
        base_version=migration.base_version, problem=ENDED_UNSEEN,
    )  # fmt: skip


def rollback_preview(way_back: WayBack) -> RollbackPreview:
    """What a rollback would move."""
    delta = way_back.delta
    promotions = int((delta.new_tiers > delta.old_tiers).sum())
    return RollbackPreview(
        to_version=way_back.to_version, promotions=promotions, demotions=len(delta) - promotions,
        bytes=way_back.bytes_to_copy,
    )  # fmt: skip


def migration_entry(record: MigrationRecord) -> MigrationEntry:
    """A migration of the history."""
    return MigrationEntry(
        migration_id=record.migration_id,
        plan_id=record.plan_id,
        parent_plan_id=record.parent_plan_id or None,
        trigger=record.trigger or None,
        who=record.who,
        reason=record.reason,
        state=_name(record.state),
        problem=record.problem or None,
        rows=record.rows,
        rows_pushed=record.rows_pushed,
        rows_applied=record.rows_applied,
        chunks_pushed=record.chunks_pushed,
        chunks_applied=record.chunks_applied,
        bytes=record.copied_bytes,
        pushed_bytes=record.pushed_bytes,
        base_version=record.base_version,
        last_version=record.last_version,
        created_unix_seconds=record.created_unix_seconds,
        started_unix_seconds=record.started_unix_seconds or None,
        ended_unix_seconds=record.ended_unix_seconds or None,
        seconds=record.seconds,
        settled=record.settled,
    )


def action_entry(record: ActionRecord) -> ActionEntry:
    """What else was asked for."""
    return ActionEntry(
        unix_seconds=record.unix_seconds, kind=record.kind, who=record.who, reason=record.reason, detail=record.detail
    )


def migration_detail(record: MigrationRecord, transitions: Sequence[TransitionRecord]) -> MigrationDetail:
    """A migration of the history with what it went through."""
    return MigrationDetail(
        **migration_entry(record).model_dump(),
        transitions=tuple(
            TransitionReport(
                number=each.number,
                unix_seconds=each.unix_seconds,
                event=each.event or None,
                before=_name(each.before) if each.before else None,
                after=_name(each.after),
                reason=each.reason,
                rows_pushed=each.rows_pushed,
                rows_applied=each.rows_applied,
                version=each.version,
            )
            for each in transitions
        ),
    )


def history_figures(figures: HistoryFigures) -> HistoryFiguresReport:
    """For the metrics page."""
    return HistoryFiguresReport(figures.entries, figures.lost, figures.failures, figures.set_aside)


def _name(state: str) -> MigrationStateName:
    return cast(MigrationStateName, state)
