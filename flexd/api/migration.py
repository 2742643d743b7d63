"""Migrations: the running ones, their history, and the saving that was predicted and measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flexd.api.base import RequestBody
from flexd.api.planning import VerificationReport
from flexd.core import units
from flexd.core.families import counter, gauge, with_zeros
from flexd.core.model import DETAIL, FiniteOrNone, Model, Share, Show

if TYPE_CHECKING:
    from flexd.control.daemon.migration_record import MigrationRecord
    from flexd.operations.executions import Execution, Executions
    from flexd.operations.history import ActionRecord, HistorySnapshot


class MeasuredSteps(Model):
    """Steps at one placement version, without those that applied chunks."""

    mean_seconds: FiniteOrNone = None
    """Mean wall time of a step."""
    error_seconds: FiniteOrNone = None
    """Standard error of the mean; null if too few were reported."""
    steps: int = 0
    """Steps that were measured."""


class MigrationEffect(Model):
    """The saving of a step that a plan predicted, beside the steps before and after its migration. A load that changes
    at the same time is in the difference; ``planner.verify`` separates the two."""

    predicted_saving_seconds: FiniteOrNone = None
    """Exposed seconds a step, by the plan; null for a rollback."""
    measured_saving_seconds: FiniteOrNone = None
    """Mean step before minus mean step after; null until both are measured."""
    measured_error_seconds: FiniteOrNone = None
    """Standard error of the measured saving."""
    before: MeasuredSteps | None = None
    """Steps at the placement that it started from; null if none was measured."""
    after: MeasuredSteps | None = None
    """Steps at the placement that it led to; null until it has committed and steps were measured."""

    def words(self) -> str:
        """Return the predicted saving of a step beside the measured one."""
        return f"{units.seconds(self.predicted_saving_seconds)}, measured {units.seconds(self.measured_saving_seconds)}"


def migration_effect(record: MigrationRecord) -> MigrationEffect | None:
    """Return the predicted saving of a migration beside the steps before and after it; None if neither is known."""
    effect = record.effect
    if effect is None:
        predicted = record.predicted_saving_seconds
        return None if predicted is None else MigrationEffect(predicted_saving_seconds=predicted)
    return MigrationEffect(
        predicted_saving_seconds=record.predicted_saving_seconds,
        measured_saving_seconds=effect.saving_seconds,
        measured_error_seconds=effect.error_seconds,
        before=_steps(effect.before_seconds, effect.before_error_seconds, effect.before_steps),
        after=_steps(effect.after_seconds, effect.after_error_seconds, effect.after_steps),
    )


def _steps(mean_seconds: float | None, error_seconds: float | None, steps: int) -> MeasuredSteps | None:
    if mean_seconds is None:
        return None
    return MeasuredSteps(mean_seconds=mean_seconds, error_seconds=error_seconds, steps=steps)


MAX_LISTED = 1000
MigrationStateName = Literal[
    "PENDING", "PUSHING", "APPLYING", "COMMITTED", "ABORTING", "ABORTED", "SUPERSEDED", "FAILED"
]

FINAL_STATES: tuple[MigrationStateName, ...] = ("COMMITTED", "ABORTED", "SUPERSEDED", "FAILED")


class MigrationStep(Model):
    """A part of a migration. Parts overlap: chunks are pipelined."""

    name: str
    """``wait``, ``push``, ``agree``, ``apply`` or ``stop``."""
    completion: Share
    """Completed share of the part."""


class MigrationBase(Model):
    """What the running migrations and those of the history have in common."""

    migration_id: str
    """Id of the migration."""
    state: MigrationStateName
    """Its state."""
    rows: int = 0
    """Rows of its delta; 0 if it never started."""
    rows_applied: int = 0
    """Part of them that every rank has applied."""
    plan_id: Annotated[str, DETAIL]
    """The plan it carried out."""
    parent_plan_id: Annotated[str | None, DETAIL] = None
    """The plan that the placement before it came from."""
    trigger: str | None = None
    """Its trigger: ``interval``, ``drift``, ``topology``, ``manual``, or ``verify`` for a move of a verification."""
    who: str = ""
    """The person or program that requested it."""
    reason: str = ""
    """The reason given."""
    problem: str | None = None
    """Reason why it failed, is held up, or ended early."""
    chunks_pushed: Annotated[int, DETAIL] = 0
    """Chunks sent to the ranks."""
    chunks_applied: Annotated[int, DETAIL] = 0
    """Part of them that every rank has applied."""
    base_version: Annotated[int, DETAIL] = 0
    """Placement version that it started from."""
    last_version: Annotated[int, DETAIL] = 0
    """Highest placement version that it pushed; 0 if none."""
    started_unix_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """When it was started; in the history, when its first chunk was made."""
    effect: Annotated[MigrationEffect | None, Show(unit=lambda effect: effect.words())] = None
    """Predicted saving of a step beside the measured one; null if neither is known, and in the replies to commands."""


class MigrationReport(MigrationBase):
    """A migration in flight, or the newest one."""

    progress: Share = 0.0
    """Share of its rows that every rank has applied."""
    steps: tuple[MigrationStep, ...] = ()
    """Its parts: ``wait`` for its turn, ``push``, ``agree`` and ``apply`` of its rows, ``stop`` after an abort."""
    eta_seconds: FiniteOrNone = None
    """Until every rank has applied it, at the present rate; null if that is not known."""
    chunks: int = 0
    """Chunks it is pushed in."""
    bytes: int = 0
    """Row values and optimizer state of the rows it promotes, each once."""
    bytes_applied: int = 0
    """Part of them that is on every rank."""

    FAMILIES = (
        gauge(
            "flexd_migration_progress_ratio", "Of the migration in flight, 0-1; NaN if none is.",
            lambda newest: None if newest.state in FINAL_STATES else newest.progress,
        ),
        gauge(
            "flexd_migration_saving_seconds",
            "Of a step, by the newest migration: as its plan predicted, and as the steps before and after it differ; "
            "NaN where it is not known.",
            lambda newest: {
                kind: getattr(newest.effect or MigrationEffect(), f"{kind}_saving_seconds")
                for kind in ("predicted", "measured")
            },
            ("kind",),
        ),
    )  # fmt: skip


class MigrationEntry(MigrationBase):
    """One migration of the history."""

    rows_pushed: Annotated[int, DETAIL] = 0
    """Rows sent to the ranks."""
    bytes: int = 0
    """Row values and optimizer state of promoted rows that were applied, each once."""
    pushed_bytes: Annotated[int, DETAIL] = 0
    """Sent over the control channel to each rank."""
    created_unix_seconds: FiniteOrNone = None
    """When it was requested."""
    ended_unix_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """When it ended."""
    seconds: FiniteOrNone = None
    """From the request to its end."""
    settled: Annotated[bool, DETAIL] = False
    """True if no chunk of it is in flight any more, so that rows and bytes are final."""
    verification: Annotated[VerificationReport | None, Show(unit=lambda found: found.state)] = None
    """Its steps with and without the copies of its plan; null if they were not compared."""


class TransitionReport(Model):
    """One change of a migration's state."""

    number: int
    """Counts from 0, its submission."""
    unix_seconds: FiniteOrNone = None
    """When."""
    event: str | None = None
    """The event; null for the submission."""
    before: MigrationStateName | None = None
    """State before; null for the submission."""
    after: MigrationStateName
    """State after."""
    reason: str = ""
    """Reason, if that is known."""
    rows_pushed: int = 0
    """Rows sent to the ranks by then."""
    rows_applied: int = 0
    """Rows applied by every rank by then."""
    version: int = 0
    """Highest placement version that it had pushed by then; 0 before its first chunk."""


