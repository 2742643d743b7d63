"""What fires when, and whether it may move rows."""

from __future__ import annotations

from collections.abc import Callable

from flexd.config.planner import WindowConfig
from flexd.operations.maintenance_windows import Calendar
from flexd.operations.triggers import FiredTrigger, Trigger, TriggerKind, Triggers, TriggerSettings

GENERATION = 3
CLOSED, OPEN = 12 * 3600.0, 3 * 3600.0
"""Unix seconds outside and inside ``NIGHT``."""
NIGHT = Calendar.of([WindowConfig(start="02:00", end="05:00")])


def nothing() -> str | None:
    return None


def make(spacing: float = 1.0, *, auto: bool = True, calendar: Calendar | None = None) -> Triggers:
    """At time 0, with the ranks of ``GENERATION`` planned for."""
    triggers = Triggers(TriggerSettings(100.0, spacing, auto, calendar or Calendar()), 0.0)
    triggers._planned_generation = GENERATION
    return triggers


def ask(
    triggers: Triggers, now: float, unix: float = OPEN, generation: int = GENERATION,
    drift: Callable[[], str | None] = nothing,
) -> FiredTrigger | None:  # fmt: skip
    return triggers.due(now, unix, generation, drift)


def test_the_interval_counts_from_the_last_try() -> None:
    triggers = make()
    assert ask(triggers, 99.9) is None
    assert ask(triggers, 100.0) == FiredTrigger(Trigger(TriggerKind.INTERVAL, "interval"))
    assert ask(triggers, 199.0) is None, "made or refused"
    assert ask(triggers, 200.0) is not None
    assert triggers.fired == {TriggerKind.INTERVAL: 2}


def test_other_ranks_are_planned_for_at_once_and_again_until_a_plan_is_made() -> None:
    triggers = make()
    due = ask(triggers, 5.0, generation=4)
    assert due == FiredTrigger(Trigger(TriggerKind.TOPOLOGY, "topology changed"))
    assert ask(triggers, 5.5, generation=4) is None, "min_spacing_seconds"
    assert ask(triggers, 6.0, generation=4) == due
    triggers.plan_made(due, 4)
    assert ask(triggers, 8.0, generation=4) is None


def test_drift_is_proposed_again_after_what_it_had_asked_for_was_carried_out() -> None:
    triggers = make(calendar=NIGHT)
    drift = "drift 1.20 > 1.05"
    held = ask(triggers, 5.0, CLOSED, drift=lambda: drift)
    assert held is not None
    triggers.plan_made(held, GENERATION)
    assert ask(triggers, 7.0, CLOSED, drift=lambda: drift) is None
    opened = ask(triggers, 9.0, OPEN)
    assert opened is not None
    triggers.plan_made(opened, GENERATION)
    again = ask(triggers, 11.0, CLOSED, drift=lambda: drift)
    assert again is not None
    assert again.trigger.kind is TriggerKind.DRIFT


def test_what_waited_for_a_window_is_forgotten_where_nothing_starts_by_itself() -> None:
    triggers = make(calendar=NIGHT)
    held = ask(triggers, 5.0, CLOSED, drift=lambda: "drift 1.20 > 1.05")
    assert held is not None
    triggers.plan_made(held, GENERATION)
    assert triggers.waiting_for_window is not None
    triggers.apply_settings(TriggerSettings(100.0, 1.0, auto=False, calendar=NIGHT), 6.0)
    triggers.apply_settings(TriggerSettings(100.0, 1.0, auto=True, calendar=NIGHT), 6.0)
    assert triggers.waiting_for_window is None


def test_drift_that_was_proposed_waits_for_something_carried_out_whatever_else_is_proposed() -> None:
    triggers = make(auto=False)
    first = ask(triggers, 5.0, drift=lambda: "drift 1.20 > 1.05")
    assert first is not None
    triggers.plan_made(first, GENERATION)
    by_interval = ask(triggers, 200.0, drift=lambda: "drift 1.20 > 1.05")
    assert by_interval is not None
    assert by_interval.trigger.kind is TriggerKind.INTERVAL
    triggers.plan_made(by_interval, GENERATION)
    assert ask(triggers, 210.0, drift=lambda: "drift 1.20 > 1.05") is None


def test_drift_fires_and_is_not_taken_when_it_could_not_be_used() -> None:
    asked = []

    def drift() -> str | None:
        asked.append(1)
        return "drift 1.20 > 1.05"

    triggers = make(spacing=10.0)
    assert ask(triggers, 1.0, drift=drift) == FiredTrigger(Trigger(TriggerKind.DRIFT, "drift 1.20 > 1.05"))
    assert ask(triggers, 2.0, drift=drift) is None
    assert len(asked) == 1
    assert ask(triggers, 11.0, drift=drift) is not None


def test_propose_only_holds_everything_and_says_why() -> None:
    triggers = make(auto=False)
    due = ask(triggers, 100.0)
    assert due is not None
    assert due.held == "planner.auto is false"
    triggers.plan_made(due, GENERATION)
    assert triggers.waiting_for_window is None, "no window will open"


def test_drift_proposes_once_until_something_is_carried_out() -> None:
    triggers = make(auto=False)
    due = ask(triggers, 1.0, drift=lambda: "drift")
    assert due is not None
    triggers.plan_made(due, GENERATION)
    assert ask(triggers, 10.0, drift=lambda: "drift") is None, "it would say so after every look"
    triggers.record_manual_plan(11.0, executed=False)
    assert ask(triggers, 12.0, drift=lambda: "drift") is None
    triggers.record_manual_plan(13.0, executed=True)
    assert ask(triggers, 14.0, drift=lambda: "drift") is not None


def test_what_a_window_held_fires_when_it_opens() -> None:
    triggers = make(calendar=NIGHT)
    due = ask(triggers, 1.0, CLOSED, drift=lambda: "drift 1.30 > 1.05")
    assert due is not None
    assert due.held == "outside the maintenance windows"
    triggers.plan_made(due, GENERATION)
    interval = ask(triggers, 101.0, CLOSED)
    assert interval is not None
    triggers.plan_made(interval, GENERATION)
    assert ask(triggers, 150.0, CLOSED) is None
    opened = ask(triggers, 160.0, OPEN)
    assert opened == FiredTrigger(
        Trigger(TriggerKind.DRIFT, "drift 1.30 > 1.05, held until the maintenance window opened")
    ), "the first that was held"
    again = ask(triggers, 162.0, OPEN)
    assert again == opened, "refused: tried again"
    triggers.plan_made(opened, GENERATION)
    assert ask(triggers, 170.0, OPEN) is None


def test_by_hand_in_a_closed_window_leaves_nothing_waiting() -> None:
    triggers = make(calendar=NIGHT)
    due = ask(triggers, 100.0, CLOSED)
    assert due is not None
    triggers.plan_made(due, GENERATION)
    triggers.record_manual_plan(101.0, executed=True)
    assert ask(triggers, 110.0, OPEN) is None
    assert ask(triggers, 200.9, OPEN) is None, "the interval counts from there"
    assert ask(triggers, 201.0, OPEN) is not None


def test_other_settings_hold_from_now_on() -> None:
    triggers = make()
    triggers.apply_settings(TriggerSettings(10.0, 1.0, False), 50.0)
    due = ask(triggers, 60.0)
    assert due is not None
    assert due.held
    triggers.apply_settings(TriggerSettings(1000.0, 1.0), 61.0)
    assert ask(triggers, 69.0) is None
    assert ask(triggers, 70.0) is not None, "not put off"
