"""Conditions of a plan, its records, proposals that may still be carried out, and the gates that hold plans back."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexd.api.plan import explanation, proposal_report
from flexd.config.sections import PlannerConfig
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import MigrationState
from flexd.control.protocol.report import TrainerSettings
from flexd.core.errors import ApiError, PlanError
from flexd.core.placement import Placement, RankLayout
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.executions import Trigger, TriggerKind
from flexd.operations.live_plan import cheaper_exchange
from flexd.operations.planning import MAX_PER_KIND, evaluate_gates, require_open
from flexd.planner.model.prices import Exchange
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile, TableProfile
from tests.support.planning_harness import ROWS, PlanningHarness, filled_harness


@pytest.fixture
def harness(tmp_path: Path) -> PlanningHarness:
    return filled_harness(tmp_path)


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
    assert len(seen.plan.delta) > 0
    assert seen.live == harness.coordinator.now
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
    assert (planning.outcomes, planning.executions.live_plan_id) == ({"changed": 1}, "")
    harness.coordinator.execute(execution)
    record, chunks = execution.record, -(-len(plan.delta) // 16)
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
    harness.coordinator.execute(execution)
    proposal = harness.propose("second")
    assert proposal.plan.origin.parent_id == plan.plan_id
    assert len(proposal.plan.delta) == 0
    assert proposal.live.digest() == plan.target.digest()
    assert harness.planning.execute(proposal) is None
    assert harness.planning.outcomes == {"changed": 1, "unchanged": 1}
    assert harness.planning.proposals.all() == (), "neither can be applied any more"
    assert len(harness.coordinator.migrations) == 1


def test_plans_are_made_one_at_a_time_with_ids_of_their_own(harness: PlanningHarness) -> None:
    idle, whole = threading.Lock(), harness.profile

    def slow(per_step: float) -> Profile:
        assert idle.acquire(blocking=False), "another plan is being made"
        time.sleep(0.02)
        idle.release()
        return whole(per_step)

    harness.profile = slow
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: harness.propose("x").plan.plan_id, range(4)))) == 4


def test_an_explanation_names_pins_and_exclusions(tmp_path: Path) -> None:
    def explained(row: int, **planner: Any) -> tuple[str, str]:
        (answer,) = explanation(*filled_harness(tmp_path, **planner).planning.explain("item", row, 0)).explained
        return answer.planned, answer.reason

    coldest = ROWS - 1
    pins = [{"table": "item", "tier": "HOME", "rows": [0]}, {"table": "item", "tier": "DEVICE", "rows": [coldest]}]
    assert explained(0)[1] == "saves"
    assert explained(0, pins=pins) == ("HOME", "pinned")
    assert explained(coldest, pins=pins) == ("DEVICE", "pinned")
    assert explained(0, exclude_tables=["item"]) == ("HOME", "excluded")


def planned_for(tmp_path: Path, trainer: TrainerSettings | None, slots: int = 200) -> tuple[PlanningHarness, Plan]:
    harness = filled_harness(tmp_path)
    harness.coordinator.topology = LiveTopology(1, "a", RankLayout(2, 2), (slots,), True, "", trainer=trainer)
    return harness, harness.propose("why").plan


def test_a_plan_copies_no_row_of_a_table_that_answers_by_sums(tmp_path: Path) -> None:
    _, by_rows = planned_for(tmp_path, TrainerSettings("chain", pooling="r"))
    harness, at_owner = planned_for(tmp_path, TrainerSettings("chain", pooling="o"))
    assert len(by_rows.target) > 0
    assert len(at_owner.target) == 0
    (answer,) = explanation(*harness.planning.explain("item", 0, 0)).explained
    assert (answer.planned, answer.reason) == ("HOME", "excluded")


def test_a_plan_for_read_only_rows_is_for_the_exchange_that_is_faster_with_its_copies(tmp_path: Path) -> None:
    """Copies of all rows leave the exchange its latency, of which one hop has less than two."""
    plans = {
        (exchange, read_only): planned_for(tmp_path, TrainerSettings(exchange, read_only=read_only), ROWS)[1]
        for exchange in ("auto", "chain", "direct")
        for read_only in ("", "r")
    }
    chain, direct, chosen = (plans[exchange, "r"] for exchange in ("chain", "direct", "auto"))
    assert plans["auto", ""].costs.exchange is Exchange.CHAIN, "trained: that which is measured"
    assert direct.costs.after.exposed_seconds < chain.costs.after.exposed_seconds
    assert chosen.costs.exchange is Exchange.DIRECT_DEDUP
    assert chosen.target.digest() == direct.target.digest()
    assert chosen.costs.before.exposed_seconds == chain.costs.before.exposed_seconds, "it saves what is used now"
    assert cheaper_exchange(chosen) == "direct"
    assert chosen.costs.after.sync_bytes(0) == chosen.costs.after.sync_bytes(1) == 0


ANN = Trigger(TriggerKind.MANUAL, "applied by hand", "ann@host")


def test_a_proposal_is_applied_and_recorded_with_its_user(harness: PlanningHarness) -> None:
    plan = harness.propose("look", dry_run=True).plan
    proposal, execution = harness.planning.apply(plan.plan_id, ANN)
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


OTHER_RANKS = LiveTopology(2, "b", RankLayout(2, 2), (200,), True, "")
OTHER_PLACEMENT = Placement.of(np.array([5]), np.array([1], np.uint8), version=1)


@pytest.mark.parametrize(
    ("meanwhile", "said"),
    [
        (lambda it: setattr(it.coordinator, "topology", OTHER_RANKS), "topology generation 1, they are at 2"),
        (lambda it: setattr(it.coordinator, "topology", None), "not all ranks are ready"),
        (lambda it: setattr(it.coordinator, "now", OTHER_PLACEMENT), "starts from version 0, the ranks are at 1"),
        (lambda it: it.execute("meanwhile"), "a migration is running"),
        (lambda it: it.see(500_000, seed=10), r"the accesses have moved on since it was made: drift \d"),
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
    assert [gate.gate for gate in seen.closed_gates] == ["samples"]
    with pytest.raises(PlanError, match="the profile is thin"):
        it.planning.apply(seen.plan.plan_id, ANN)
    _, execution = it.planning.apply(seen.plan.plan_id, ANN, force=True)
    assert execution.record.overridden_gates == ("samples",)
    assert it.planning.overridden == {"samples": 1}
    it.coordinator.execute(execution)
    assert execution.record.requested_by == "ann@host"


def profile(**changes: Any) -> Profile:
    share = np.array([0.54, 0.36])
    table = TableProfile(
        "item", 10, 100.0, 10.0, np.array([1, 2]), share, np.empty(0), np.empty(0), 2.0, (share - 0.1, share + 0.1)
    )
    return replace(Profile((table,), lag_messages=5, samples=1000), **changes)


OPEN = {
    "min_samples": 1000, "min_coverage": 0.9, "max_lag_messages": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("closed", "bound", "said"),
    [
        ("samples", {"min_samples": 1001}, "1000 accesses seen"), ("coverage", {"min_coverage": 0.91}, "explains 90%"),
        ("lag", {"max_lag_messages": 4}, "5 messages"),
    ],
)  # fmt: skip
def test_each_gate_closes_by_its_own_key(closed: str, bound: dict[str, float], said: str) -> None:
    require_open(evaluate_gates(profile(), PlannerConfig(**OPEN)))
    checked = evaluate_gates(profile(), PlannerConfig(**{**OPEN, **bound}))
    assert [gate.gate for gate in checked if not gate.open] == [closed]
    with pytest.raises(PlanError, match=said) as error:
        require_open(checked)
    key = next(gate.key for gate in checked if not gate.open)
    assert key == f"planner.{next(iter(bound))}"
    assert key in error.value.message
    assert key in error.value.remedy


def test_tables_count_by_their_accesses_in_coverage() -> None:
    (table,) = profile().tables
    exact = replace(table, table="exact", weight=900.0, hot_share=np.array([0.3, 0.2]), hot_bounds=None)
    gates = evaluate_gates(profile(tables=(table, exact)), PlannerConfig(**OPEN))
    assert {gate.gate: gate.measured for gate in gates}["coverage"] == pytest.approx(0.54)


MUCH = {"seconds": 1.0, "share": 0.0}


def test_a_daemon_does_not_migrate_a_few_rows_up_and_down_at_every_interval(tmp_path: Path) -> None:
    """Noise of the counts makes some rows look better elsewhere in every plan, for nanoseconds."""
    moves = {}
    for name, seconds in (("any", 0.0), ("some", 1e-7)):
        it = filled_harness(tmp_path, min_saving={"seconds": seconds, "share": 0.0}, horizon_steps=1e9)
        said: list[tuple[str, ...]] = []
        it.planning._on_withheld = lambda *reason, said=said: said.append(reason)
        drift = SimpleNamespace(pop_reason=lambda: None)
        auto = AutoPlanner(it.config.planner, it.planning, drift, it.coordinator.live)
        # Equally distributed look-ups arrive between plans, and every migration succeeds.
        for number in range(1, 9):
            before = len(it.coordinator.migrations)
            auto.triggers._next_plan_at = 0.0
            auto.tick()
            for migration in it.coordinator.migrations[before:]:
                it.coordinator.execute(migration)
            it.see(20_000, draw=number)
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
    assert execution.record.overridden_gates == ("saving",)
    assert it.planning.overridden == {"saving": 1}


def test_the_saving_counts_as_a_share_of_the_measured_step(tmp_path: Path) -> None:
    it = filled_harness(tmp_path)
    proposal = it.propose("look", dry_run=True)
    plan, report = proposal.plan, proposal_report(proposal)
    share = plan.saved_seconds / 0.1
    saved = plan.costs.before.exposed_seconds - plan.costs.after.exposed_seconds
    assert report.saved_seconds == plan.saved_seconds == saved > 0
    assert (plan.step_seconds, report.saved_share) == (pytest.approx(0.1), pytest.approx(share))
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
    it.coordinator.execute(first)
    settings = {**it.config.planner.model_dump(), "min_saving": MUCH}
    it.planning.apply_config(it.config.model_validate({**it.config.model_dump(), "planner": {**settings, **changed}}))
    plan, execution = it.execute("second")
    assert not plan.live_fits
    it.coordinator.execute(execution)
    plan, execution = it.execute("third")
    assert plan.live_fits
    assert execution is None
