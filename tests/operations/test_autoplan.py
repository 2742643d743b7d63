"""Automatic planning: triggers, proposals, and the wait after a failed migration."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from flexd.api.planning import planning_status
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord, TransitionEvent
from flexd.core.placement import Placement
from flexd.operations.autoplan import FIRST_SECONDS, AutoPlanner, FailureBackoff
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
    assert execution is not None
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
    assert status.failure_backoff_seconds == pytest.approx(FIRST_SECONDS - 3.8)
    now += FIRST_SECONDS
    planner.tick()
    assert len(it.coordinator.migrations) == 2
    assert planning_status(it.planning, planner).held is None


def test_ranks_of_another_generation_are_planned_for_at_once(tmp_path: Path) -> None:
    it = filled_harness(tmp_path, min_spacing_seconds=0.0)
    planner, _ = auto(it)
    planner.tick()
    (migration,) = it.coordinator.migrations
    migration.fire(TransitionEvent.START)
    migration.fire(TransitionEvent.FAIL, "the ranks changed")
    planner.tick()
    assert len(it.coordinator.migrations) == 1
    it.coordinator.topology = replace(it.coordinator.topology, generation=2)
    time.sleep(0.11)  # MIN_SPACING_SECONDS
    planner.tick()
    assert len(it.coordinator.migrations) == 2


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
    failure_backoff.observe(ended(TransitionEvent.FAIL, chunks_applied=2), 300.0)
    assert failure_backoff.seconds(300.0, 3) == FIRST_SECONDS
    failure_backoff.observe(ended(TransitionEvent.APPLIED), 301.0)
    assert failure_backoff.seconds(301.0, 3) == 0.0
    failure_backoff.observe(ended(TransitionEvent.FAIL), 400.0)
    assert failure_backoff.seconds(400.0, 3) == FIRST_SECONDS
