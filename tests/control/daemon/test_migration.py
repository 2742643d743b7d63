"""The progress of a migration, its events and its state table."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon import migration as migration_module
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


def test_progress_and_the_time_left_at_the_rate_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(migration_module.time, "time", lambda: now[0])
    migration = Migration(MigrationRecord(migration_id="p"), target(1, 50))
    assert migration.start_from(Placement.empty(7))
    migration.fire(TransitionEvent.START)
    migration.set_delta(Placement.empty(7).delta_to(target(1, 50)), 64 * np.arange(51))
    progress = migration.record
    assert (progress.rows, progress.bytes_to_copy, progress.base_version) == (50, 3200, 7)
    assert (progress.progress, migration.report().eta_seconds) == (0.0, None)
    now[0] += 2.0
    migration.count(chunks_pushed=1, rows_pushed=10, rows_applied=10)
    assert (migration.record.progress, migration.report().eta_seconds) == (0.2, 8.0)
    now[0] += 2.0
    assert migration.report().eta_seconds == 16.0, "time without progress lowers the rate"
    migration.fire(TransitionEvent.ABORT)
    assert migration.report().eta_seconds is None


def test_one_that_is_aborted_before_it_starts_has_no_base() -> None:
    migration = Migration(MigrationRecord(migration_id="p"), Placement.empty())
    migration.abort("too late")
    assert not migration.start_from(Placement.empty(7))
    assert (migration.base, migration.record.base_version) == (None, 0)


def test_events_are_logged_and_passed_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    coordinator = Coordinator(ControlOptions("job"), TABLES, PlacementJournal(tmp_path))
    migration = coordinator.migrate(MigrationRecord(migration_id="m", requested_by="ada"), Placement.empty())
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


def test_the_table_is_closed_and_every_state_can_fail() -> None:
    assert {state for state, _ in TRANSITIONS} == set(MigrationState) - FINAL_STATES
    assert set(TRANSITIONS.values()) == set(MigrationState) - {MigrationState.PENDING}
    failed = {state for (state, event), after in TRANSITIONS.items() if event is TransitionEvent.FAIL}
    assert failed == set(MigrationState) - FINAL_STATES
