"""The state table of a migration."""

from __future__ import annotations

import itertools

import pytest

from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import (
    FINAL_STATES,
    TRANSITIONS,
    MigrationRecord,
    MigrationState,
    TransitionEvent,
)
from flexd.core.errors import ControlError
from flexd.core.placement import Placement


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
