"""Conditions of a plan, and the records of plans and executions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flexd.api.explanation import explanation
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.migration_record import MigrationState
from flexd.control.protocol.report import TrainerSettings
from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile
from tests.support.planning_harness import ROWS, PlanningHarness


@pytest.fixture
def harness(tmp_path: Path) -> PlanningHarness:
    made = PlanningHarness(tmp_path)
    made.see(50_000)
    made.report()
    return made


def test_no_plan_without_ranks(harness: PlanningHarness) -> None:
    harness.coordinator.topology = None
    with pytest.raises(PlanError, match="no plan without ranks: no rank is registered"):
        harness.propose("test")
    harness.coordinator.topology = LiveTopology(1, "a", RankLayout(2, 2), (200,), False, "settling")
    with pytest.raises(PlanError, match="no plan without ranks"):
        harness.propose("test")
    assert harness.planning.outcomes == {"refused": 2}
    assert harness.profiles == [], "a profile is expensive: it is not made for nothing"


def test_a_dry_run_leaves_no_trace(harness: PlanningHarness) -> None:
    seen = harness.propose("look", dry_run=True)
    plan, live = seen.plan, seen.live
    assert len(plan.delta) > 0
    assert live == harness.coordinator.now
    assert harness.planning.last_plan is None
    assert harness.planning.executions.last is None
    assert sum(harness.planning.outcomes.values()) == 0
    assert harness.planning.seconds == 0.0, "the mean duration is of the plans that are counted"
    assert harness.coordinator.migrations == []
    harness.coordinator.topology = None
    with pytest.raises(PlanError):
        harness.propose("look", dry_run=True)
    assert sum(harness.planning.outcomes.values()) == 0


def test_a_plan_is_recorded_executed_and_logged(harness: PlanningHarness) -> None:
    planning = harness.planning
    proposal = harness.propose("because")
    plan = proposal.plan
    assert planning.last_plan is plan
    assert planning.seconds > 0
    assert planning.outcomes == {}
    execution = planning.execute(proposal)
    assert execution is not None
    assert planning.outcomes == {"changed": 1}
    assert planning.executions.live_plan_id == ""
    harness.coordinator.execute(execution)
    record = execution.record
    chunks = -(-len(plan.delta) // 16)
    assert record.plan_id == plan.plan_id == planning.executions.live_plan_id
    assert (record.reason, record.state, record.parent_plan_id) == ("because", MigrationState.COMMITTED, "")
    assert record.rows_applied == len(plan.delta) == record.promotions + record.demotions
    assert (record.base_version, record.last_version) == (0, harness.coordinator.now.version)
    assert record.chunks_pushed == record.last_version >= chunks
    assert planning.executions.migrations == {"committed": 1}
    assert planning.executions.migrated == {
        "rows": len(plan.delta),
        "chunks": record.chunks_pushed,
        "bytes": plan.migration_bytes,
    }
    assert harness.coordinator.now.digest() == plan.target.digest()


def test_a_plan_that_changes_nothing_pushes_nothing(harness: PlanningHarness) -> None:
    plan, execution = harness.execute("first")
    assert execution is not None
    harness.coordinator.execute(execution)
    proposal = harness.propose("second")
    second, live = proposal.plan, proposal.live
    assert second.origin.parent_id == plan.plan_id
    assert len(second.delta) == 0
    assert live.digest() == plan.target.digest()
    assert harness.planning.execute(proposal) is None
    assert harness.planning.outcomes == {"changed": 1, "unchanged": 1}
    assert harness.planning.proposals.all() == (), "neither can be applied any more"
    assert len(harness.coordinator.migrations) == 1


def test_plans_are_made_one_at_a_time_with_ids_of_their_own(harness: PlanningHarness) -> None:
    inside, most = 0, 0
    whole = harness.profile
    guard = threading.Lock()

    def slow(per_step: float) -> Profile:
        nonlocal inside, most
        with guard:
            inside += 1
            most = max(most, inside)
        made = whole(per_step)
        threading.Event().wait(0.02)
        with guard:
            inside -= 1
        return made

    harness.profile = slow
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(harness.propose("x").plan.plan_id)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(ids)) == 4
    assert most == 1


def test_an_explanation_names_pins_and_exclusions(tmp_path: Path) -> None:
    def explained(row: int, **planner: Any) -> tuple[str, str]:
        harness = PlanningHarness(tmp_path, **planner)
        harness.see(50_000)
        harness.report()
        (answer,) = explanation(*harness.planning.explain("item", row, 0)).explained
        return answer.planned, answer.reason

    coldest = ROWS - 1
    pins = [{"table": "item", "tier": "HOME", "rows": [0]}, {"table": "item", "tier": "DEVICE", "rows": [coldest]}]
    assert explained(0)[1] == "saves"
    assert explained(0, pins=pins) == ("HOME", "pinned")
    assert explained(coldest, pins=pins) == ("DEVICE", "pinned")
    assert explained(0, exclude_tables=["item"]) == ("HOME", "excluded")


def planned_for(tmp_path: Path, trainer: TrainerSettings | None) -> tuple[PlanningHarness, Plan]:
    harness = PlanningHarness(tmp_path)
    harness.see(50_000)
    harness.report()
    harness.coordinator.topology = LiveTopology(1, "a", RankLayout(2, 2), (200,), True, "", trainer=trainer)
    return harness, harness.propose("why").plan


def test_a_plan_copies_no_row_of_a_table_that_answers_by_sums(tmp_path: Path) -> None:
    _, by_rows = planned_for(tmp_path, TrainerSettings("chain", pooled="1"))
    harness, at_owner = planned_for(tmp_path, TrainerSettings("chain", pooled="1", at_owner="1"))
    assert len(by_rows.target) > 0
    assert len(at_owner.target) == 0
    (answer,) = explanation(*harness.planning.explain("item", 0, 0)).explained
    assert (answer.planned, answer.reason) == ("HOME", "excluded")
