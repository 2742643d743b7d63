"""The migration protocol, exhaustively: no order of events breaks it, and every rule it has is needed."""

from __future__ import annotations

import pytest

from flexd.control.daemon.migration_states import FINAL_STATES, TRANSITIONS, MigrationState, TransitionEvent
from tests.support.protocol_model import MUTATIONS, Bounds, explore

pytestmark = pytest.mark.slow

# (bounds, states): a model that shrinks by accident checks less than it says.
BOUNDS = (
    (Bounds(ranks=2, faults=1, window=2, chunks={"A": 2, "B": 1}), 80_000),
    (Bounds(ranks=3, faults=0, window=2, chunks={"A": 2, "B": 1}), 12_000),
    (Bounds(ranks=2, faults=2, window=1, chunks={"A": 1}), 18_000),
)
SMALL = Bounds(ranks=2, faults=1, window=2, chunks={"A": 1, "B": 1})
ONE_PLAN = Bounds(ranks=2, faults=1, window=2, chunks={"A": 2})
SUSPECTS = {"live before all settled": SMALL}


@pytest.mark.parametrize(("bounds", "least_states"), BOUNDS, ids=["fault", "three ranks", "two faults"])
def test_no_order_of_events_breaks_the_protocol(bounds: Bounds, least_states: int) -> None:
    outcome = explore(bounds)
    assert outcome.violation == "", "\n".join(outcome.trace)
    assert outcome.stuck == 0, "from every state the migrations can still end"
    assert outcome.states >= least_states


def test_the_model_takes_every_transition_of_the_codes_table() -> None:
    taken = explore(SMALL).taken
    assert taken <= set(TRANSITIONS)
    assert set(TRANSITIONS) - taken == set()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_rule_of_the_protocol_is_needed(mutation: str) -> None:
    outcome = explore(SUSPECTS.get(mutation, ONE_PLAN), mutation)
    assert outcome.violation or outcome.stuck, f"{mutation}: {outcome.states} states and nothing wrong"
    assert not outcome.violation or outcome.trace


def test_the_table_is_closed() -> None:
    assert {state for state, _ in TRANSITIONS} == set(MigrationState) - FINAL_STATES
    assert set(TRANSITIONS.values()) == set(MigrationState) - {MigrationState.PENDING}
    assert {event for _, event in TRANSITIONS} == set(TransitionEvent)
    for state in set(MigrationState) - FINAL_STATES:
        assert TRANSITIONS[state, TransitionEvent.FAIL] is MigrationState.FAILED
