"""Drift as regret: when it is evaluated, and one trigger for one drift."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexd.config.model import Config, parse_config
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.protocol.report import TrainerSettings
from flexd.core.placement import Placement, RankLayout
from flexd.daemon import Daemon
from flexd.operations.autoplan import DriftMonitor
from flexd.planner.drift import LIVE
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from flexd.topology.files import load_preset, scale_model
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.planning_harness import ANY_SAVING, ROWS, PlanningHarness
from tests.support.until import until

PER_STEP = 40_000.0
CLUSTER = scale_model(load_preset("azure-a100-200g"), 1e6)


def config_of(directory: Path, **planner: Any) -> Any:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": ROWS, "dim": 64}],
            "stream": {"source": {"kind": "file_log", "path": str(directory / "log")}, "poll_seconds": 0.02},
            "sketch": {"memory_bytes": 2**22, "half_life_seconds": 5.0},
            "control": {"listen_port": 0},
            "server": {"port": 0},
            "state": {"dir": str(directory / "state"), "snapshot_interval_seconds": 3600.0},
            "planner": {
                "min_samples": 1_000, "horizon_steps": 1e9, "batch_accesses_per_step": PER_STEP,
                "drift_threshold": 1.03, "interval_seconds": 3600.0, "min_saving": ANY_SAVING,
                "verify_budget_steps": 0, **planner,
            },
        }
    )  # fmt: skip


def accesses(count: int, moved: int, seed: int, exponent: float = 1.2) -> np.ndarray:
    weights = np.arange(1, ROWS + 1) ** -exponent
    rows = np.random.default_rng(seed).choice(ROWS, count, p=weights / weights.sum())
    return np.random.default_rng(99).permutation(ROWS)[(rows + moved) % ROWS].astype(np.int64)


class DriftHarness(PlanningHarness):
    """A monitor over counters that the test feeds; ``carry_out`` makes a plan and carries it out."""

    def __init__(self, directory: Path, **planner: Any) -> None:
        super().__init__(
            directory, batch_accesses_per_step=PER_STEP, drift_threshold=1.03, min_coverage=0.0, horizon_steps=1e9,
            **planner,
        )  # fmt: skip
        self.sketches = SketchSet(self.config.keyspace().tables, SketchSettings(half_life_seconds=5.0))
        self.migrating = SimpleNamespace(migrating=False)
        self.clock = 0.0
        self.monitor = DriftMonitor(self.planning.maker, self.coordinator, self.migrating)  # type: ignore[arg-type]

    def see(self, moved: int = 0, seconds: int = 30, exponent: float = 1.2) -> None:  # type: ignore[override]
        for _ in range(seconds):
            self.clock += 1
            self.sketches.ingest("item", accesses(20_000, moved, int(self.clock), exponent), 0, self.clock)

    def carry_out(self) -> Placement:
        self.coordinator.execute(self.planning.execute(self.propose("now"), force=True))
        self.monitor.planned()
        return self.coordinator.now


@pytest.fixture
def harness(tmp_path: Path) -> DriftHarness:
    made = DriftHarness(tmp_path)
    made.see()
    return made


def test_a_steady_stream_never_triggers_and_a_moved_one_triggers_once(harness: DriftHarness) -> None:
    assert len(harness.carry_out()) > 100
    for _ in range(5):
        harness.see(seconds=5)
        assert harness.monitor.evaluate().ratio == pytest.approx(1.0, abs=0.01)
        assert harness.monitor.pop_reason() is None
    harness.see(moved=700)
    drift = harness.monitor.evaluate()
    assert drift.ratio > 1.03
    assert harness.monitor.pop_reason() == f"drift {drift.ratio:.2f} > 1.03 (table item)"
    assert harness.monitor.pop_reason() is None, "once for each look"
    harness.carry_out()
    assert harness.monitor.newest is None, "what was seen of the old placement is over"
    for _ in range(3):
        harness.see(moved=700, seconds=5)
        assert harness.monitor.evaluate().ratio < 1.02
        assert harness.monitor.pop_reason() is None


def test_a_flatter_popularity_that_no_plan_serves_better_is_no_drift(harness: DriftHarness) -> None:
    """The live placement costs a third more than when it was planned, and still is the best there is."""
    placement = harness.carry_out()
    before = harness.monitor.evaluate()
    harness.see(exponent=0.9, seconds=60)
    drift = harness.monitor.evaluate()
    assert drift.exposed_seconds[LIVE] > 1.2 * before.exposed_seconds[LIVE]
    assert len(placement) > 100
    assert drift.ratio < 1.03
    assert harness.monitor.pop_reason() is None


def test_a_plan_that_would_be_withheld_is_no_reason(tmp_path: Path) -> None:
    harness = DriftHarness(tmp_path, min_saving={"seconds": 1.0, "share": 0.0})
    harness.see()
    harness.carry_out()
    harness.see(moved=700)
    assert harness.monitor.evaluate().ratio > 1.03
    assert harness.monitor.pop_reason() is None


def test_a_migration_that_began_while_it_was_priced_is_not_judged(harness: DriftHarness) -> None:
    harness.carry_out()
    harness.see(moved=700)
    profile = harness.profile
    harness.profile = lambda per_step: (setattr(harness.migrating, "migrating", True), profile(per_step))[1]
    assert harness.monitor.evaluate() is None
    assert (harness.monitor.pop_reason(), harness.monitor.newest) == (None, None)
    harness.profile, harness.migrating.migrating = profile, False
    assert harness.monitor.evaluate() is not None
    harness.coordinator.now = replace(harness.coordinator.now, version=harness.coordinator.now.version + 1)
    assert harness.monitor.pop_reason() is None, "it is a reason to leave another placement"


def test_a_slow_evaluation_delays_the_next_one(harness: DriftHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, interval = harness.monitor, harness.config.planner.drift_interval_seconds
    now = monitor._next_at

    def evaluate() -> None:
        nonlocal now
        now += 0.1 if monitor.evaluations else 60.0

    monkeypatch.setattr("flexd.operations.autoplan.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(monitor, "evaluate", evaluate)
    for wait in (20_000.0, interval):
        monitor.tick()
        monitor.tick()
        assert monitor._next_at == pytest.approx(now + wait), "once, and not before its time"
        now = monitor._next_at
    assert interval > 10.0
    assert (monitor.seconds, monitor.evaluations) == (pytest.approx(60.1), 2)


def test_drift_is_not_evaluated_without_ranks_during_a_migration_or_with_few_accesses(tmp_path: Path) -> None:
    harness = DriftHarness(tmp_path)
    harness.sketches.ingest("item", np.zeros(999, dtype=np.int64), 0, 1.0)
    assert harness.monitor.evaluate() is None
    harness.sketches.ingest("item", np.zeros(1, dtype=np.int64), 0, 1.0)
    assert harness.monitor.evaluate() is not None, "a thousand are enough"
    harness.see()
    harness.carry_out()
    profiles = len(harness.profiles)
    harness.migrating.migrating = True
    assert harness.monitor.evaluate() is None
    harness.migrating.migrating = False
    for topology in (None, LiveTopology(1, "a", RankLayout(2, 2), (200,), False, "settling")):
        harness.coordinator.topology = topology
        assert harness.monitor.evaluate() is None
    assert len(harness.profiles) == profiles, "a profile is expensive: none is made for nothing"


def test_the_job_is_priced_with_its_training_settings(tmp_path: Path) -> None:
    prices = []
    for passes, trainer in ((1, None), (4, None), (1, TrainerSettings("direct"))):
        harness = DriftHarness(tmp_path)
        harness.training.passes_per_step = lambda passes=passes: passes
        harness.coordinator.topology = replace(harness.coordinator.topology, trainer=trainer)
        harness.see()
        prices.append(harness.monitor.evaluate().exposed_seconds[LIVE])
    assert len(set(prices)) == len(prices)


def test_a_live_daemon_plans_once_for_a_stream_that_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From messages in a file log to the reason of the plan in one process; only the ranks are fake."""
    coordinator = FakeCoordinator(obedient=True)
    monkeypatch.setattr("flexd.daemon.components.Coordinator", lambda *_, **__: coordinator)
    monkeypatch.setattr(Config, "cluster", lambda self: CLUSTER)
    monkeypatch.setattr("flexd.operations.autoplan.MAX_DUTY_CYCLE", 1.0)
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

    def look_on() -> int:
        """Let drift be evaluated some times more, and return the number of migrations."""
        looks = daemon.components.drift.evaluations
        until(lambda: daemon.components.drift.evaluations > looks + 8)
        return len(coordinator.migrations)

    try:
        until(lambda: len(coordinator.migrations) == 1 and daemon.status().stream.messages == 30)
        assert look_on() == 1, "a steady stream asks for nothing"
        send(700, 60)
        until(lambda: len(coordinator.migrations) >= 2 and daemon.status().stream.messages == 90)
        daemon.renew_status()
        plan = daemon.status().last_plan
        assert plan.reason.startswith("drift 1.")
        assert plan.reason.endswith("> 1.03 (table item)")
        # Planning may have begun while messages were still arriving; once all are in, at most one more follows.
        settled = look_on()
        assert settled <= 4
        assert look_on() == settled, "no flapping"
        daemon.renew_status()
        status = daemon.status()
        assert status.drift.ratio <= 1.03, "what came in after the plan may have made it better than planned"
        assert [table.table for table in status.drift.tables] == ["item"]
        assert status.sketch.tables[0].affinity is not None
    finally:
        daemon.request_stop()
        loop.join(30)
        sink.close()
