"""The daemon changes home rules: planned from what it has seen, moved by a migration, shown, and taken back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.api.placement import PlacementStatus, placement_status
from flexd.api.planning import planning_status
from flexd.api.status import Status
from flexd.cli.plan_view import planning_block
from flexd.cli.status_command import _placement
from flexd.config.load import parse_config
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase
from flexd.core.answers import NO_ANSWERS
from flexd.core.home_block import NO_CHANGES, ChangedRule, ChangedRules
from flexd.core.home_rules import HomeRule
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.executions import Executions
from flexd.operations.live_kernels import LiveKernels
from flexd.operations.plan_log import PlanLog
from flexd.operations.planning import Planning
from flexd.operations.rule_changes import live_homes, live_keyspace
from flexd.operations.triggers import Trigger, TriggerKind
from flexd.sketch.sketch_set import SketchSet
from tests.operations.test_autoplan import QuietDrift
from tests.support.kernel_sets import measured
from tests.support.planning_harness import PlanningHarness
from tests.support.until import until

TABLES = {"a": 900, "b": 1_100, "c": 1_000, "d": 700}
POOLED = dict.fromkeys(TABLES, "sums")
TRIGGER = Trigger(TriggerKind.INTERVAL, "interval")


def harness_of(
    directory: Path,
    *,
    spare: int = 8_000,
    kernels: LiveKernels | None = None,
    answers: bool = False,
    per_rank: int = 200_000,
    **planner: Any,
) -> PlanningHarness:
    """Return a harness with four pooled tables of 2 x 2 ranks, whose bags have 20 ids.

    Args:
        answers: the ranks' release can change them.
        per_rank: look-ups a step.
    """
    harness = PlanningHarness(directory)
    harness.prices.kernels = kernels
    document = {
        "job": "j",
        "tables": [{"name": name, "rows": rows, "dim": 64} for name, rows in TABLES.items()],
        "stream": {"source": {"kind": "synthetic"}},
        "control": {"chunk_rows": 16, "chunk_bytes": 4_096},
        "planner": {
            "min_saving": {"seconds": 0.0, "share": 0.0}, "min_samples": 1_000, "min_coverage": 0.5,
            "horizon_steps": 1_000_000_000, "change_home_rules": True, "pooled_tables": POOLED, **planner,
        },
    }  # fmt: skip
    harness.config = parse_config(document)
    keyspace = harness.config.keyspace()
    harness.sketches = SketchSet(keyspace.tables, half_life_seconds=None)
    assert harness.coordinator.topology is not None
    harness.coordinator.topology = replace(
        harness.coordinator.topology, spare_home_slots=(spare,), changes_answers=answers
    )
    executions = Executions(harness.config.control, keyspace, harness.coordinator, PlanLog(harness.log_path))  # type: ignore[arg-type]
    harness.planning = Planning(
        harness.config, keyspace, harness.prices, harness._make_profile, harness.coordinator,  # type: ignore[arg-type]
        harness.training, executions, bag_lengths=harness.sketches.sequence_length_quantiles,
    )  # fmt: skip
    for name in TABLES:
        see(harness, name, 20_000)
    harness.report(per_rank)
    return harness


def _live(harness: PlanningHarness) -> LiveTopology:
    assert harness.coordinator.topology is not None
    return harness.coordinator.topology


def _placement_of(status: PlacementStatus) -> tuple[tuple[str, str], ...]:
    return _placement(Status.model_construct(placement=status)).pairs


def see(harness: PlanningHarness, table: str, accesses: int) -> None:
    rng = np.random.default_rng(len(table))
    rows = (rng.zipf(1.3, accesses) - 1) % TABLES[table]
    harness.sketches.ingest(table, rows, 0, 1.0, np.full(accesses // 20, 20))


def change(harness: PlanningHarness) -> Placement:
    """Let the daemon change rules, and carry the migration out."""
    started = harness.planning.change_rules(TRIGGER)
    assert started is not None, harness.planning.rules.outcome
    assert harness.planning.rules.running
    harness.coordinator.execute(started.migration, chunks=100_000)
    assert not harness.planning.rules.running
    return harness.coordinator.now


def test_rules_change_by_a_migration_that_is_shown_logged_and_taken_back(tmp_path: Path) -> None:
    harness = harness_of(tmp_path)
    keyspace = harness.config.keyspace()
    keys = np.array([3, 2_500], dtype=np.int64)
    harness.coordinator.now = Placement.of(keys, np.full(2, Tier.NODE, np.uint8))
    before = harness.coordinator.now
    after = change(harness)
    assert after.homes.tables
    changed = {one.table for one in after.homes.tables}
    assert not np.isin(keyspace.table_of(after.keys), list(changed)).any(), "copies came home before"
    shown = placement_status(after, keyspace, 0).home_rules
    assert shown == {keyspace.tables[one.table].name: str(one.upper) for one in after.homes.tables}
    entry = harness.planning.executions._log.newest
    assert entry is not None
    assert "becomes" in str(entry["reason"])
    assert str(entry["plan_id"])
    assert harness.planning.change_rules(TRIGGER) is None
    assert harness.planning.rules.outcome.startswith("rules stay")
    back = harness.planning.executions.start_rollback("r", "p", lambda: before, 1, TRIGGER, _live(harness))
    harness.coordinator.execute(back.migration, chunks=100_000)
    assert harness.coordinator.now.digest() == before.digest()


def test_answers_change_alone_where_rows_cannot_move_and_are_shown_and_taken_back(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, spare=0, answers=True, per_rank=400, pooled_tables=dict.fromkeys(TABLES, "rows"))
    keyspace = harness.config.keyspace()
    keys = np.arange(0, 3_700, 50)
    before = harness.coordinator.now = Placement.of(keys, np.full(len(keys), Tier.NODE, np.uint8))
    after = change(harness)
    assert after.homes == NO_CHANGES
    assert after.answers.sums
    assert after.answers.rows == ()
    by_sums = np.isin(keyspace.table_of(keys), after.answers.sums)
    np.testing.assert_array_equal(after.keys, keys[~by_sums])
    status = placement_status(after, keyspace, 0)
    assert status.answers == {keyspace.tables[table].name: "sums" for table in after.answers.sums}
    samples = {s.labels.get("change"): s.value for family in status.metrics() for s in family.samples}
    assert samples["answer"] == len(status.answers) > 0 == samples["home_rule"]
    assert {(f"answer of {name}", "sums") for name in status.answers} <= set(_placement_of(status))
    entry = harness.planning.executions._log.newest
    assert entry is not None
    assert "answers by sums" in str(entry["reason"])
    assert {name for name, answer in harness.planning._settings.pooled_tables.items() if answer == "sums"} == set(
        status.answers
    )
    again = harness.propose("copies", force=True).plan
    assert not np.isin(keyspace.table_of(again.target.keys), after.answers.sums).any(), "sums use no copies"
    assert harness.planning.change_rules(TRIGGER) is None
    back = harness.planning.executions.start_rollback("r", "p", lambda: before, 1, TRIGGER, _live(harness))
    harness.coordinator.execute(back.migration, chunks=100_000)
    assert harness.coordinator.now.digest() == before.digest()


def test_rules_and_answers_change_in_one_migration_each_answer_after_its_rule(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, answers=True, per_rank=400, pooled_tables=dict.fromkeys(TABLES, "rows"))
    started = harness.planning.change_rules(TRIGGER)
    assert started is not None
    assert ", answers by sums" in harness.planning.rules.outcome
    migration, now, both = started.migration, harness.coordinator.now, 0
    migration.begin(now)
    while (delta := migration.next_chunk()) is not None:
        now = now.apply(delta)
        if delta.answers is not None:
            changed = [one for one in now.homes.tables if one.table in delta.answers.sums]
            assert all(one.lower is None for one in changed), "the answer was chosen for the new rule"
            both += len(changed)
    assert both
    assert migration.progress.rows == sum(one.rows for one in now.homes.tables) + len(now.answers)
    planned = harness.planning.rules.planned
    assert planned is not None
    assert (now.homes, now.answers) == (planned.target.homes, planned.target.answers)


def test_ranks_of_an_older_release_and_named_tables_keep_their_answers(tmp_path: Path) -> None:
    rows = dict.fromkeys(TABLES, "rows")
    old = harness_of(tmp_path, per_rank=400, pooled_tables=rows)
    old.planning.change_rules(TRIGGER)
    assert old.planning.rules.planned is not None
    assert old.planning.rules.planned.changes.answers == NO_ANSWERS
    pinned = [{"table": "a", "tier": "NODE", "rows": [1]}]
    given: Any = {"spare": 0, "answers": True, "per_rank": 400, "pooled_tables": rows}
    named = harness_of(tmp_path, **given, exclude_tables=["b"], pins=pinned)
    assert set(change(named).answers.sums) == {2, 3}


def test_rules_stay_unless_they_are_allowed_to_change_and_can(tmp_path: Path) -> None:
    off = harness_of(tmp_path, change_home_rules=False)
    assert off.planning.change_rules(TRIGGER) is None
    assert off.planning.rules.outcome == ""
    old = harness_of(tmp_path)
    for told in ({"spare_home_slots": (0,)}, {"changes_rules": False}):
        topology = replace(_live(old), changes_answers=False, **told)
        assert not old.planning.rules.allowed(old.config.planner, topology)
        old.coordinator.topology = topology
        assert old.planning.change_rules(TRIGGER) is None
    dear = harness_of(tmp_path, min_saving={"seconds": 10.0, "share": 0.0})
    assert dear.planning.change_rules(TRIGGER) is None
    assert "rules stay: others would save" in dear.planning.rules.outcome
    fixed = harness_of(tmp_path, exclude_tables=list(TABLES))
    assert fixed.planning.change_rules(TRIGGER) is None


def test_a_table_whose_traffic_grows_tenfold_moves_and_the_busiest_rank_is_near_a_plan_from_scratch(
    tmp_path: Path,
) -> None:
    harness = harness_of(tmp_path)
    change(harness)
    for name in TABLES:
        see(harness, name, 0 if name != "d" else 180_000)
    planning, topology = harness.planning, harness.planning.live_topology()
    profile = harness.sketches.profile(800_000, 1)
    settings = planning._settings
    live = planning.rules.plan(profile, topology, planning.cluster, harness.coordinator.now, settings)
    scratch = planning.rules.plan(profile, topology, planning.cluster, Placement.empty(), settings)
    assert live.changes.seconds <= 1.05 * scratch.changes.seconds
    assert live.changes.live_seconds > live.changes.seconds
    change(harness)


def test_plans_of_copies_know_the_rules_of_now(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, pooled_tables={})
    keyspace, layout = harness.config.keyspace(), RankLayout(2, 2)
    changed = ChangedRules(
        (
            ChangedRule(0, 900, HomeRule(), HomeRule("rank", 3)),
            ChangedRule(1, 1_100, HomeRule(), HomeRule(), HomeRule("node", 1), 600),
        )
    )
    assert [table.homes for table in live_keyspace(keyspace, changed).tables] == ["rank:3", "node:1", "all", "all"]
    assert live_keyspace(keyspace, NO_CHANGES) is keyspace
    topology = harness.coordinator.topology
    assert topology is not None
    homes = live_homes(keyspace, topology, changed)
    assert (str(homes.rules[0]), homes.boundary(1)) == ("rank:3", 600)
    rows = np.arange(1_100, dtype=np.int64)
    one = changed.of_table(1)
    assert one is not None
    np.testing.assert_array_equal(one.home_ranks(layout, rows, rows + 900), homes.home_rank(rows + 900))
    harness.coordinator.now = Placement.of(np.empty(0, np.int64), np.empty(0, np.uint8), 0, changed)
    plan = harness.propose("copies", force=True).plan
    assert not np.isin(keyspace.table_of(plan.target.keys), [0, 1]).any()
    assert len(plan.target.keys)


def test_the_daemon_changes_rules_before_it_plans_copies_and_waits_for_them(tmp_path: Path) -> None:
    harness = harness_of(
        tmp_path, pooled_tables={"a": "sums", "b": "sums"}, interval_seconds=0.2, min_spacing_seconds=0.0
    )
    drift = QuietDrift()
    daemon = AutoPlanner(harness.config.planner, harness.planning, drift, harness.coordinator.live)  # type: ignore[arg-type]
    daemon.tick()
    (rules,) = harness.coordinator.migrations
    status = planning_status(harness.planning, daemon)
    assert status.home_rules == harness.planning.rules.outcome
    assert ("home rules", status.home_rules) in planning_block(status).pairs
    assert rules.migration_id.endswith("-rules")
    assert "becomes" in rules.metadata.reason
    drift.reason = "drift"
    time.sleep(0.3)
    daemon.tick()
    assert harness.coordinator.migrations == [rules], "a plan of copies would stop it half-way"
    harness.coordinator.execute(rules, chunks=100_000)
    until(lambda: daemon.tick() or len(harness.coordinator.migrations) > 1, 10)
    copies = harness.coordinator.migrations[1]
    assert not copies.migration_id.endswith("-rules")
    harness.coordinator.execute(copies, chunks=100_000)
    now = harness.coordinator.now
    assert now.homes.tables
    listed = harness.config.keyspace().table_of(now.keys)
    assert len(listed)
    assert not np.isin(listed, [one.table for one in now.homes.tables]).any()


def test_rules_are_planned_by_learned_costs_of_a_file(tmp_path: Path) -> None:
    """Two ms a table and rank: a table on one rank costs one of them, a spread table all."""

    def law(work: np.ndarray) -> np.ndarray:
        return 2e-3 * work[:, 0]

    kernels = LiveKernels(measured(law))
    by_costs, by_bytes = harness_of(tmp_path, kernels=kernels), harness_of(tmp_path)
    for harness in (by_costs, by_bytes):
        change(harness)
    planned = [harness.planning.rules.planned for harness in (by_costs, by_bytes)]
    assert planned[0] is not None
    assert planned[1] is not None
    assert planned[1].changes.live_seconds < 1e-3 < 15e-3 < planned[0].changes.live_seconds
    assert planned[0].changes.seconds < 7e-3
    harness = by_costs
    assert kernels._expected is None, "rules have changed since"
    assert harness.planning.change_rules(TRIGGER) is None
    again = harness.planning.rules.planned
    assert again is not None
    np.testing.assert_array_equal(kernels._expected, again.changes.live_kernel_seconds)
    assert again.changes.live_seconds == pytest.approx(float(kernels._expected.max(axis=0).sum()), rel=0.1)
    slower = kernels._expected * 3.0
    values = np.zeros((4, len(StepPhase), len(PHASE_QUANTITIES)))
    values[:, [1, 5], 0] = slower
    for _ in range(30):
        kernels.learn(values)
    assert harness.planning.change_rules(TRIGGER) is None
    corrected = harness.planning.rules.planned
    assert corrected is not None
    assert corrected.changes.live_seconds == pytest.approx(3 * again.changes.live_seconds, rel=0.1)
    np.testing.assert_allclose(kernels._expected, again.changes.live_kernel_seconds, err_msg="without the factors")
    assert kernels.costs(corrected=False) is kernels.costs(corrected=False), "learned once"
