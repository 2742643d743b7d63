"""Plans that save less than ``planner.min_saving`` are withheld, counted, and reported once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexd.api.plan import proposal_report
from flexd.api.planning import planning_status
from flexd.core.errors import PlanError
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.planning import Planning
from flexd.operations.triggers import Trigger, TriggerKind
from tests.support.planning_harness import ROWS, PlanningHarness, filled_harness

ANN = Trigger(TriggerKind.MANUAL, "by hand", "ann@host")
MUCH = {"seconds": 1.0, "share": 0.0}


def said_by(planning: Planning) -> list[tuple[str, str]]:
    said: list[tuple[str, str]] = []
    planning._on_withheld = lambda requested_by, reason: said.append((requested_by, reason))
    return said


def intervals(it: PlanningHarness, count: int, more: int = 20_000) -> None:
    """Let a daemon plan ``count`` times while equally distributed look-ups arrive; every migration succeeds."""
    no_drift: Any = SimpleNamespace(pop_reason=lambda: None)
    auto = AutoPlanner(it.config.planner, it.planning, no_drift, it.coordinator.live)
    for number in range(count):
        before = len(it.coordinator.migrations)
        auto.triggers._next_plan_at = 0.0
        auto.tick()
        for migration in it.coordinator.migrations[before:]:
            it.coordinator.execute(migration)
        it.see(more, draw=number + 1)
    it.auto_status = planning_status(it.planning, auto)  # type: ignore[attr-defined]


def test_a_daemon_does_not_migrate_a_few_rows_up_and_down_at_every_interval(tmp_path: Path) -> None:
    """Noise of the counts makes some rows look better elsewhere in every plan, for nanoseconds."""
    moves = {}
    for name, seconds in (("any", 0.0), ("some", 1e-7)):
        directory = tmp_path / name
        directory.mkdir()
        it = filled_harness(directory, min_saving={"seconds": seconds, "share": 0.0}, horizon_steps=1e9)
        said = said_by(it.planning)
        intervals(it, 8)
        moves[name] = len(it.coordinator.migrations)
        outcomes = it.planning.outcomes
    assert moves["any"] > 2, "the case has no noise"
    assert moves["some"] == 1
    assert outcomes == {"changed": 1, "unchanged": 1, "withheld": 6}
    ((requested_by, reason),) = said
    assert requested_by == "flexd"
    assert "interval: the plan would save " in reason
    assert "planner.min_saving asks for 0.100 us" in reason


def test_a_user_may_force_a_plan_that_saves_little(tmp_path: Path) -> None:
    it = filled_harness(tmp_path, min_saving=MUCH)
    shown = it.propose("look", dry_run=True)
    with pytest.raises(PlanError, match=r"planner.min_saving asks for 1000000.000 us"):
        it.planning.apply(shown.plan.plan_id, ANN)
    assert it.planning.execute(it.propose("look")) is None
    _, execution = it.planning.apply(shown.plan.plan_id, ANN, force=True)
    assert execution is not None
    assert execution.record.overridden_gates == ("saving",)
    assert it.planning.overridden == {"saving": 1}


def test_the_saving_counts_as_a_share_of_the_measured_step(tmp_path: Path) -> None:
    it = filled_harness(tmp_path)
    proposal = it.propose("look", dry_run=True)
    plan, report = proposal.plan, proposal_report(proposal)
    assert plan.step_seconds == pytest.approx(0.1)
    assert (
        report.saved_seconds
        == plan.saved_seconds
        == plan.costs.before.exposed_seconds - plan.costs.after.exposed_seconds
        > 0
    )
    assert report.saved_share == pytest.approx(plan.saved_seconds / 0.1)
    share = plan.saved_seconds / 0.1
    for factor, withheld in ((0.99, False), (1.01, True)):
        settings = it.config.planner.min_saving.model_copy(update={"share": share * factor})
        it.planning.apply_config(
            it.config.model_copy(update={"planner": it.config.planner.model_copy(update={"min_saving": settings})})
        )
        assert bool(it.propose("look", dry_run=True).withheld) is withheld
    unknown = filled_harness(tmp_path, min_saving={"seconds": 0.0, "share": 0.5}, batch_accesses_per_step=800_000.0)
    unknown.training.new_generation()
    lone = unknown.propose("look", dry_run=True)
    assert (lone.plan.saved_share, lone.withheld) == (None, "")


@pytest.mark.parametrize(
    "changed",
    [
        {"pins": [{"table": "item", "tier": "NODE", "rows": [ROWS - 1]}]},
        {"pins": [{"table": "item", "tier": "HOME"}]},
        {"exclude_tables": ["item"]},
    ],
)
def test_limits_that_the_live_placement_breaks_are_enforced_whatever_they_save(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    it = filled_harness(tmp_path)
    _, first = it.execute("first")
    assert first is not None
    it.coordinator.execute(first)
    settings = {**it.config.planner.model_dump(), "min_saving": MUCH}
    it.planning.apply_config(it.config.model_validate({**it.config.model_dump(), "planner": {**settings, **changed}}))
    plan, execution = it.execute("second")
    assert not plan.live_fits
    assert execution is not None
    it.coordinator.execute(execution)
    plan, execution = it.execute("third")
    assert plan.live_fits
    assert execution is None