class MigrationDetail(MigrationEntry):
    """One migration of the history with all its transitions."""

    transitions: tuple[TransitionReport, ...] = ()
    """In order; of very many the first and the newest are kept."""


class ActionEntry(Model):
    """Another command that the daemon carried out."""

    unix_seconds: FiniteOrNone = None
    """When."""
    kind: str
    """``pause``, ``resume``, ``throttle``, ``reload``, ``override`` of gates that were closed, ``withhold`` of
    plans that save too little, or ``verify``, the measured effect of the migration that is named as the reason."""
    who: str = ""
    """The person or program that gave it."""
    reason: str = ""
    """The reason given."""
    detail: str = ""
    """Its result."""


class MigrationList(Model):
    """Migrations and other commands, newest first."""

    migrations: tuple[MigrationEntry, ...] = ()
    """At most as many as requested."""
    actions: tuple[ActionEntry, ...] = ()
    """Other commands, at most as many; none if migrations in one state were requested."""
    problem: str | None = None
    """Reason why the newest are not in the history's file yet; null if they are."""


class MigrationsRequest(RequestBody):
    """A list of migrations."""

    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 100
    """Migrations at most, the newest."""
    state: MigrationStateName | None = None
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


def migration_report(execution: Execution) -> MigrationReport:
    """Return a migration that this daemon has started."""
    plan, migration = execution.plan, execution.migration
    record = migration.record
    # Until it starts, only its plan knows the number of rows.
    planned = replace(record, rows=record.rows or (0 if plan is None else len(plan.delta)))
    return ended_report(planned).model_copy(
        update={
            "steps": tuple(MigrationStep(name=name, completion=share) for name, share in record.steps),
            "eta_seconds": migration.eta_seconds(),
            "bytes": record.bytes_to_copy or (0 if plan is None else plan.migration_bytes),
        }
    )


