"""Automatic planning: proposals, the wait after a failed migration, times of triggers, and maintenance windows."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.api.planning import planning_status
from flexd.config.sections import DAYS, PlannerConfig, WindowConfig
from flexd.control.daemon.migration import Migration, MigrationRecord, TransitionEvent
from flexd.core.placement import Placement
from flexd.operations.autoplan import FIRST_SECONDS, AutoPlanner, Calendar, FailureBackoff, Triggers
from flexd.operations.executions import Trigger, TriggerKind
from tests.support.planning_harness import PlanningHarness, filled_harness

ANN = Trigger(TriggerKind.MANUAL, "applied by hand", "ann@host")


@pytest.fixture
def harness(tmp_path: Path) -> PlanningHarness:
    return filled_harness(tmp_path)


class QuietDrift:
    """No drift, or the reason that a test sets."""

    reason: str | None = None

    def pop_reason(self) -> str | None:
        reason, self.reason = self.reason, None
        return reason


def auto(it: PlanningHarness) -> tuple[AutoPlanner, QuietDrift]:
    drift = QuietDrift()
    return AutoPlanner(it.config.planner, it.planning, drift, it.coordinator.live), drift  # type: ignore[arg-type]


def test_a_daemon_that_proposes_only_moves_nothing_until_apply(tmp_path: Path) -> None:
    it = filled_harness(tmp_path, auto=False)
    planner, _ = auto(it)
    planner.tick()
    assert it.coordinator.migrations == []
    (proposal,) = it.planning.proposals.all()
    assert (proposal.trigger.kind, proposal.dry_run) == (TriggerKind.TOPOLOGY, False)
    assert it.planning.last_plan is proposal.plan
    _, execution = it.planning.apply("latest", ANN)
    assert (execution.record.requested_by, execution.record.reason) == (ANN.requested_by, ANN.reason)


def test_an_interrupted_rollback_is_resumed_before_a_plan(harness: PlanningHarness) -> None:
    calls: list[int] = []
    planner = AutoPlanner(
        harness.config.planner, harness.planning, QuietDrift(), harness.coordinator.live,  # type: ignore[arg-type]
        lambda: not calls.append(1),
    )  # fmt: skip
    for _ in range(3):
        planner.tick()
    assert calls == [1]
    assert harness.coordinator.migrations == [], "the rollback replaces the trigger of new ranks"
    planner, _ = auto(harness)
    planner.record_manual_plan(executed=True)
    planner.tick()
    assert harness.coordinator.migrations == [], "a requested rollback starts the interval again"
    planner, _ = auto(harness)
    planner.record_manual_plan(executed=False)
    planner.tick()
    assert len(harness.coordinator.migrations) == 1


def test_a_failed_migration_holds_the_next_plan_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = filled_harness(tmp_path, min_spacing_seconds=0.0, interval_seconds=0.1)
    planner, drift = auto(it)
    planner.tick()
    (migration,) = it.coordinator.migrations
    migration.fire(TransitionEvent.START)
    migration.fire(TransitionEvent.FAIL, "rank 2 refused chunk 1: no memory")
    now = time.monotonic()
    monkeypatch.setattr("flexd.operations.autoplan.time.monotonic", lambda: now)
    for _ in range(20):
        now += 0.2
        drift.reason = "the accesses have moved"
        planner.tick()
    assert len(it.coordinator.migrations) == 1, "the daemon waits"
    status = planning_status(it.planning, planner)
    assert status.held == f"{planner.failure_backoff.reason(now, 1)}"
    assert "rank 2 refused chunk 1: no memory" in (status.held or "")
    assert f"in {FIRST_SECONDS - 3.8:.0f} s" in (status.held or "")
    now += FIRST_SECONDS
    planner.tick()
    assert len(it.coordinator.migrations) == 2
    assert planning_status(it.planning, planner).held is None


def ended(event: TransitionEvent | None, generation: int | None = 3, chunks_applied: int = 0) -> Migration:
    migration = Migration(MigrationRecord(migration_id="p", generation=generation), Placement.empty())
    migration.fire(TransitionEvent.START)
    migration.count(chunks_applied=chunks_applied)
    if event is TransitionEvent.APPLIED:
        migration.fire(TransitionEvent.EXHAUSTED)
    if event is not None:
        migration.fire(event, "rank 2 refused chunk 1: no memory" if event is TransitionEvent.FAIL else "")
    return migration


def test_progress_starts_the_waits_over() -> None:
    failure_backoff = FailureBackoff()
    for now in (0.0, 100.0, 200.0):
        failure_backoff.observe(ended(TransitionEvent.FAIL), now)
    assert failure_backoff.seconds(200.0, 3) == 4 * FIRST_SECONDS
    assert failure_backoff.seconds(200.0, 4) == 0.0, "ranks of another generation"
    failure_backoff.observe(ended(TransitionEvent.FAIL, chunks_applied=2), 300.0)
    assert failure_backoff.seconds(300.0, 3) == FIRST_SECONDS
    failure_backoff.observe(ended(TransitionEvent.APPLIED), 301.0)
    assert failure_backoff.seconds(301.0, 3) == 0.0
    failure_backoff.observe(ended(TransitionEvent.FAIL), 400.0)
    assert failure_backoff.seconds(400.0, 3) == FIRST_SECONDS


def at(text: str, zone: str = "Europe/Berlin", fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def calendar(*windows: dict[str, Any]) -> Calendar:
    return Calendar([WindowConfig(**{"time_zone": "Europe/Berlin", **window}) for window in windows])


TUESDAY_NIGHT = {"start": "02:00", "end": "05:00", "days": ["tue"]}
FRIDAY_NIGHT = {"start": "22:00", "end": "03:00", "days": ["fri"]}


# 2026-11-24 is a Tuesday.
@pytest.mark.parametrize(
    ("window", "moment", "is_open"),
    [
        (TUESDAY_NIGHT, "2026-11-24T01:59:59", False), (TUESDAY_NIGHT, "2026-11-24T02:00:00", True),
        (TUESDAY_NIGHT, "2026-11-24T04:59:59", True), (TUESDAY_NIGHT, "2026-11-24T05:00:00", False),
        (TUESDAY_NIGHT, "2026-11-25T03:00:00", False), (FRIDAY_NIGHT, "2026-11-27T21:59:00", False),
        (FRIDAY_NIGHT, "2026-11-27T22:00:00", True), (FRIDAY_NIGHT, "2026-11-28T02:59:00", True),
        (FRIDAY_NIGHT, "2026-11-28T03:00:00", False), (FRIDAY_NIGHT, "2026-11-27T02:00:00", False),
        (FRIDAY_NIGHT, "2026-11-28T23:00:00", False),
    ],
)  # fmt: skip
def test_a_window_is_open_from_its_start_to_its_end_on_the_days_that_it_begins_on(
    window: dict[str, Any], moment: str, is_open: bool
) -> None:
    assert calendar(window).is_open(at(moment)) is is_open


def test_a_forbidding_window_beats_an_allowing_one() -> None:
    both = calendar(
        {"start": "00:00", "end": "24:00"}, {"kind": "forbid", "start": "18:00", "end": "22:00", "days": ["sat"]}
    )
    assert both.is_open(at("2026-11-28T17:59:00"))
    assert not both.is_open(at("2026-11-28T18:00:00"))
    only = calendar({"kind": "forbid", "start": "18:00", "end": "22:00", "days": ["sat"]})
    assert only.is_open(at("2026-11-24T12:00:00"))
    assert not only.is_open(at("2026-11-28T19:00:00"))


def test_a_skipped_hour_is_in_no_window() -> None:
    """2026-03-29 in Berlin: 01:59:59 is followed by 03:00:00."""
    skipped = calendar({"start": "02:00", "end": "03:00"})
    start = at("2026-03-29T00:00:00")
    assert not any(skipped.is_open(start + minute * 60) for minute in range(12 * 60))
    assert skipped.next_change(start) == at("2026-03-30T02:00:00")
    half = calendar({"start": "02:30", "end": "04:00"})
    assert half.next_change(start) == at("2026-03-29T03:00:00")
    assert half.next_change(at("2026-03-29T03:00:00")) == at("2026-03-29T04:00:00")


def test_a_repeated_hour_is_in_the_window_both_times() -> None:
    """2026-10-25 in Berlin: 02:00 to 03:00 comes twice."""
    repeated = calendar({"start": "02:15", "end": "02:45"})
    first, second = at("2026-10-25T02:15:00"), at("2026-10-25T02:15:00", fold=1)
    assert second - first == 3600
    changes = [at("2026-10-25T00:00:00")]
    for _ in range(4):
        changes.append(repeated.next_change(changes[-1]))
    assert changes[1:] == [first, first + 1800, second, second + 1800]
    hours = calendar({"start": "01:00", "end": "03:00"})
    assert hours.next_change(at("2026-10-25T01:30:00")) == at("2026-10-25T03:00:00"), "three hours long"


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 1439),
    end=st.integers(0, 1440),
    days=st.sets(st.sampled_from(DAYS), min_size=1),
    kind=st.sampled_from(["allow", "forbid"]),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]),
    moment=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),
)
def test_between_now_and_the_next_change_nothing_changes(
    start: int, end: int, days: set[str], kind: str, zone: str, moment: datetime
) -> None:
    if start == end:
        return
    text = [f"{minute // 60:02d}:{minute % 60:02d}" for minute in (start, end)]
    made = Calendar([WindowConfig(start=text[0], end=text[1], days=sorted(days), kind=kind, time_zone=zone)])
    now = moment.replace(tzinfo=ZoneInfo("UTC")).timestamp()
    change = made.next_change(now)
    before = made.is_open(now)
    until = now + timedelta(days=8).total_seconds() if change is None else change
    for share in range(200):
        assert made.is_open(now + (until - now) * share / 200) is before
    if change is not None:
        assert made.is_open(change) is not before
        assert made.is_open(change - 1) is before


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"start": "25:00", "end": "02:00"}, "start"), ({"start": "01:00", "end": "01:00"}, "equals the start"),
        ({"start": "01:00", "end": "02:00", "time_zone": "Europe/Nowhere"}, "not an IANA time zone"),
        ({"start": "01:00", "end": "02:00", "time_zone": "../../etc/passwd"}, "not an IANA time zone"),
        ({"start": "01:00", "end": "02:00", "days": []}, "days"),
        ({"start": "01:00", "end": "02:00", "days": ["monday"]}, "days"), ({"start": True, "end": "02:00"}, "start"),
    ],
)  # fmt: skip
def test_malformed_windows_are_refused(window: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WindowConfig(**window)


GENERATION = 3
CLOSED, OPEN = 12 * 3600.0, 3 * 3600.0
"""Unix seconds outside and inside ``NIGHT``."""
NIGHT = [WindowConfig(start="02:00", end="05:00")]


def make(spacing: float = 1.0, *, auto: bool = True, maintenance: Sequence[WindowConfig] = ()) -> Triggers:
    """Return triggers at time 0, with a plan made for the ranks of ``GENERATION``."""
    triggers = Triggers(
        PlannerConfig(interval_seconds=100.0, min_spacing_seconds=spacing, auto=auto, maintenance=maintenance), 0.0
    )
    triggers._planned_generation = GENERATION
    return triggers


def ask(
    triggers: Triggers, now: float, unix: float = OPEN, generation: int = GENERATION,
    drift: Callable[[], str | None] = lambda: None,
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
    assert due.held == "planner.auto is false"
    triggers.plan_made(due, GENERATION)
    assert triggers.waiting_for_window is None, "no window will open"


def test_drift_is_proposed_once_until_a_plan_is_executed() -> None:
    triggers = make(auto=False)
    triggers.plan_made(ask(triggers, 1.0, drift=lambda: "drift"), GENERATION)
    assert ask(triggers, 10.0, drift=lambda: "drift") is None, "otherwise every evaluation would propose it"
    triggers.record_manual_plan(11.0, executed=False)
    assert ask(triggers, 12.0, drift=lambda: "drift") is None
    triggers.record_manual_plan(13.0, executed=True)
    assert ask(triggers, 14.0, drift=lambda: "drift") is not None


def test_a_held_trigger_fires_when_the_window_opens() -> None:
    triggers = make(maintenance=NIGHT)
    due = ask(triggers, 1.0, CLOSED, drift=lambda: "drift 1.30 > 1.05")
    assert due.held == "outside the maintenance windows"
    triggers.plan_made(due, GENERATION)
    triggers.plan_made(ask(triggers, 101.0, CLOSED), GENERATION)
    assert ask(triggers, 150.0, CLOSED) is None
    opened = ask(triggers, 160.0, OPEN)
    assert opened == Trigger(TriggerKind.DRIFT, "drift 1.30 > 1.05, held until the maintenance window opened"), (
        "the first held trigger"
    )
    assert ask(triggers, 162.0, OPEN) == opened, "a refused plan is retried"
    triggers.plan_made(opened, GENERATION)
    assert ask(triggers, 170.0, OPEN) is None
