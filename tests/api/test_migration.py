"""The API reports the records of migrations field by field, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.api.migration import (
    ActionEntry,
    MeasuredSteps,
    TransitionReport,
    action_entry,
    ended_report,
    migration_detail,
    migration_entry,
)
from flexd.api.planning import VerificationReport
from flexd.control.daemon.migration_record import EffectRecord, MigrationRecord, VerdictRecord
from flexd.control.daemon.migration_states import MigrationState, Transition, TransitionEvent
from flexd.operations.history import ActionRecord

RECORD = MigrationRecord(
    migration_id="m", plan_id="p", parent_plan_id="before", who="ada", trigger="drift", reason="why",
    state=MigrationState.ABORTED,
    problem="too slow", rows=80, rows_pushed=40, rows_applied=20, chunks_pushed=4, chunks_applied=2, copied_bytes=512,
    pushed_bytes=64, base_version=7, last_version=11, created_unix_seconds=10.0, started_unix_seconds=11.0,
    ended_unix_seconds=15.0, settled=True,
)  # fmt: skip
NEVER_STARTED = MigrationRecord("m", "p", who="ada", reason="why", created_unix_seconds=10.0)


def test_an_entry_has_the_fields_of_its_record() -> None:
    told = migration_entry(RECORD).model_dump()
    assert (told.pop("bytes"), told.pop("seconds")) == (512, 5.0)
    assert (told.pop("effect"), told.pop("verification")) == (None, None)
    assert told.pop("state") == "ABORTED"
    assert told == {name: getattr(RECORD, name) for name in told}
    measured = replace(
        RECORD, effect=EffectRecord(0.3, 0.01, 5, 0.2, None, 4), verdict=VerdictRecord("m", "slower", 0.1)
    )
    shown = migration_entry(replace(measured, predicted_saving_seconds=0.5))
    assert shown.effect is not None
    assert (shown.effect.predicted_saving_seconds, shown.effect.before, shown.effect.measured_error_seconds) == (
        0.5, MeasuredSteps(mean_seconds=0.3, error_seconds=0.01, steps=5), None,
    )  # fmt: skip
    assert shown.effect.measured_saving_seconds == pytest.approx(0.1)
    assert shown.verification == VerificationReport(migration_id="m", state="slower", change=0.1, part=1.0)
    empty = migration_entry(NEVER_STARTED)
    assert (empty.parent_plan_id, empty.trigger, empty.problem) == (None, None, None)
    assert (empty.created_unix_seconds, empty.started_unix_seconds, empty.ended_unix_seconds) == (10.0, None, None)


def test_a_report_of_an_ended_migration_has_its_progress() -> None:
    report = ended_report(RECORD)
    assert (report.progress, report.rows, report.rows_applied) == (0.25, 80, 20)
    assert (report.chunks, report.chunks_pushed, report.chunks_applied, report.bytes_applied) == (4, 4, 2, 512)
    assert (report.started_unix_seconds, report.problem, report.who) == (10.0, "too slow", "ada")
    assert ended_report(NEVER_STARTED).progress == 0.0


def test_transitions_and_actions_keep_their_fields() -> None:
    states = MigrationState
    submitted = Transition(0, 10.0, None, None, states.PENDING, "why", 0, 0, 0)
    stopped = Transition(3, 15.0, TransitionEvent.STOPPED, states.ABORTING, states.ABORTED, "", 40, 20, 11)
    first, last = migration_detail(replace(RECORD, transitions=(submitted, stopped))).transitions
    assert (first.event, first.before, first.after) == (None, None, "PENDING")
    assert last == TransitionReport(
        number=3, unix_seconds=15.0, event="stopped", before="ABORTING", after="ABORTED", rows_pushed=40,
        rows_applied=20, version=11,
    )  # fmt: skip
    action = action_entry(ActionRecord(1.0, "pause", "ada", "night", "x"))
    assert action == ActionEntry(unix_seconds=1.0, kind="pause", who="ada", reason="night", detail="x")
