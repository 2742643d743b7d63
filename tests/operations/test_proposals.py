"""Proposals: kept, applied, refused when outdated; plans in spite of closed gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import ApiError, PlanError
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.operations.proposals import MAX_PER_KIND
from flexd.operations.triggers import Trigger, TriggerKind
from tests.support.planning_harness import PlanningHarness, filled_harness

ANN = Trigger(TriggerKind.MANUAL, "applied by hand", "ann@host")


@pytest.fixture
def harness(tmp_path: Path) -> PlanningHarness:
    return filled_harness(tmp_path)


def test_a_proposal_is_applied_and_recorded_with_its_user(harness: PlanningHarness) -> None:
    plan = harness.propose("look", dry_run=True).plan
    proposal, execution = harness.planning.apply(plan.plan_id, ANN)
    assert execution is not None
    harness.coordinator.execute(execution)
    assert harness.coordinator.now.digest() == plan.target.digest()
    record = execution.record
    assert (record.plan_id, record.trigger, record.requested_by) == (plan.plan_id, "manual", "ann@host")
    assert record.overridden_gates == ()
    assert proposal.plan is plan
    with pytest.raises(ApiError, match="no proposal"):
        harness.planning.apply(plan.plan_id, ANN)


def test_proposals_are_bounded_and_dry_runs_evict_no_automatic_proposal(harness: PlanningHarness) -> None:
    own = [harness.propose("interval").plan.plan_id for _ in range(MAX_PER_KIND + 1)]
    for _ in range(MAX_PER_KIND + 2):
        harness.propose("look", dry_run=True)
    kept = harness.planning.proposals.all()
    assert [each.plan.plan_id for each in kept if not each.dry_run] == own[1:]
    assert sum(each.dry_run for each in kept) == MAX_PER_KIND


def _other_ranks(it: PlanningHarness) -> None:
    it.coordinator.topology = LiveTopology(2, "b", RankLayout(2, 2), (200,), True, "")


def _no_ranks(it: PlanningHarness) -> None:
    it.coordinator.topology = None


def _other_placement(it: PlanningHarness) -> None:
    it.coordinator.now = Placement.of(np.array([5]), np.array([1], np.uint8), version=1)


def _migrating(it: PlanningHarness) -> None:
    it.execute("meanwhile")


def _other_accesses(it: PlanningHarness) -> None:
    it.see(500_000, seed=10)


@pytest.mark.parametrize(
    ("meanwhile", "said"),
    [
        (_other_ranks, "topology generation 1, they are at 2"), (_no_ranks, "not all ranks are ready"),
        (_other_placement, "starts from version 0, the ranks are at 1"), (_migrating, "a migration is running"),
        (_other_accesses, r"the accesses have moved on since it was made: drift \d"),
    ],
)  # fmt: skip
def test_an_outdated_proposal_is_refused_with_the_reason(
    harness: PlanningHarness, monkeypatch: pytest.MonkeyPatch, meanwhile: Any, said: str
) -> None:
    # With more, every rank needs every row in every step, and all placements cost the same.
    monkeypatch.setattr(harness.training, "accesses_per_step", lambda world_size: 40_000.0)
    plan = harness.propose("look", dry_run=True).plan
    meanwhile(harness)
    before = len(harness.coordinator.migrations)
    for force in (False, True):
        with pytest.raises(PlanError, match=said):
            harness.planning.apply(plan.plan_id, ANN, force=force)
    assert len(harness.coordinator.migrations) == before


def test_a_plan_from_a_thin_profile_can_be_shown_and_applied_only_with_force(tmp_path: Path) -> None:
    it = PlanningHarness(tmp_path)
    it.report()
    it.see(500)
    with pytest.raises(PlanError, match="500 accesses seen"):
        it.propose("by hand")
    seen = it.propose("look", dry_run=True)
    assert [gate.name for gate in seen.closed_gates] == ["samples"]
    with pytest.raises(PlanError, match="the profile is thin"):
        it.planning.apply(seen.plan.plan_id, ANN)
    _, execution = it.planning.apply(seen.plan.plan_id, ANN, force=True)
    assert execution is not None
    assert execution.record.overridden_gates == ("samples",)
    assert it.planning.overridden == {"samples": 1}
    it.coordinator.execute(execution)
    assert execution.record.requested_by == "ann@host"
