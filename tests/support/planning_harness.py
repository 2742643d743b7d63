"""Planning over a fake coordinator: one table, sketches filled by the test, plans executed by hand."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flexd.config.model import Config, parse_config
from flexd.control.daemon.migration import Migration
from flexd.control.protocol.report import PlacementState, StepReport
from flexd.core.placement import RankLayout
from flexd.operations.executions import Executions, Trigger, TriggerKind
from flexd.operations.live_plan import LivePrices, PlanMaker
from flexd.operations.planning import Planning, Proposal
from flexd.operations.training_monitor import TrainingMonitor
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings
from flexd.topology.files import scale_model
from tests.support.fake_coordinator import FakeCoordinator

ROWS = 2_000
ANY_SAVING = {"seconds": 0.0, "share": 0.0}
"""``planner.min_saving`` under which every plan that pays by the model is made."""


class PlanningHarness:
    def __init__(self, directory: Path, **planner: Any) -> None:
        settings = {
            "min_saving": ANY_SAVING, "min_samples": 1_000, "min_coverage": 0.5, "horizon_steps": 1_000_000, **planner
        }  # fmt: skip
        self.config: Config = parse_config(
            {
                "job": "j",
                "tables": [{"name": "item", "rows": ROWS, "dim": 64}],
                "stream": {"source": {"kind": "synthetic"}},
                "planner": settings,
                "control": {"chunk_rows": 16},
            }
        )
        keyspace = self.config.keyspace()
        self.sketches = SketchSet(keyspace.tables, SketchSettings(half_life_seconds=None))
        self.coordinator = FakeCoordinator()
        self.training = TrainingMonitor()
        self.profiles: list[Profile] = []
        self.profile: Callable[[float], Profile] = lambda per_step: self.sketches.profile(per_step, 1)
        history: Any = SimpleNamespace(newest_moves=lambda limit: ())
        executions = Executions(keyspace, self.coordinator, history, None)  # type: ignore[arg-type]
        self.coordinator.on_migration = executions.on_migration
        self.prices = LivePrices(scale_model(self.config.cluster(), 1e6), self.training, self.coordinator)
        maker = PlanMaker(
            self.config.planner,
            keyspace,
            self.prices,
            self._make_profile,
            self.coordinator,
            self.training,  # type: ignore[arg-type]
        )
        self.planning = Planning(
            self.config,
            maker,
            self.coordinator,
            executions,  # type: ignore[arg-type]
        )

    def _make_profile(self, per_step: float, layout: RankLayout) -> Profile:
        self.profiles.append(self.profile(per_step))
        return self.profiles[-1]

    def see(self, accesses: int, seed: int = 0, draw: int = 0) -> None:
        """Count look-ups; ``seed`` also chooses which rows are hot, ``draw`` only draws anew."""
        rng = np.random.default_rng([seed, draw] if draw else seed)
        weights = np.arange(1, ROWS + 1) ** -1.2
        rows = rng.choice(ROWS, accesses, p=weights / weights.sum())
        self.sketches.ingest("item", (rows + 137 * seed) % ROWS, 0, 1.0 + seed, np.full(accesses // 10, 10))

    def propose(self, reason: str, **options: Any) -> Proposal:
        return self.planning.propose(Trigger(TriggerKind.MANUAL, reason), **options)

    def execute(self, reason: str) -> tuple[Plan, Migration | None]:
        """Plans and starts the migration."""
        proposal = self.propose(reason)
        return proposal.plan, self.planning.execute(proposal)

    def report(self, per_rank: int = 200_000) -> None:
        report = StepReport(1, 1, PlacementState(0, 0), 0.1, 0.0, (per_rank, 0, 0))
        for rank in range(4):
            self.training.add(rank, report)


def filled_harness(directory: Path, **planner: Any) -> PlanningHarness:
    """Return a harness whose counters and reports suffice for a plan."""
    harness = PlanningHarness(directory, **planner)
    harness.see(50_000)
    harness.report()
    return harness
