"""A drift monitor over counters that a test feeds, and a daemon's configuration with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flexd.config.load import parse_config
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.operations.drift import DriftMonitor
from flexd.operations.live_prices import LivePrices
from flexd.planner.plan import make_plan
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.planning_harness import ANY_SAVING

ROWS = 4_000
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
                "drift_threshold": 1.03, "interval_seconds": 3600.0, "min_saving": ANY_SAVING, **planner,
            },
        }
    )  # fmt: skip


def accesses(count: int, moved: int, seed: int, exponent: float = 1.2) -> np.ndarray:
    weights = np.arange(1, ROWS + 1) ** -exponent
    rows = np.random.default_rng(seed).choice(ROWS, count, p=weights / weights.sum())
    return np.random.default_rng(99).permutation(ROWS)[(rows + moved) % ROWS].astype(np.int64)


class DriftHarness:
    """A monitor over counters that the test feeds; ``plan`` makes and carries out a plan as the daemon does."""

    def __init__(self, directory: Path, **planner: Any) -> None:
        self.config = config_of(directory, **planner)
        self.keyspace = self.config.keyspace()
        self.sketches = SketchSet(self.keyspace.tables, half_life_seconds=5.0)
        self.coordinator = FakeCoordinator()
        self.executions = SimpleNamespace(migrating=False)
        self.training = SimpleNamespace(
            accesses_per_step=lambda world: PER_STEP,
            exposed=lambda: None,
            step_seconds=lambda: None,
            passes_per_step=lambda: 1,
        )
        self.profile_rates: list[float] = []
        self.during: Callable[[], None] = lambda: None
        self.clock = 0.0
        prices = LivePrices(CLUSTER, self.training, self.coordinator)
        self.monitor = DriftMonitor(
            self.config.planner, self.keyspace, prices, self._profile, self.coordinator,
            self.executions, self.training,  # type: ignore[arg-type]
        )  # fmt: skip

    def _profile(self, per_step: float, layout: RankLayout) -> Profile:
        self.profile_rates.append(per_step)
        made = self.sketches.profile(per_step, layout=layout)
        self.during()
        return made

    def see(self, moved: int = 0, seconds: int = 30, exponent: float = 1.2) -> None:
        for _ in range(seconds):
            self.clock += 1
            self.sketches.ingest("item", accesses(20_000, moved, int(self.clock), exponent), 0, self.clock)

    def plan(self) -> Placement:
        profile = self.sketches.profile(PER_STEP)
        live = self.coordinator.topology
        assert live is not None
        plan = make_plan(
            profile, self.keyspace, live.layout, CLUSTER, live.replica_slots, self.coordinator.now, plan_id="p",
            parent_id="", topology_generation=1, horizon_steps=1e9, now_unix_seconds=0.0, reason="test",
        )  # fmt: skip
        self.monitor.planned()
        return plan.target

    def execute(self) -> Placement:
        self.coordinator.now = replace(self.plan(), version=self.coordinator.now.version + 1)
        return self.coordinator.now
