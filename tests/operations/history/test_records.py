"""Records of migrations, transitions and actions have the fields of their sources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_states import MigrationState, Transition, TransitionEvent
from flexd.operations.history.records import MAX_DETAIL_CHARACTERS, ActionRecord, MigrationRecord, TransitionRecord
from flexd.planner.delta import Delta


@pytest.fixture
def migration() -> Migration:
    chunks = [Delta(np.arange(30), np.zeros(30, np.uint8), np.ones(30, np.uint8))]
    made = Migration("plan", chunks, metadata=MigrationMetadata("m", "parent", "drift", "ann", "moved"))
    made.fire(TransitionEvent.START, "")
    made.count(rows=30, rows_pushed=20, chunks_pushed=3, bytes_pushed=100, base_version=5, last_version=8)
    made.count(rows_applied=10, chunks_applied=2, copied_bytes=640)
    return made


def test_a_migration_record_has_metadata_and_progress(migration: Migration) -> None:
    record = MigrationRecord.of(migration, settled=False)
    assert (record.migration_id, record.plan_id, record.parent_plan_id) == ("m", "plan", "parent")
    assert (record.trigger, record.who, record.reason, record.state) == ("drift", "ann", "moved", "PUSHING")
    assert (record.rows, record.rows_pushed, record.rows_applied) == (30, 20, 10)
    assert (record.chunks_pushed, record.chunks_applied) == (3, 2)
    assert (record.pushed_bytes, record.copied_bytes) == (100, 640)
    assert (record.base_version, record.last_version, record.settled) == (5, 8, False)
    assert (record.problem, record.seconds) == ("", None)
    migration.fire(TransitionEvent.FAIL, "a rank is lost")
    ended = MigrationRecord.of(migration, settled=True)
    assert (ended.state, ended.problem, ended.settled) == ("FAILED", "a rank is lost", True)
    assert ended.ended_unix_seconds > 0


def test_a_clock_that_was_set_back_gives_a_duration_of_zero(migration: Migration) -> None:
    record = replace(MigrationRecord.of(migration, settled=True), created_unix_seconds=10.0)
    assert replace(record, ended_unix_seconds=12.5).seconds == 2.5
    assert replace(record, ended_unix_seconds=8.0).seconds == 0.0


def test_a_submission_has_no_event_and_no_state_before() -> None:
    submitted = Transition(0, 5.0, None, None, MigrationState.PENDING, "manual", 0, 0, 0)
    assert TransitionRecord.of(submitted) == TransitionRecord(0, 5.0, "", "", "PENDING", "manual", 0, 0, 0)
    stopped = Transition(
        2, 6.0, TransitionEvent.STOPPED, MigrationState.ABORTING, MigrationState.ABORTED, "slow", 20, 10, 8
    )
    assert TransitionRecord.of(stopped) == TransitionRecord(
        2, 6.0, "stopped", "ABORTING", "ABORTED", "slow", 20, 10, 8
    )  # fmt: skip


def test_the_detail_of_an_action_is_truncated() -> None:
    action = ActionRecord.of(1.0, "pause", "ann", "night", "d" * (MAX_DETAIL_CHARACTERS + 1))
    assert action == ActionRecord(1.0, "pause", "ann", "night", "d" * MAX_DETAIL_CHARACTERS)
