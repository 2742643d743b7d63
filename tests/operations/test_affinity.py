"""Homes by affinity beside the daemon's plans: learnt with each plan, shown, carried out where allowed."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from flexd.api.handlers import PlanCommands
from flexd.api.plan import AffinityReport, explanation, proposal_report
from flexd.api.planning import placement_status
from flexd.cli.client_commands import plan_blocks
from flexd.cli.render import OutputFormat, blocks_of, emit
from flexd.core.errors import ApiError
from flexd.core.placement import RankLayout, nodes_of_rehomed
from flexd.core.supervision import Supervisor
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.verification import plan_kind
from flexd.sketch.coaccess import CoAccess
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings
from tests.support.planning_harness import ROWS, PlanningHarness

LENGTH, SAMPLES = 10, 50


def with_samples(directory: Path, batches: int = 20, **planner: float) -> PlanningHarness:
    """Return a harness whose sketches hold samples of ten groups of rows; a step has ``SAMPLES`` of them."""
    harness = PlanningHarness(directory, **planner)
    harness.see(50_000)
    keyspace = harness.config.keyspace()
    sketches = SketchSet(keyspace.tables, SketchSettings(half_life_seconds=None, coaccess_memory_bytes=1 << 20))
    random = np.random.default_rng(0)
    for batch in range(batches):
        group = random.integers(0, 10, SAMPLES)
        rows = (group[:, None] + 10 * random.integers(0, ROWS // 10, (SAMPLES, LENGTH))).reshape(-1)
        sketches.ingest(
            "item", rows, 0, float(batch), np.full(SAMPLES, LENGTH, np.int32), step=batch, user_ids=group + 100
        )
    harness.planning.affinity = AffinityMonitor(keyspace, sketches.coaccess, wait_seconds=60)
    harness.report(SAMPLES * LENGTH // 4)
    return harness


def test_a_plan_says_what_affinity_would_win_and_moves_nothing_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = with_samples(tmp_path)
    proposal = harness.propose("why not", dry_run=True)
    report = proposal_report(proposal)
    shown = report.affinity
    assert shown.dealing_loader is not None
    assert shown.loader.expected < 0.9
    assert proposal.affinity.forecast.rehomed_rows > 0
    assert shown == AffinityReport.model_validate(json.loads(shown.model_dump_json()))
    emit(report, plan_blocks(report), OutputFormat.TABLE)
    text = " ".join(capsys.readouterr().out.split())
    assert "With homes by affinity and a loader that deals" in text
    assert "planner.rehomed_slots_share lets the daemon move them" in text
    assert not len(proposal.plan.target.rehomed), "rows move where the configuration says so"
    families = {family.name: family for family in report.metrics()}
    shares = {sample.labels["dealing"]: sample.value for sample in families["flexd_affinity_bytes_ratio"].samples}
    assert shares["loader"] == pytest.approx(shown.loader.expected)
    assert set(proposal.plan.delta.keys) <= set(proposal.plan.target.keys) | set(proposal.live.keys)


def test_rows_move_where_they_may_stay_there_and_come_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = with_samples(tmp_path, rehomed_slots_share=0.5)
    plan, execution = harness.execute("first")
    harness.coordinator.execute(execution)
    live = harness.coordinator.placement()
    moved = live.rehomed
    assert 50 < len(moved) <= 4 * 100, "half of the slots"
    assert (RankLayout(2, 2).replica_slots_used(live.copies.keys, live.copies.tiers) <= 100).all()
    assert plan.moves_save_seconds > 0
    assert plan.saved_seconds == pytest.approx(
        plan.costs.before.exposed_seconds - plan.costs.after.exposed_seconds + plan.moves_save_seconds
    )
    assert "MOVED" in plan_kind(plan.delta)
    nodes = nodes_of_rehomed(moved.tiers)
    assert (nodes != RankLayout(2, 2).home_node(moved.keys)).all()
    status = placement_status(live, harness.config.keyspace(), 0)
    assert (status.rehomed_rows, sum(status.rows.values())) == (len(moved), ROWS)

    made, gates = harness.planning.explain("item", int(moved.keys[0]), 1)
    answer = explanation(made, gates)
    assert (answer.explained[0].home.moved_to, answer.live_rows["HOME"]) == (nodes[0], ROWS - len(live.copies))
    emit(answer, blocks_of(answer), OutputFormat.TABLE)
    assert f"moved to {nodes[0]}" in " ".join(capsys.readouterr().out.split())

    again = harness.propose("again").plan
    assert not np.isin(again.delta.keys, moved.keys).any(), "rows that have moved stay where they are"
    assert again.moves_save_seconds == 0

    harness.planning.affinity = None  # a daemon that has no sample yet
    assert np.array_equal(harness.propose("no sample").plan.target.rehomed.keys, moved.keys)

    made = harness.planning
    assert made.maker.basis().drift(live, live.copies).ratio == 1.0, "drift knows copies alone"

    off = {"rehomed_slots_share": 0, "min_saving": {"seconds": 1.0, "share": 0.9}}
    document = harness.config.model_dump() | {"planner": harness.config.planner.model_dump() | off}
    made.apply_config(type(harness.config).model_validate(document))
    _, execution = harness.execute("off")
    harness.coordinator.execute(execution)  # rows come home whatever that saves
    assert not len(harness.coordinator.placement().rehomed)


def test_a_plan_does_not_wait_for_a_long_learning_and_the_next_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = with_samples(tmp_path, rehomed_slots_share=0.5)
    sampled = harness.planning.affinity._coaccess
    may_end, supervisor, begun = threading.Event(), Supervisor(), []

    def slow() -> CoAccess | None:
        begun.append(len(begun))
        assert may_end.wait(60)
        return sampled()

    monitor = AffinityMonitor(harness.config.keyspace(), slow, supervisor, wait_seconds=0.01)
    harness.planning.affinity = monitor
    for _ in range(3):
        proposal = harness.propose("meanwhile")
        assert "are being learnt for the first time" in proposal_report(proposal).affinity.messages[0]
        assert not len(proposal.plan.target.rehomed)
    assert begun == [0], "one at a time"
    monitor._wait_seconds = 60
    may_end.set()
    moved = harness.propose("next").plan.target.rehomed
    assert len(moved) > 50

    # Homes learnt before rows moved say nothing of where they are to go now.
    may_end.clear()
    monitor._wait_seconds = 0.01
    _, execution = harness.execute("with those of before")
    harness.coordinator.execute(execution)
    assert np.array_equal(harness.coordinator.placement().rehomed.keys, moved.keys)
    after = harness.propose("while rows have moved")
    assert np.array_equal(after.plan.target.rehomed.keys, moved.keys)
    assert after.plan.moves_save_seconds == 0
    assert after.affinity.forecast.loader is not None, "what it would win is that of the newest"

    # One that fails is counted, and the next plan begins another.
    monitor._wait_seconds = 60
    may_end.set()
    harness.propose("ends")
    monitor._coaccess = lambda: 1 / 0
    harness.propose("fails")
    assert supervisor.faults()["flexd-affinity"] == 1
    assert monitor.outlook is not None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            harness.propose("no thread")
    monitor._coaccess = lambda: None
    assert harness.propose("no sample any more").affinity is None


def test_nodes_of_users_come_from_the_newest_homes(tmp_path: Path) -> None:
    harness = with_samples(tmp_path, rehomed_slots_share=0.5)
    commands = PlanCommands(
        harness.config.keyspace(), harness.planning, None, harness.coordinator, threading.Event(), None
    )
    with pytest.raises(ApiError, match="the node of no user is known"):
        commands.user_nodes(0, 10)
    shown = proposal_report(harness.propose("first")).affinity
    assert shown.by_user.expected < 0.9
    found = harness.planning.affinity.newest.plan
    page = commands.user_nodes(4, 3)
    assert (page.ids, page.users, page.nodes, page.learnt) == ((104, 105, 106), 10, 2, 1)
    assert (page.nodes_of, page.by_user) == (tuple(found.users.nodes_of[4:7].tolist()), shown.by_user)
    assert len(commands.user_nodes(0, 100).ids) == 10
    harness.propose("again")
    assert commands.user_nodes(0, 1).learnt == 2
