"""The progress of a migration, its events and its state table."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import (
    FINAL_STATES,
    TRANSITIONS,
    Migration,
    MigrationRecord,
    MigrationState,
    TransitionEvent,
)
from flexd.core.errors import ControlError
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import TABLES, target


def _applied(migration: Migration, rows: int) -> None:
    migration.count(chunks_pushed=1, rows_pushed=rows, rows_agreed=rows, rows_applied=rows)


def test_progress_has_steps_and_the_time_left_at_the_measured_rate() -> None:
    now = [100.0]
    migration = Migration(MigrationRecord(migration_id="p"), target(1, 50), clock=lambda: now[0])
    assert migration.report().eta_seconds is None
    assert set(migration.record.progress_by_part.values()) == {0.0}
    assert migration.start_from(Placement.empty(7))
    migration.fire(TransitionEvent.START)
    migration.set_delta(Placement.empty(7).delta_to(target(1, 50)), 64 * np.arange(51))
    progress = migration.record
    assert (progress.rows, progress.bytes_to_copy, progress.base_version) == (50, 3200, 7)
    assert (progress.progress, migration.report().eta_seconds) == (0.0, None)
    now[0] += 2.0
    _applied(migration, 10)
    assert migration.report().eta_seconds == pytest.approx(8.0), "10 rows in 2 s, 40 are left"
    now[0] += 2.0
    assert migration.report().eta_seconds == pytest.approx(16.0), "time without progress lowers the rate"
    migration.count(chunks_pushed=1, rows_pushed=20)
    assert migration.record.progress_by_part == {
        "wait": 1.0,
        "push": 0.6,
        "agree": 0.2,
        "apply": 0.2,
    }
    for _ in range(100):
        now[0] += 1.0
        migration.count(rows_applied=0)
    now[0] += 1.0
    _applied(migration, 20)
    # The rate covers the last RATE_SECONDS, not the whole migration: 20 rows in about 30 s.
    assert migration.report().eta_seconds == pytest.approx(20 * 31 / 20, rel=0.1)
    migration.fire(TransitionEvent.ABORT)
    assert migration.report().eta_seconds is None
    assert migration.record.progress_by_part["stop"] == pytest.approx(30 / 50)


def test_one_that_is_aborted_before_it_starts_has_no_base() -> None:
    migration = Migration(MigrationRecord(migration_id="p"), Placement.empty())
    migration.abort("too late")
    assert not migration.start_from(Placement.empty(7))
    assert (migration.base, migration.record.base_version) == (None, 0)


def test_events_are_logged_and_passed_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    coordinator = Coordinator(ControlOptions("job"), TABLES, PlacementJournal(tmp_path))
    origin = MigrationRecord(migration_id="m", requested_by="ada")
    migration = coordinator.migrate(origin, Placement.empty())
    migration.fire(TransitionEvent.START)
    migration.fire(TransitionEvent.FAIL, "why")
    taken = list(iter(coordinator.next_event, None))
    logged = [
        (each.event, *map(each.fields.get, ("migration_id", "requested_by", "reason"))) for each in caplog.records
    ]  # type: ignore[attr-defined]
    assert logged == [
        ("control channel: migration_pending", "m", "ada", ""), ("control channel: migration_pushing", "m", "ada", ""),
        ("control channel: migration_failed", "m", "ada", "why"),
    ]  # fmt: skip
    assert [event.transition for event in taken] == list(migration.record.transitions)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(MigrationState, TransitionEvent)))
def test_only_transitions_of_the_table_are_possible(state: MigrationState, event: TransitionEvent) -> None:
    paths = {
        MigrationState.PENDING: [],
        MigrationState.PUSHING: [TransitionEvent.START],
        MigrationState.APPLYING: [TransitionEvent.START, TransitionEvent.EXHAUSTED],
        MigrationState.COMMITTED: [TransitionEvent.START, TransitionEvent.EXHAUSTED, TransitionEvent.APPLIED],
        MigrationState.SUPERSEDED: [TransitionEvent.SUPERSEDE],
        MigrationState.ABORTING: [TransitionEvent.START, TransitionEvent.ABORT],
        MigrationState.ABORTED: [TransitionEvent.ABORT],
        MigrationState.FAILED: [TransitionEvent.FAIL],
    }
    migration = Migration(MigrationRecord(migration_id="p"), Placement.empty())
    for step in paths[state]:
        migration.fire(step)
    assert migration.state is state
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(ControlError, match=f"no {event.value} in state {state.value}"):
            migration.fire(event)
        assert migration.state is state
    else:
        migration.fire(event, "why")
        assert (migration.state, migration.record.problem) == (after, "why")


def test_the_table_is_closed() -> None:
    assert {state for state, _ in TRANSITIONS} == set(MigrationState) - FINAL_STATES
    assert set(TRANSITIONS.values()) == set(MigrationState) - {MigrationState.PENDING}
    assert {event for _, event in TRANSITIONS} == set(TransitionEvent)
    assert all(
        TRANSITIONS[state, TransitionEvent.FAIL] is MigrationState.FAILED
        for state in set(MigrationState) - FINAL_STATES
    )
