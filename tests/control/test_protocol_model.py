"""The migration protocol in every order of events: none breaks it, and each of its rules is needed."""

from __future__ import annotations

from functools import cache

import pytest

from flexd.control.daemon.migration_states import FINAL_STATES, TRANSITIONS, MigrationState, TransitionEvent
from tests.support.protocol_model import MUTATIONS, Bounds, Outcome, explore

pytestmark = pytest.mark.slow

TWO_PLANS = Bounds(ranks=2, faults=1, window=2, chunks={"A": 1, "B": 1})
ONE_CHUNK = Bounds(ranks=2, faults=1, window=1, chunks={"A": 1})
# (bounds, states): a model that shrinks by accident would check less than it is named for.
BOUNDS = (
    pytest.param(TWO_PLANS, 39_000, id="fault"),
    pytest.param(Bounds(2, 1, 2, {"A": 2, "B": 1}), 80_000, id="fault, longer plan", marks=pytest.mark.long),
    pytest.param(Bounds(ranks=3, faults=0, window=2, chunks={"A": 2, "B": 1}), 12_000, id="three ranks"),
    pytest.param(Bounds(ranks=2, faults=2, window=1, chunks={"A": 1}), 18_000, id="two faults"),
)
BOUNDS_THAT_SHOW = {
    "live before all settled": TWO_PLANS,
    "void chunks not pushed again": Bounds(ranks=2, faults=1, window=2, chunks={"A": 1}),
}
"""Bounds in which a mutation is seen; for the others one chunk is enough."""
EXHAUSTIVE = ("live before all settled",)


@cache
def explored_two_plans() -> Outcome:
    """Explore once for the tests that need it."""
    return explore(TWO_PLANS)


@pytest.mark.parametrize(("bounds", "least_states"), BOUNDS)
def test_no_order_of_events_breaks_the_protocol(bounds: Bounds, least_states: int) -> None:
    outcome = explored_two_plans() if bounds is TWO_PLANS else explore(bounds)
    assert outcome.violation == "", "\n".join(outcome.trace)
    assert outcome.stuck == 0, "from every state the migrations can still end"
    assert outcome.states >= least_states


def test_the_model_reaches_every_transition_of_the_codes_table() -> None:
    reached = explored_two_plans().reached
    assert reached <= set(TRANSITIONS)
    assert set(TRANSITIONS) - reached == set()


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(each, marks=[pytest.mark.long] if each in EXHAUSTIVE else []) for each in MUTATIONS],
)
def test_every_rule_of_the_protocol_is_needed(mutation: str) -> None:
    outcome = explore(BOUNDS_THAT_SHOW.get(mutation, ONE_CHUNK), mutation)
    assert outcome.violation or outcome.stuck, f"{mutation}: {outcome.states} states and no violation"
    assert not outcome.violation or outcome.trace


def test_the_table_is_closed() -> None:
    assert {state for state, _ in TRANSITIONS} == set(MigrationState) - FINAL_STATES
    assert set(TRANSITIONS.values()) == set(MigrationState) - {MigrationState.PENDING}
    assert {event for _, event in TRANSITIONS} == set(TransitionEvent)
    for state in set(MigrationState) - FINAL_STATES:
        assert TRANSITIONS[state, TransitionEvent.FAIL] is MigrationState.FAILED
