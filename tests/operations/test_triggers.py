"""Times of triggers, and holding them outside maintenance windows or without auto."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexd.config.planner import PlannerConfig, WindowConfig
from flexd.operations.triggers import Trigger, TriggerKind, Triggers

GENERATION = 3
CLOSED, OPEN = 12 * 3600.0, 3 * 3600.0
"""Unix seconds outside and inside ``NIGHT``."""
NIGHT = [WindowConfig(start="02:00", end="05:00")]


def nothing() -> str | None:
    return None


def make(spacing: float = 1.0, *, auto: bool = True, maintenance: Sequence[WindowConfig] = ()) -> Triggers:
    """Return triggers at time 0, with a plan made for the ranks of ``GENERATION``."""
    triggers = Triggers(
        PlannerConfig(interval_seconds=100.0, min_spacing_seconds=spacing, auto=auto, maintenance=maintenance), 0.0
    )
    triggers._planned_generation = GENERATION
    return triggers


def ask(
    triggers: Triggers, now: float, unix: float = OPEN, generation: int = GENERATION,
    drift: Callable[[], str | None] = nothing,
) -> Trigger | None:  # fmt: skip
    return triggers.due(now, unix, generation, drift)


def test_the_interval_starts_at_the_last_attempt() -> None:
    triggers = make()
    assert ask(triggers, 99.9) is None
    assert ask(triggers, 100.0) == Trigger(TriggerKind.INTERVAL, "interval")
    assert ask(triggers, 199.0) is None, "the attempt counts whether a plan was made or refused"
    assert ask(triggers, 200.0) is not None
    assert triggers.fired == {TriggerKind.INTERVAL: 2}


def test_a_changed_topology_triggers_at_once_until_a_plan_is_made() -> None:
    triggers = make()
    due = ask(triggers, 5.0, generation=4)
    assert due == Trigger(TriggerKind.TOPOLOGY, "topology changed")
    assert ask(triggers, 5.5, generation=4) is None, "min_spacing_seconds"
    assert ask(triggers, 6.0, generation=4) == due
    triggers.plan_made(due, 4)
    assert ask(triggers, 8.0, generation=4) is None


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
    triggers = make(maintenance=NIGHT)
    due = ask(triggers, 1.0, CLOSED, drift=lambda: "drift 1.30 > 1.05")
    assert due is not None
    assert due.held == "outside the maintenance windows"
    triggers.plan_made(due, GENERATION)
    interval = ask(triggers, 101.0, CLOSED)
    assert interval is not None
    triggers.plan_made(interval, GENERATION)
    assert ask(triggers, 150.0, CLOSED) is None
    opened = ask(triggers, 160.0, OPEN)
    assert opened == Trigger(TriggerKind.DRIFT, "drift 1.30 > 1.05, held until the maintenance window opened"), (
        "the first held trigger"
    )
    again = ask(triggers, 162.0, OPEN)
    assert again == opened, "a refused plan is retried"
    triggers.plan_made(opened, GENERATION)
    assert ask(triggers, 170.0, OPEN) is None
