"""Times of triggers, and holding them outside maintenance windows or without auto."""

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
    """Return triggers at time 0, with a plan made for the ranks of ``GENERATION``."""
    triggers = Triggers(TriggerSettings(100.0, spacing, auto, calendar or Calendar()), 0.0)
    triggers._planned_generation = GENERATION
    return triggers


def ask(
    triggers: Triggers, now: float, unix: float = OPEN, generation: int = GENERATION,
    drift: Callable[[], str | None] = nothing,
) -> FiredTrigger | None:  # fmt: skip
    return triggers.due(now, unix, generation, drift)


def test_the_interval_starts_at_the_last_attempt() -> None:
    triggers = make()
    assert ask(triggers, 99.9) is None
    assert ask(triggers, 100.0) == FiredTrigger(Trigger(TriggerKind.INTERVAL, "interval"))
    assert ask(triggers, 199.0) is None, "the attempt counts whether a plan was made or refused"
    assert ask(triggers, 200.0) is not None
    assert triggers.fired == {TriggerKind.INTERVAL: 2}


def test_a_changed_topology_triggers_at_once_until_a_plan_is_made() -> None:
    triggers = make()
    due = ask(triggers, 5.0, generation=4)
    assert due == FiredTrigger(Trigger(TriggerKind.TOPOLOGY, "topology changed"))
    assert ask(triggers, 5.5, generation=4) is None, "min_spacing_seconds"
    assert ask(triggers, 6.0, generation=4) == due
    triggers.plan_made(due, 4)
    assert ask(triggers, 8.0, generation=4) is None


def test_drift_is_proposed_again_after_its_plan_was_executed() -> None:
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


def test_a_waiting_trigger_is_dropped_when_auto_is_switched_off() -> None:
    triggers = make(calendar=NIGHT)
    held = ask(triggers, 5.0, CLOSED, drift=lambda: "drift 1.20 > 1.05")
    assert held is not None
    triggers.plan_made(held, GENERATION)
    assert triggers.waiting_for_window is not None
    triggers.apply_settings(TriggerSettings(100.0, 1.0, auto=False, calendar=NIGHT), 6.0)
    triggers.apply_settings(TriggerSettings(100.0, 1.0, auto=True, calendar=NIGHT), 6.0)
    assert triggers.waiting_for_window is None


def test_proposed_drift_is_not_proposed_again_before_an_execution() -> None:
    triggers = make(auto=False)
    first = ask(triggers, 5.0, drift=lambda: "drift 1.20 > 1.05")
    assert first is not None
    triggers.plan_made(first, GENERATION)
    by_interval = ask(triggers, 200.0, drift=lambda: "drift 1.20 > 1.05")
    assert by_interval is not None
    assert by_interval.trigger.kind is TriggerKind.INTERVAL
    triggers.plan_made(by_interval, GENERATION)
    assert ask(triggers, 210.0, drift=lambda: "drift 1.20 > 1.05") is None


def test_a_drift_reason_is_not_consumed_within_the_spacing() -> None:
    asked = []

    def drift() -> str | None:
        asked.append(1)
        return "drift 1.20 > 1.05"

    triggers = make(spacing=10.0)
    assert ask(triggers, 1.0, drift=drift) == FiredTrigger(Trigger(TriggerKind.DRIFT, "drift 1.20 > 1.05"))
    assert ask(triggers, 2.0, drift=drift) is None
    assert len(asked) == 1
    assert ask(triggers, 11.0, drift=drift) is not None


def test_without_auto_every_trigger_is_held_with_a_reason() -> None:
    triggers = make(auto=False)
    due = ask(triggers, 100.0)
    assert due is not None
    assert due.held == "planner.auto is false"
    triggers.plan_made(due, GENERATION)
    assert triggers.waiting_for_window is None, "no window will open"


def test_drift_is_proposed_once_until_a_plan_is_executed() -> None:
    triggers = make(auto=False)
    due = ask(triggers, 1.0, drift=lambda: "drift")
    assert due is not None
    triggers.plan_made(due, GENERATION)
    assert ask(triggers, 10.0, drift=lambda: "drift") is None, "otherwise every evaluation would propose it"
    triggers.record_manual_plan(11.0, executed=False)
    assert ask(triggers, 12.0, drift=lambda: "drift") is None
    triggers.record_manual_plan(13.0, executed=True)
    assert ask(triggers, 14.0, drift=lambda: "drift") is not None


def test_a_held_trigger_fires_when_the_window_opens() -> None:
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
    ), "the first held trigger"
    again = ask(triggers, 162.0, OPEN)
    assert again == opened, "a refused plan is retried"
    triggers.plan_made(opened, GENERATION)
    assert ask(triggers, 170.0, OPEN) is None


def test_a_manual_plan_in_a_closed_window_clears_the_held_trigger() -> None:
    triggers = make(calendar=NIGHT)
    due = ask(triggers, 100.0, CLOSED)
    assert due is not None
    triggers.plan_made(due, GENERATION)
    triggers.record_manual_plan(101.0, executed=True)
    assert ask(triggers, 110.0, OPEN) is None
    assert ask(triggers, 200.9, OPEN) is None, "the interval starts at the manual plan"
    assert ask(triggers, 201.0, OPEN) is not None


def test_changed_settings_apply_at_once() -> None:
    triggers = make()
    triggers.apply_settings(TriggerSettings(10.0, 1.0, False), 50.0)
    due = ask(triggers, 60.0)
    assert due is not None
    assert due.held
    triggers.apply_settings(TriggerSettings(1000.0, 1.0), 61.0)
    assert ask(triggers, 69.0) is None
    assert ask(triggers, 70.0) is not None, "a longer interval does not delay the running one"
