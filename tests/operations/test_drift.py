"""Drift as regret: when it is evaluated, and one trigger for one drift."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.trainer_settings import TrainerSettings
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.daemon import Daemon
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.drift_harness import CLUSTER, DriftHarness, accesses, config_of
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.until import until


@pytest.fixture
def harness(tmp_path: Path) -> DriftHarness:
    made = DriftHarness(tmp_path)
    made.see()
    return made


def test_a_steady_stream_never_triggers_and_a_moved_one_triggers_once(harness: DriftHarness) -> None:
    assert len(harness.execute()) > 100
    for _ in range(5):
        harness.see(seconds=5)
        drift = harness.monitor.evaluate()
        assert drift is not None
        assert drift.ratio == pytest.approx(1.0, abs=0.01)
        assert harness.monitor.pop_reason() is None
    harness.see(moved=700)
    drift = harness.monitor.evaluate()
    assert drift is not None
    assert drift.ratio > 1.03
    assert harness.monitor.pop_reason() == f"drift {drift.ratio:.2f} > 1.03 (table item)"
    assert harness.monitor.pop_reason() is None, "once for each look"
    harness.execute()
    assert harness.monitor.newest is None, "what was seen of the old placement is over"
    for _ in range(3):
        harness.see(moved=700, seconds=5)
        drift = harness.monitor.evaluate()
        assert drift is not None
        assert drift.ratio < 1.02
        assert harness.monitor.pop_reason() is None


def test_a_flatter_popularity_that_no_plan_serves_better_is_no_drift(harness: DriftHarness) -> None:
    """The live placement costs a third more than when it was planned, and still is the best there is."""
    placement = harness.execute()
    before = harness.monitor.evaluate()
    harness.see(exponent=0.9, seconds=60)
    drift = harness.monitor.evaluate()
    assert before is not None
    assert drift is not None
    assert drift.live.total.exposed_seconds > 1.2 * before.live.total.exposed_seconds
    assert len(placement) > 100
    assert drift.ratio < 1.03
    assert harness.monitor.pop_reason() is None


def test_a_wholly_replaced_hot_set_is_drift_though_the_price_of_the_placement_hardly_changes(tmp_path: Path) -> None:
    """Copies that save little: their loss hardly shows in the price, and their replacements are worth a plan."""
    harness = DriftHarness(tmp_path, drift_threshold=1.01)
    live = harness.coordinator.topology
    assert live is not None
    harness.coordinator.topology = replace(live, replica_slots=(20,))
    harness.see()
    assert len(harness.execute()) == 80
    before = harness.monitor.evaluate()
    harness.see(moved=2_000, seconds=60)
    drift = harness.monitor.evaluate()
    assert before is not None
    assert drift is not None
    assert before.ratio == pytest.approx(1.0, abs=0.002)
    assert drift.live.total.exposed_seconds < 1.03 * before.live.total.exposed_seconds
    assert drift.ratio > 1.01
    assert (harness.monitor.pop_reason() or "").startswith("drift ")


def test_a_plan_that_would_be_withheld_is_no_reason(tmp_path: Path) -> None:
    harness = DriftHarness(tmp_path, min_saving={"seconds": 1.0, "share": 0.0})
    harness.see()
    harness.execute()
    harness.see(moved=700)
    drift = harness.monitor.evaluate()
    assert drift is not None
    assert drift.ratio > 1.03
    assert harness.monitor.pop_reason() is None


def test_a_migration_that_began_while_it_was_priced_is_not_judged(harness: DriftHarness) -> None:
    harness.execute()
    harness.see(moved=700)
    harness.during = lambda: setattr(harness.executions, "migrating", True)
    assert harness.monitor.evaluate() is None
    assert (harness.monitor.pop_reason(), harness.monitor.newest) == (None, None)


def test_a_slow_evaluation_delays_the_next_one(harness: DriftHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return len(waits) > 2

    def evaluate() -> None:
        now[0] += (60.0, 0.1)[len(waits) - 1]

    monkeypatch.setattr("flexd.operations.drift.time", SimpleNamespace(monotonic=lambda: now[0]))
    harness.monitor._stop = Stop()
    harness.monitor.evaluate = evaluate  # type: ignore[method-assign]
    harness.monitor._run()
    interval = harness.config.planner.drift_interval_seconds
    assert interval > 10.0
    assert waits == [interval, pytest.approx(20000.0), interval]
    assert (harness.monitor.seconds, harness.monitor.evaluations) == (pytest.approx(60.1), 2)


def test_drift_is_not_evaluated_without_ranks_during_a_migration_or_with_few_accesses(tmp_path: Path) -> None:
    harness = DriftHarness(tmp_path)
    harness.sketches.ingest("item", np.zeros(999, dtype=np.int64), 0, 1.0)
    assert harness.monitor.evaluate() is None
    harness.sketches.ingest("item", np.zeros(1, dtype=np.int64), 0, 1.0)
    assert harness.monitor.evaluate() is not None, "a thousand are enough"
    harness.see()
    harness.execute()
    profiles = len(harness.profile_rates)
    harness.executions.migrating = True
    assert harness.monitor.evaluate() is None
    harness.executions.migrating = False
    for topology in (None, LiveTopology(1, "a", RankLayout(2, 2), (200,), False, "settling")):
        harness.coordinator.topology = topology
        assert harness.monitor.evaluate() is None
    assert len(harness.profile_rates) == profiles, "a profile is expensive: none is made for nothing"


def test_half_a_plan_after_an_aborted_migration_is_drift(tmp_path: Path) -> None:
    harness = DriftHarness(tmp_path, drift_threshold=1.01)
    harness.see()
    target = harness.plan()
    harness.coordinator.now = Placement.of(target.keys[::2], target.tiers[::2], 1)
    drift = harness.monitor.evaluate()
    assert drift is not None
    assert drift.ratio > 1.01
    assert harness.monitor.pop_reason() is not None


def test_the_job_is_priced_with_its_training_settings(tmp_path: Path) -> None:
    prices = []
    for passes, trainer in ((1, None), (4, None), (1, TrainerSettings("direct"))):
        harness = DriftHarness(tmp_path)
        harness.training.passes_per_step = lambda passes=passes: passes
        assert harness.coordinator.topology is not None
        harness.coordinator.topology = replace(harness.coordinator.topology, trainer=trainer)
        harness.see()
        drift = harness.monitor.evaluate()
        assert drift is not None
        prices.append(drift.live.total.exposed_seconds)
    assert len(set(prices)) == len(prices)


def test_a_live_daemon_plans_once_for_a_stream_that_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From messages in a file log to the reason of the plan in one process; only the ranks are fake."""
    coordinator = FakeCoordinator(obedient=True)
    monkeypatch.setattr("flexd.daemon.service.Coordinator", lambda *_, **__: coordinator)
    monkeypatch.setattr("flexd.daemon.factory.make_cluster", lambda config: CLUSTER)
    monkeypatch.setattr("flexd.operations.drift.MAX_DUTY_CYCLE", 1.0)
    sink = FileLogSink(tmp_path / "log", "p0", flush_seconds=0.0)
    clock = 0.0

    def send(moved: int, seconds: int = 30) -> None:
        nonlocal clock
        for _ in range(seconds):
            clock += 1
            sink.send(encode_arrow([AccessBatch("item", accesses(20_000, moved, int(clock)), 1, clock)]))
        sink.flush()

    send(0)
    daemon = Daemon(config_of(tmp_path, drift_interval_seconds=0.05, min_spacing_seconds=0.0, min_samples=600_000))
    daemon.start()
    loop = threading.Thread(target=daemon.run_until_stopped, daemon=True)
    loop.start()
    try:
        until(lambda: len(coordinator.migrations) == 1)
        first = daemon.status().last_plan
        assert first is not None
        assert first.reason == "topology changed"
        send(0, 10)
        until(lambda: daemon.status().stream.messages == 40 and daemon.status().drift.ratio is not None)
        until(lambda looks=daemon._drift.evaluations: daemon._drift.evaluations > looks + 3)  # type: ignore[misc]
        assert len(coordinator.migrations) == 1, "a steady stream asks for nothing"
        assert daemon.status().drift.ratio == pytest.approx(1.0, abs=0.01)
        drift = daemon.status().drift
        assert drift.ratio == pytest.approx(1.0, abs=0.01)
        assert [table.table for table in drift.tables] == ["item"]

        send(700, 60)
        until(lambda: len(coordinator.migrations) >= 2)
        until(lambda: daemon.status().stream.messages == 100)
        second = daemon.status().last_plan
        assert second is not None
        assert second.reason.startswith("drift 1.")
        assert second.reason.endswith("> 1.03 (table item)")
        # Planning may have begun while messages were still arriving; once all are in, at most one more follows.
        until(lambda looks=daemon._drift.evaluations: daemon._drift.evaluations > looks + 8)  # type: ignore[misc]
        settled = len(coordinator.migrations)
        assert settled <= 4
        until(lambda looks=daemon._drift.evaluations: daemon._drift.evaluations > looks + 8)  # type: ignore[misc]
        assert len(coordinator.migrations) == settled, "no flapping"
        status = daemon.status()
        assert status.drift.ratio is not None
        assert status.drift.ratio <= 1.03, "what came in after the plan may have made it better than planned"
        assert status.sketch.tables[0].affinity is not None
    finally:
        daemon.request_stop()
        loop.join(30)
        sink.close()
    assert not loop.is_alive()
    assert daemon._ingestor.restored == {}
