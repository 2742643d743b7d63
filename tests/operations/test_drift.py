"""When drift is looked at, against what, and that it asks for one plan and not for two."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.daemon import Daemon
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.drift_setting import CLUSTER, PER_STEP, ROWS, Setting, accesses, config_of
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.until import until


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    made = Setting(tmp_path)
    made.see()
    return made


def test_a_steady_stream_never_asks_and_a_moved_one_asks_once(setting: Setting) -> None:
    assert len(setting.execute()) > 100
    for _ in range(5):
        setting.see(seconds=5)
        drift = setting.monitor.evaluate()
        assert drift is not None
        assert drift.ratio == pytest.approx(1.0, abs=0.01)
        assert setting.monitor.pop_reason() is None
    setting.see(moved=700)
    drift = setting.monitor.evaluate()
    assert drift is not None
    assert drift.ratio > 1.03
    assert setting.monitor.pop_reason() == f"drift {drift.ratio:.2f} > 1.03 (table item)"
    assert setting.monitor.pop_reason() is None, "once for each look"
    setting.execute()
    assert setting.monitor.newest is None, "what was seen of the old placement is over"
    for _ in range(3):
        setting.see(moved=700, seconds=5)
        drift = setting.monitor.evaluate()
        assert drift is not None
        assert drift.ratio < 1.02
        assert setting.monitor.pop_reason() is None


def test_a_placement_that_moved_while_it_was_priced_is_not_judged(setting: Setting) -> None:
    setting.execute()
    setting.see(moved=700)

    def move() -> None:
        setting.coordinator.now = replace(setting.coordinator.now, version=setting.coordinator.now.version + 1)

    setting.during = move
    assert setting.monitor.evaluate() is None
    assert setting.monitor.pop_reason() is None
    setting.during = lambda: None
    assert setting.monitor.evaluate() is not None


def test_a_migration_that_began_while_it_was_priced_is_not_judged(setting: Setting) -> None:
    setting.execute()
    setting.see(moved=700)
    setting.during = lambda: setattr(setting.executions, "migrating", True)
    assert setting.monitor.evaluate() is None
    assert (setting.monitor.pop_reason(), setting.monitor.newest) == (None, None)


def test_nothing_is_priced_before_it_is_known_how_much_a_step_reads(setting: Setting) -> None:
    worlds: list[int] = []
    setting.training.accesses_per_step = worlds.append
    setting.monitor.apply_config(setting.config.planner.model_copy(update={"batch_accesses_per_step": None}))
    live = setting.coordinator.topology
    assert live is not None
    assert setting.monitor.evaluate() is None
    assert (setting.profile_rates, worlds, setting.monitor.reference_state()) == ([], [live.layout.world_size], {})


def test_how_old_the_newest_look_is(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr("flexd.operations.drift.time", SimpleNamespace(monotonic=lambda: now[0]))
    setting.execute()
    assert math.isnan(setting.monitor.age_seconds())
    assert setting.monitor.evaluate() is not None
    now[0] = 57.0
    assert setting.monitor.age_seconds() == 7.0


def test_a_profile_of_nothing_is_no_reference_although_nothing_is_demanded(tmp_path: Path) -> None:
    setting = Setting(tmp_path, min_samples=0)
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() == {}


def test_a_slow_look_puts_the_next_one_off(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return len(waits) > 2

    def evaluate() -> None:
        now[0] += (60.0, 1.0)[len(waits) - 1]

    monkeypatch.setattr("flexd.operations.drift.time", SimpleNamespace(monotonic=lambda: now[0]))
    setting.monitor._stop = Stop()
    setting.monitor.evaluate = evaluate  # type: ignore[method-assign]
    setting.monitor._run()
    interval = setting.config.planner.drift_interval_seconds
    assert interval > 10.0
    assert waits == [interval, pytest.approx(600.0), interval]
    assert (setting.monitor.seconds, setting.monitor.evaluations) == (61.0, 2)


def test_a_plan_that_changes_nothing_is_the_new_reference(setting: Setting) -> None:
    """Otherwise drift that a plan cannot mend would ask for one again and again."""
    setting.coordinator.topology = LiveTopology(1, "a", RankLayout(2, 2), (0,), True, "")
    assert len(setting.execute()) == 0, "no slots, no replicas"
    setting.monitor._settings = setting.config.planner.model_copy(update={"drift_threshold": 1.0 + 1e-12})
    setting.sketches.ingest("item", np.arange(ROWS), 0, setting.clock + 30)
    assert setting.monitor.evaluate() is not None
    assert setting.monitor.pop_reason() is not None
    setting.plan()
    assert setting.monitor.pop_reason() is None
    drift = setting.monitor.evaluate()
    assert drift is not None
    assert drift.ratio == pytest.approx(1.0)


def test_null_threshold_shows_drift_and_asks_nothing(tmp_path: Path) -> None:
    setting = Setting(tmp_path, drift_threshold=None)
    setting.see()
    setting.execute()
    setting.see(moved=700)
    drift = setting.monitor.evaluate()
    assert drift is not None
    assert drift.ratio > 1.03
    assert setting.monitor.pop_reason() is None
    setting.monitor.apply_config(setting.config.planner.model_copy(update={"drift_threshold": 1.03}))
    assert setting.monitor.evaluate() is not None
    assert (setting.monitor.pop_reason() or "").startswith("drift "), "from the next look on"


def test_nothing_is_looked_at_without_ranks_during_a_migration_or_with_little_seen(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.sketches.ingest("item", np.zeros(999, dtype=np.int64), 0, 1.0)
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() == {}
    setting.sketches.ingest("item", np.zeros(1, dtype=np.int64), 0, 1.0)
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() != {}, "a thousand are enough"
    setting.see()
    setting.execute()
    profiles = len(setting.profile_rates)
    setting.executions.migrating = True
    assert setting.monitor.evaluate() is None
    setting.executions.migrating = False
    for topology in (None, LiveTopology(1, "a", RankLayout(2, 2), (200,), False, "settling")):
        setting.coordinator.topology = topology
        assert setting.monitor.evaluate() is None
    assert len(setting.profile_rates) == profiles, "a profile is expensive: none is made for nothing"


def test_a_plan_made_during_a_look_wins(setting: Setting) -> None:
    setting.execute()
    setting.see(moved=700)
    setting.during = lambda: (setattr(setting, "during", lambda: None), setting.execute())  # type: ignore[assignment]
    assert setting.monitor.evaluate() is None
    assert setting.monitor.pop_reason() is None
    assert setting.monitor.newest is None


def test_a_reason_is_over_when_what_it_was_of_is(setting: Setting) -> None:
    target = setting.execute()
    setting.see(moved=700)
    assert setting.monitor.evaluate() is not None
    setting.coordinator.now = Placement.of(target.keys[::2], target.tiers[::2], 9)
    assert setting.monitor.evaluate() is None
    assert (setting.monitor.pop_reason(), setting.monitor.newest) == (None, None), "another placement is live"
    setting.coordinator.now = target
    assert setting.monitor.evaluate() is not None
    setting.plan()
    assert setting.monitor.pop_reason() is None, "a plan was made meanwhile"


def test_a_plan_that_was_made_meanwhile_counts_until_it_has_had_its_time_to_move(setting: Setting) -> None:
    target = setting.plan()
    setting.coordinator.now = Placement.of(target.keys[::2], target.tiers[::2], 1)
    assert setting.monitor.evaluate() is None
    setting.plan()
    planned = setting.monitor.reference_state()
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() == planned, "the first look since the plan"
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() != planned


def test_a_placement_that_no_plan_made_becomes_the_reference_when_it_stays(setting: Setting) -> None:
    """A migration that was cut short: half the plan is live."""
    target = setting.plan()
    setting.coordinator.now = Placement.of(target.keys[::2], target.tiers[::2], 1)
    reference = setting.monitor.reference_state()
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() == reference, "the plan may not have begun to move"
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state()["placement_digest"] == f"{setting.coordinator.now.digest():016x}"
    drift = setting.monitor.evaluate()
    assert drift is not None
    assert drift.ratio == pytest.approx(1.0)


def test_only_the_same_placement_twice_in_a_row_becomes_the_reference(setting: Setting) -> None:
    target = setting.plan()
    half, third = (Placement.of(target.keys[::n], target.tiers[::n], n) for n in (2, 3))
    reference = setting.monitor.reference_state()
    for placement in (half, third, half, third):
        setting.coordinator.now = placement
        assert setting.monitor.evaluate() is None
        assert setting.monitor.reference_state() == reference, "it is on its way"
    setting.coordinator.now = replace(target, version=4)
    assert setting.monitor.evaluate() is not None
    setting.coordinator.now = third
    assert setting.monitor.evaluate() is None
    assert setting.monitor.reference_state() == reference, "the plan's own placement was there in between"


def test_drift_is_of_the_distribution_and_not_of_the_batch(setting: Setting) -> None:
    setting.execute()
    setting.training.accesses_per_step = lambda world: 2 * PER_STEP
    drift = setting.monitor.evaluate()
    assert drift is not None
    assert drift.ratio == pytest.approx(1.0)
    assert setting.profile_rates[-1] == pytest.approx(PER_STEP)


def test_the_reference_outlives_a_restart_and_a_damaged_one_is_left(setting: Setting, tmp_path: Path) -> None:
    setting.execute()
    saved = json.loads(json.dumps(setting.monitor.reference_state()))
    again = Setting(tmp_path, saved)
    again.sketches, again.coordinator.now, again.clock = setting.sketches, setting.coordinator.now, setting.clock
    again.see(moved=700)
    drift = again.monitor.evaluate()
    assert drift is not None, "the first look of the new process compares"
    assert drift.ratio > 1.03
    for damaged in ({"total": "x"}, {**saved, "nodes": None}, {**saved, "tables": 3}):
        assert Setting(tmp_path, damaged).monitor.reference_state() == {}


def test_the_thread_outlives_faults_and_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting(tmp_path, drift_interval_seconds=0.001)
    setting.see(seconds=2)

    def fault() -> None:
        raise RuntimeError("made up")

    setting.during = fault
    setting.monitor.start()
    until(lambda: setting.monitor.evaluations >= 3, 20)
    setting.during = lambda: None
    until(setting.monitor.reference_state, 20)

    def told() -> int:
        return len([record for record in caplog.records if "made up" in record.getMessage()])

    assert told() == 1, "told once"
    until(lambda: setting.monitor.newest is not None, 20)
    setting.during = fault
    until(lambda: told() >= 2, 20, "a fault that returns is reported again")
    assert setting.monitor.stop(10)


def test_the_job_is_priced_as_it_trains(tmp_path: Path) -> None:
    prices = []
    for planner in ({}, {"micro_batches": 4}, {"exchange": "direct"}, {"frozen_tables": ["item"]}):
        setting = Setting(tmp_path, **planner)
        setting.see()
        setting.monitor.evaluate()
        prices.append(setting.monitor.reference_state()["total"][-1])
    assert len(set(prices)) == len(prices)


def test_a_live_daemon_plans_once_for_a_stream_that_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From messages in a file log to the plan's reason, in one process; only the ranks are made up."""
    coordinator = FakeCoordinator(obedient=True)
    monkeypatch.setattr("flexd.daemon.service.Coordinator", lambda *_, **__: coordinator)
    monkeypatch.setattr("flexd.daemon.factory.make_cluster", lambda config: CLUSTER)
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