def ended_report(record: MigrationRecord) -> MigrationReport:
    """Return a migration as its record describes it: nothing more is known of one of an earlier daemon."""
    return MigrationReport.from_object(
        record,
        **_null_if_empty(record, "parent_plan_id", "trigger", "problem"),
        state=record.state.name,
        progress=record.share,
        steps=(),
        eta_seconds=None,
        bytes=0,
        chunks=record.chunks_pushed,
        bytes_applied=record.copied_bytes,
        started_unix_seconds=record.created_unix_seconds or None,
        effect=None,
    )


def migration_entry(record: MigrationRecord) -> MigrationEntry:
    """Return a migration of the history."""
    return MigrationEntry.from_object(record, **_entry_fields(record))


def migration_detail(record: MigrationRecord) -> MigrationDetail:
    """Return a migration of the history with its transitions."""
    shown = tuple(
        TransitionReport.from_object(
            each,
            event=None if each.event is None else each.event.value,
            before=None if each.before is None else each.before.name,
            after=each.after.name,
        )
        for each in record.transitions
    )
    return MigrationDetail.from_object(record, **_entry_fields(record), transitions=shown)


def action_entry(record: ActionRecord) -> ActionEntry:
    """Return another command of the history."""
    return ActionEntry.from_object(record)


def migration_counts(executions: Executions, illegal_transitions: int, history: HistorySnapshot) -> MigrationCounts:
    """Return the counters of all migrations since the daemon started."""
    from flexd.control.daemon.migration_states import FINAL_STATES as ENDED

    return MigrationCounts(
        ended=with_zeros(sorted(state.value for state in ENDED), executions.migrations),
        **executions.migrated,
        illegal_transitions=illegal_transitions,
        history=HistoryStatus.from_object(history),
    )


def _entry_fields(record: MigrationRecord) -> dict[str, Any]:
    unknown = ("parent_plan_id", "trigger", "problem", "started_unix_seconds", "ended_unix_seconds")
    verdict = record.verdict
    return {
        **_null_if_empty(record, *unknown), "state": record.state.name, "bytes": record.copied_bytes,
        "seconds": record.seconds, "effect": migration_effect(record),
        "verification": None if verdict is None else VerificationReport.from_object(verdict),
    }  # fmt: skip


def _null_if_empty(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) or None for name in names}
