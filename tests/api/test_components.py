"""Queries of tables, hot rows, ranks and recent traffic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flexd.api.components import Components
from flexd.api.timeline import row_wise_inter_node_bytes
from flexd.config.load import parse_config
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.report import StepReport
from flexd.core.errors import ApiError
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.daemon.follower_inspection import FollowerInspection
from flexd.operations.traffic_timeline import INTERVAL_SECONDS, MAX_SAMPLES, TrafficTimeline
from flexd.operations.training_monitor import TrainingMonitor
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

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


class Counted:
    """Counters as an ingestor has them: item 7 three times as often as item 3, and one user."""

    def __init__(self) -> None:
        self.sketches = SketchSet.of(KEYSPACE.tables, SketchSettings(memory_bytes=2**22))
        self.sketches.ingest("items", np.array([7, 7, 7, 3]), 0, 1e9)
        self.sketches.ingest("users", np.array([49]), 0, 1e9)
        self.choices = self.sketches.choices
        self.samples_by_table = self.sketches.samples_by_table
        self.table_profile = self.sketches.table_profile


def report(step: int, *, steps: int = 1, inter: int = 1000, tiers: tuple[int, int, int] = (30, 20, 10)) -> StepReport:
    return StepReport(
        step=step, steps=steps, placement_version=5, placement_digest=0, step_seconds=0.5 * steps, apply_seconds=0.0,
        accesses_by_tier=tiers, all_to_all_intra_bytes=10, all_to_all_inter_bytes=inter, sync_intra_bytes=1,
        sync_inter_bytes=2, migration_intra_bytes=3, migration_inter_bytes=4,
    )  # fmt: skip


def inspection(
    placement: Placement | None = None, *, ranks: bool = True, training: TrainingMonitor | None = None
) -> Components:
    live = LiveTopology(3, "a", LAYOUT, (8,), ready=False, reason="settling") if ranks else None
    planning = SimpleNamespace(last_profile=None, cluster=SimpleNamespace(name="c"))
    plans = [{"plan_id": f"p{i}", "state": "committed", "promotions": i, "surplus": 1} for i in range(200)]
    coordinator = SimpleNamespace(live=lambda: live, placement=lambda: placement or Placement.empty(6))
    return Components(
        CONFIG, KEYSPACE, Counted(), coordinator, planning, training or TrainingMonitor(), SimpleNamespace(newest=None),
        auto=None, pacing=None, history=None, plan_log=SimpleNamespace(entries=plans), snapshot_directory=Path(),
    )  # fmt: skip


def placed() -> Placement:
    items, users = KEYSPACE.index["items"], KEYSPACE.index["users"]
    keys = np.concatenate([KEYSPACE.keys(users, np.array([49])), KEYSPACE.keys(items, np.array([3, 7]))])
    order = np.argsort(keys)
    tiers = np.array([Tier.NODE, Tier.NODE, Tier.DEVICE], dtype=np.uint8)
    return Placement(keys[order], tiers[order], 6)


def test_tables_in_every_order_and_in_pages():
    shown = inspection(placed())
    page = shown.tables(0, 10, "accesses")
    assert [table.table for table in page.tables] == ["items", "users", "cold"]
    items, users, cold = page.tables
    assert (items.accesses, items.share, users.accesses, cold.accesses) == (4, 0.8, 1, 0)
    assert items.placed_rows == {"HOME": 98, "NODE": 1, "DEVICE": 1}
    assert users.placed_rows == {"HOME": 49, "NODE": 1, "DEVICE": 0}
    assert cold.placed_rows == {"HOME": 10, "NODE": 0, "DEVICE": 0}
    assert users.group == cold.group != items.group
    for order, first in (("name", "cold"), ("configured", "users"), ("memory", "items"), ("replicas", "items")):
        assert shown.tables(0, 10, order).tables[0].table == first, order
    rest = shown.tables(2, 10, "accesses")
    assert (rest.total, rest.offset, [table.table for table in rest.tables]) == (3, 2, ["cold"])
    assert shown.tables(5, 10, "accesses").tables == ()


def test_hot_rows_come_with_tier_and_home():
    page = inspection(placed()).rows("items", 0, 10)
    assert [(row.place, row.row, row.tier) for row in page.hottest] == [(1, 7, "DEVICE"), (2, 3, "NODE")]
    assert page.hottest[0].share == pytest.approx(0.75)
    key = int(KEYSPACE.keys(KEYSPACE.index["items"], np.array([7]))[0])
    assert (page.hottest[0].key, page.hottest[0].home_rank) == (key, key % 4)
    second = inspection(placed()).rows("items", 1, 10)
    assert [(row.place, row.row) for row in second.hottest] == [(2, 3)]
    bare = inspection(ranks=False).rows("items", 0, 1).hottest[0]
    assert (bare.tier, bare.home_rank) == ("HOME", None)
    assert inspection().rows("cold", 0, 10).hottest == ()
    with pytest.raises(ApiError, match="no table 'nothing'") as missing:
        inspection().rows("nothing", 0, 1)
    assert missing.value.status == 404


def test_ranks_show_who_is_behind_and_who_is_busy():
    training = TrainingMonitor()
    for rank, inter in ((0, 3000), (1, 1000)):
        training.add(rank, report(9, inter=inter))
    page = inspection(training=training).ranks(0, 3)
    assert (page.total, len(page.ranks), page.ready, page.problem) == (4, 3, False, "settling")
    first, second, silent = page.ranks
    assert (first.step, first.placement_version, first.behind, first.step_seconds) == (9, 5, 1, 0.5)
    assert first.replica_share == pytest.approx(0.5)
    assert first.inter_node_bytes_per_step == 3006
    assert (second.node, second.local_rank, silent.node, silent.step) == (0, 1, 1, None)
    assert page.imbalance == pytest.approx(3020 / ((3020 + 1020) / 2))
    nobody = inspection(ranks=False).ranks(0, 3)
    assert (nobody.total, nobody.problem) == (0, "no rank is registered")


def test_averages_of_a_rank_follow_its_newest_steps():
    training = TrainingMonitor()
    training.add(0, report(1, inter=0))
    training.add(0, report(51, steps=25, inter=25 * 1000))
    assert training.ranks()[0].inter_bytes == pytest.approx(6 + 0.5 * ((25_000 + 6) / 25 - 6))
    training.add(0, report(151, steps=100, inter=0))
    assert training.ranks()[0].inter_bytes == pytest.approx(6 / 100)


def test_timeline_compares_with_row_wise_and_is_bounded():
    now = [100.0]
    training = TrainingMonitor()
    training.timeline = TrafficTimeline(clock=lambda: now[0])
    training.add(0, report(1))
    training.add(1, report(2, steps=2, inter=4000))
    now[0] += INTERVAL_SECONDS
    training.add(0, report(3))
    now[0] -= 60  # a clock set back
    training.add(0, report(4))
    timeline = inspection(training=training).timeline()
    first, second = timeline.samples
    assert (first.unix_seconds, first.steps, second.steps) == (100.0, 3, 2)
    assert first.inter_node_bytes == pytest.approx((1000 + 4000 + 4) / 3)
    assert first.accesses == {"HOME": 20, "NODE": 13, "DEVICE": 7}
    # 4 of 5 accesses are to rows of 16 bytes, as is the fifth; half of the homes are in the other node.
    assert first.row_wise_inter_node_bytes == pytest.approx(row_wise_inter_node_bytes(40, 16.0, 0.5))
    assert row_wise_inter_node_bytes(40, 16.0, 0.5) == 40 * (2 * 16 + 8) / 2
    assert (len(timeline.plans), timeline.plans[-1].plan_id) == (100, "p199")
    assert inspection(training=training, ranks=False).timeline().samples[0].row_wise_inter_node_bytes is None
    for i in range(MAX_SAMPLES + 5):
        now[0] = 1000 + i * INTERVAL_SECONDS
        training.add(0, report(1))
    intervals = training.timeline.intervals()
    assert len(intervals) == MAX_SAMPLES
    assert intervals[-1].index * INTERVAL_SECONDS == now[0]


def test_a_follower_shows_its_configuration_only():
    shown = FollowerInspection(CONFIG)
    assert shown.config().config["job"] == "j"
    for ask in (lambda: shown.tables(0, 1, "name"), lambda: shown.rows("t", 0, 1), lambda: shown.ranks(0, 1),
                shown.timeline):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            ask()
        assert refused.value.status == 409
