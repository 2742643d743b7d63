"""The text of plans, from real plans and full reports."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from flexd.api.plan import PlanReport, PooledTableReport
from flexd.api.planning import GateReport, PlanningStatus, ProposalList, ProposalReport
from flexd.cli.blocks import Sentences, Table
from flexd.cli.plan_view import plan_blocks, planning_block, proposal_blocks
from flexd.cli.view import show
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.plan import make_plan
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.files import load_preset

GOLDEN = Path(__file__).parent / "golden"


def test_a_plan_with_closed_gates_reports_them():
    gate = GateReport(gate="samples", key="planner.min_samples", open=False, words="the profile is thin: 3 accesses")
    blocks = plan_blocks(PlanReport(plan_id="p", who="ann@host", reason="why", gates=(gate,)))
    assert Sentences("a gate is closed: flexd apply takes it with --force only", (gate.words,)) in blocks
    assert ("reason", "why, requested by ann@host") in blocks[0].pairs
    assert "--force" not in str(plan_blocks(PlanReport(plan_id="p", gates=(GateReport(gate="lag", key="k"),))))


def test_nothing_kept_is_said():
    assert proposal_blocks(ProposalList()) == [Sentences("", ("no plan is kept: flexd plan makes one",))]


def test_the_status_reports_what_holds_planning_back():
    gate = GateReport(gate="lag", key="planner.max_lag_messages", open=False, words="9 messages are not read yet")
    shown = dict(
        planning_block(
            PlanningStatus(
                auto=False, held="planner.auto is false", window_open=False, window_changes_unix_seconds=1.7e9,
                waiting_for_window="interval", refused="the profile is thin", gates=(gate,),
                proposals=(
                    ProposalReport(plan_id="seen", dry_run=True),
                    ProposalReport(plan_id="own", reason="interval", closed_gates=("lag",)),
                ),
            )
        ).pairs
    )  # fmt: skip
    assert shown["mode"] == "proposes only"
    assert shown["window"].startswith("opens at ")
    assert (shown["held"], shown["waits"], shown["no plan"]) == (
        "planner.auto is false", "interval", "the profile is thin",
    )  # fmt: skip
    assert shown["gate closed"] == gate.words
    assert shown["proposal"] == "own (interval): with --force: closed gates lag"
    assert planning_block(PlanningStatus()).pairs == (("mode", "automatic"),)


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


def test_pooled_tables_show_both_answers_and_those_to_change_first() -> None:
    def pooled(answer: str, better: str) -> PooledTableReport:
        return PooledTableReport(
            answer=answer, better=better, bags_per_step=800.0, rows_inter_node_bytes=2e6, sums_inter_node_bytes=5e5,
            rows_seconds=2e-3, sums_seconds=5e-4,
        )  # fmt: skip

    tables = {"a": pooled("rows", "rows"), "b": pooled("rows", "sums")}
    (shown,) = [
        block
        for block in plan_blocks(PlanReport(plan_id="p", pooled_tables=tables))
        if isinstance(block, Table) and block.title.startswith("pooled tables")
    ]
    assert [row[:4] for row in shown.rows] == [("b", "rows", "sums", "800"), ("a", "rows", "rows", "800")]
    assert shown.rows[0][-2:] == ("2 ms", "500 us")
    assert not any("pooled" in str(block) for block in plan_blocks(PlanReport(plan_id="p")))
