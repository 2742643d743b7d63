"""Components of a daemon with known counters, ranks and placement, for queries."""

from types import SimpleNamespace

import numpy as np

from flexd.api.handlers import Components
from flexd.config.model import parse_config
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import MigrationRecord
from flexd.control.protocol.report import PlacementState, SentBytes, StepReport
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.operations.training_monitor import TrainingMonitor
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings

CONFIG = parse_config(
    {
        "job": "j",
        "tables": [
            {"name": "users", "rows": 50, "dim": 4},
            {"name": "items", "rows": 100, "dim": 8, "dtype": "float16"},
            {"name": "cold", "rows": 10, "dim": 4},
        ],
        "stream": {"source": {"kind": "tap"}},
    }
)
KEYSPACE = CONFIG.keyspace()
LAYOUT = RankLayout(2, 2)


class CountedAccesses:
    """The counters of an ingestor: item 7 three times as often as item 3, and one user."""

    def __init__(self) -> None:
        self.sketches = SketchSet(KEYSPACE.tables, SketchSettings(memory_bytes=2**22))
        self.sketches.ingest("items", np.array([7, 7, 7, 3]), 0, 1e9)
        self.sketches.ingest("users", np.array([49]), 0, 1e9)
        self.choices = self.sketches.choices
        self.samples_by_table = self.sketches.samples_by_table
        self.table_profile = self.sketches.table_profile


def report(step: int, *, steps: int = 1, inter: int = 1000, tiers: tuple[int, int, int] = (30, 20, 10)) -> StepReport:
    return StepReport(
        step=step, steps=steps, placement=PlacementState(5, 0), step_seconds=0.5 * steps, apply_seconds=0.0,
        accesses_by_tier=tiers, sent=SentBytes(10, inter, 1, 2, 3, 4),
    )  # fmt: skip


def components(
    placement: Placement | None = None, *, ranks: bool = True, training: TrainingMonitor | None = None
) -> Components:
    live = LiveTopology(3, "a", LAYOUT, (8,), ready=False, reason="settling") if ranks else None
    prices = SimpleNamespace(cluster=SimpleNamespace(name="c"), used=True, corrections=dict)
    planning = SimpleNamespace(last_profile=None, maker=SimpleNamespace(prices=prices))
    plans = [MigrationRecord(migration_id=f"m{i}", plan_id=f"p{i}", promotions=i) for i in range(200)]
    coordinator = SimpleNamespace(live=lambda: live, placement=lambda: placement or Placement.empty(6))
    return Components(
        CONFIG, KEYSPACE, CountedAccesses(), coordinator, planning, training or TrainingMonitor(len(KEYSPACE.tables)),
        SimpleNamespace(newest=None),
        auto=None, throttle=None, history=SimpleNamespace(newest_moves=lambda limit: plans[::-1][:limit]),
    )  # fmt: skip


def placed() -> Placement:
    items, users = KEYSPACE.index["items"], KEYSPACE.index["users"]
    keys = np.concatenate([KEYSPACE.keys(users, np.array([49])), KEYSPACE.keys(items, np.array([3, 7]))])
    order = np.argsort(keys)
    return Placement(keys[order], np.array([Tier.NODE, Tier.NODE, Tier.DEVICE], dtype=np.uint8)[order], 6)
