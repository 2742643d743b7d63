"""Text of commands, from real plans and full models."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from flexd.api.migration import MigrationReport
from flexd.api.placement import PlacementStatus
from flexd.api.plan import PlanReport
from flexd.api.rank import RefusedRankStatus, TopologyStatus
from flexd.api.sketch import SketchStatus, TableSketchStatus
from flexd.api.snapshot import SnapshotStatus
from flexd.api.status import Status
from flexd.api.stream import StreamStatus
from flexd.cli.blocks import Table
from flexd.cli.plan_view import plan_blocks
from flexd.cli.status_command import MAX_MISSING_RANKS, MAX_TABLES, migration_facts, status_blocks
from flexd.cli.view import show
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.plan import make_plan
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.files import load_preset


def text_of(blocks) -> str:
    stream = io.StringIO()
    show(blocks, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def plan():
    """A plan of the planner itself that promotes and demotes."""
    rows = 20_000
    share = np.arange(1, rows + 1) ** -1.2
    share /= share.sum()
    empty = np.zeros(0)
    table = TableProfile("items", rows, 1e7, 4e6, np.arange(rows), share, share, share, empty, empty, rows, 1.0)
    return make_plan(
        Profile((table,), generation=3, samples=10**7),
        KeySpace([TableSpec("items", rows, 4096, "float32", "rowwise_adagrad")]),
        RankLayout(4, 4),
        load_preset("azure-a100-200g"),
        [1000],
        Placement.of(np.arange(19_990, 20_000), np.full(10, Tier.DEVICE, np.uint8)),
        plan_id="p7",
        parent_id="p6",
        topology_generation=2,
        horizon_steps=10_000,
        now_unix_seconds=1.7e9,
        reason="drift",
    )


def test_a_real_plan_goes_through_the_api_and_loses_nothing(plan):
    summary = plan.summary()
    report = PlanReport.from_summary(summary, {"NODE": 0, "DEVICE": 10})
    assert PlanReport.model_validate_json(report.model_dump_json()) == report
    shown = report.model_dump(mode="json")

    def compare(path: str, planner: object, api: object) -> None:
        if isinstance(planner, dict):
            for key, value in planner.items():
                assert key in api, f"the API drops {path}.{key}"
                compare(f"{path}.{key}", value, api[key])
        else:
            assert json.loads(json.dumps(planner)) == api, path

    compare("plan", summary, shown)


def test_the_plan_table_shows_tiers_items_strategies_and_reasons(plan):
    report = PlanReport.from_summary(plan.summary(), {"NODE": 0, "DEVICE": 10})
    assert report.promotions > 0
    assert report.demotions == 10
    blocks = plan_blocks(report)
    tables = {block.title: block for block in blocks if isinstance(block, Table)}
    tiers = {row[0]: row for row in tables["rows with replicas"].rows}
    assert tiers["DEVICE"][1] == "10"
    items = tables["predicted communication of one rank in one step"].rows
    assert {(row[0], row[1]) for row in items} >= {
        ("forward ids", "inter-node"),
        ("forward rows", "inter-node"),
        ("backward rows", "intra-node"),
        ("sync rows", "inter-node"),
        ("exposed", ""),
    }
    title = "strategies under the same accesses (all-to-all and sync between nodes)"
    strategies = [row[0] for row in tables[title].rows]
    assert strategies == ["row wise", "row wise dedup", "two hop", "live placement", "this plan", "lower bound"]
    text = text_of(blocks)
    assert f"{report.promotions:,} promotions, 10 demotions" in text
    for sentence in report.replication.words:
        assert sentence in text
    assert "GB/s" in text
    # 1,250 home rows and 1,000 slots of 4,096 numbers and one of state.
    assert "home rows 20.48 MB, replica slots 16.39 MB, directory" in text


def test_the_status_table_shows_what_is_wrong():
    status = Status(
        job="ads",
        version="1",
        uptime_seconds=4000,
        ready=False,
        reasons=("ranks are missing",),
        paused=True,
        pause_reason="night",
        stream=StreamStatus(
            source="kafka",
            lag_messages=12_345,
            accesses_per_second=2.5e6,
            rejected_messages={"truncated": 2, "empty": 0},
            rejected_accesses={"negative_row": 3},
            problem="broker unreachable",
        ),
        sketch=SketchStatus(
            bytes=10**9,
            tables=tuple(
                TableSketchStatus(table=f"t{i}", kind="count_min", bytes=i, error_bound=0.001)
                for i in range(MAX_TABLES + 5)
            ),
        ),
        topology=TopologyStatus(
            generation=2, attempt="a1", nodes=4, local_ranks=8, missing_ranks=tuple(range(MAX_MISSING_RANKS + 3))
        ),
        placement=PlacementStatus(version=7, rows={"NODE": 10, "DEVICE": 5}, digest="00ff"),
        last_plan=PlanReport(plan_id="p1", reason="interval"),
        migration=MigrationReport(
            migration_id="m1",
            plan_id="p1",
            state="FAILED",
            progress=0.25,
            rows=8,
            rows_applied=2,
            problem="rank 3 died",
        ),
        snapshot=SnapshotStatus(age_seconds=1.0, failures=2, problem="disk full"),
    )
    text = text_of(status_blocks(status))
    for expected in (
        "NOT READY",
        "ranks are missing",
        "paused  night",
        "12,345 messages behind",
        "2.5 M accesses/s",
        "2 messages (truncated 2), 3 accesses (negative_row 3)",
        "broker unreachable",
        "32 = 4 nodes x 8, attempt a1",
        "and 3 more",
        "and 5 more",
        "FAILED, 25.00% done",
        "rank 3 died",
        "disk full",
        "NODE 10, DEVICE 5",
        "1 h 6 min",
    ):
        assert expected in text
    assert "empty 0" not in text


def test_ranks_of_a_job_that_is_not_complete_are_not_called_silent():
    stream = StreamStatus(source="synthetic")
    some = Status(job="ads", version="1", stream=stream, topology=TopologyStatus(attempt="a1", missing_ranks=(1, 3)))
    assert "not all have said hello" in text_of(status_blocks(some))
    assert "none have said hello" in text_of(status_blocks(Status(job="ads", version="1", stream=stream)))


def test_a_refused_rank_is_shown_beside_live_ranks():
    refused = RefusedRankStatus(attempt="a2", rank=1, reason="the tables differ: items.rows: 3 in the trainer")
    live = TopologyStatus(attempt="a1", nodes=1, local_ranks=2, ready=True, refused_ranks=(refused,))
    text = text_of(status_blocks(Status(job="ads", version="1", stream=StreamStatus(source="x"), topology=live)))
    assert "rank 1 of attempt a2: the tables differ: items.rows: 3 in the trainer" in text
    down = live.model_copy(update={"ready": False, "problem": "no rank is registered; rank 1 is refused: its tables"})
    text = text_of(status_blocks(Status(job="ads", version="1", stream=StreamStatus(source="x"), topology=down)))
    assert "no rank is registered; rank 1 is refused: its tables" in text
    assert "rank 1 of attempt a2" not in text


def test_text_from_the_daemon_cannot_style_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    show(status_blocks(Status(job="[red]ads[/]", version="1", stream=StreamStatus(source="x"))), stream)
    assert "[red]ads[/]" in stream.getvalue()


def test_tiers_come_from_one_copy_to_many_whatever_the_daemons_order():
    placement = PlacementStatus(version=1, rows={"NODE": 8, "DEVICE": 2, "HOME": 12_000})
    status = Status(job="j", version="1", stream=StreamStatus(source="tap"), placement=placement)
    assert "rows     HOME 12,000, NODE 8, DEVICE 2\n" in text_of(status_blocks(status))


def test_how_many_chunks_there_will_be_is_said_only_where_it_is_known():
    report = MigrationReport(
        migration_id="m", plan_id="p", state="PUSHING", chunks=4, chunks_pushed=4, chunks_applied=3
    )
    assert dict(migration_facts(report))["chunks"] == "3 applied, 4 pushed"
    assert dict(migration_facts(report.model_copy(update={"chunks": 9})))["chunks"] == "3 applied, 4 pushed of 9"
