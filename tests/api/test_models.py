"""Plans of the planner in the API."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gen_metrics_docs
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from flexd.api.base import TIERS, CommandRequest
from flexd.api.plan import PlanReport
from flexd.api.status import snapshot_status
from flexd.api.stream import SketchStatus, sketch_status, stream_status
from flexd.api.training import row_wise_inter_node_bytes, training_status
from flexd.config.model import parse_config
from flexd.control.protocol.report import ArmReport, PhaseReport, PhasesReport, UsedExchange
from flexd.core.errors import ApiError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.model import FiniteOrNone, Model
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.daemon import Daemon
from flexd.operations.training_monitor import INTERVAL_SECONDS, MAX_SAMPLES, TrainingMonitor
from flexd.planner.plan import PlanOrigin, make_plan
from flexd.server.app import Metrics
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from flexd.topology.files import load_preset
from tests.support.components import CONFIG, KEYSPACE, components, placed, report
from tests.support.ingest_fakes import LOG, FakeSource, make_ingestor, run_to_the_end


@pytest.fixture(scope="module")
def plan():
    """A plan of the planner itself that promotes and demotes."""
    rows = 20_000
    share = np.arange(1, rows + 1) ** -1.2
    share /= share.sum()
    empty = np.zeros(0)
    table = TableProfile("items", rows, 1e7, 4e6, np.arange(rows), share, empty, empty, rows)
    return make_plan(
        Profile((table,), generation=3, samples=10**7),
        KeySpace([TableSpec("items", rows, 4096, "float32", "rowwise_adagrad")]),
        RankLayout(4, 4),
        load_preset("azure-a100-200g"),
        [1000],
        Placement.of(np.arange(19_990, 20_000), np.full(10, Tier.DEVICE, np.uint8)),
        PlanOrigin("p7", "p6", 2, "drift", 1.7e9),
        horizon_steps=10_000,
    )


def test_a_real_plan_goes_through_the_api_and_loses_nothing(plan):
    summary = plan.summary
    report = PlanReport.model_validate({**summary, "rows_before": {"NODE": 0, "DEVICE": 10}})
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


def test_ranks_behind_and_the_busiest_rank():
    training = TrainingMonitor()
    for rank, inter in ((0, 3000), (1, 1000)):
        training.add(rank, report(9, inter=inter))
    page = components(training=training).ranks(0, 3)
    assert (page.total, len(page.ranks), page.ready, page.problem) == (4, 3, False, "settling")
    first, second, silent = page.ranks
    assert (first.step, first.placement_version, first.behind, first.step_seconds) == (9, 5, 1, 0.5)
    assert first.replica_share == pytest.approx(0.5)
    assert first.inter_node_bytes_per_step == 3006
    assert (second.node, second.local_rank, silent.node, silent.step) == (0, 1, 1, None)
    assert page.imbalance == pytest.approx(3020 / ((3020 + 1020) / 2))
    none = components(ranks=False).ranks(0, 3)
    assert (none.total, none.problem) == (0, "no rank is registered")


class Part(Model):
    name: str
    ratio: FiniteOrNone = None
    size: int = 7


def test_an_attribute_that_was_renamed_is_no_silent_default() -> None:
    with pytest.raises(AttributeError, match="size"):
        Part.from_object(SimpleNamespace(name="a", ratio=0.5))


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_cannot_express_are_null(unknown: float) -> None:
    assert json.loads(Part(name="a", ratio=unknown).model_dump_json())["ratio"] is None


def test_a_reader_ignores_fields_of_a_newer_daemon_and_a_daemon_refuses_unknown_fields_of_a_command() -> None:
    assert Part.model_validate({"name": "a", "newer": 1}) == Part(name="a")
    with pytest.raises(ValidationError, match="newer"):
        CommandRequest.model_validate({"newer": 1})


def test_tiers_are_in_the_order_of_their_numbers() -> None:
    assert tuple(tier.name for tier in sorted(Tier)) == TIERS


OF_HTTP = "flexd_api"
GAUGES = ("flexd_plan_gate_open", "flexd_placement_rows")


def test_a_fresh_daemon_shows_every_documented_value_at_zero(tmp_path):
    config = parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 300, "dim": 4}],
            "stream": {"source": {"kind": "tap"}},
            "control": {"listen_port": 0},
            "server": {"port": 0},
            "state": {"dir": str(tmp_path / "state")},
        }
    )
    daemon = Daemon(config)
    daemon.start()
    try:
        page, _ = Metrics(daemon).render()
    finally:
        assert daemon.stop(20.0)
    shown = {
        (family.name, name, value): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        for name, value in sample.labels.items()
    }
    expected = {
        (family, label, value): 0
        for (family, label), values in gen_metrics_docs.KNOWN_VALUES.items()
        if family not in GAUGES and not family.startswith(OF_HTTP)
        for value in values
    }
    assert len(expected) > 50
    assert {key: shown.get(key) for key in expected} == expected


@pytest.fixture
def counted(tmp_path: Path) -> Ingestor:
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 3))
    run_to_the_end(ingestor, source)
    return ingestor


def test_counters_are_shown_as_they_are(counted: Ingestor) -> None:
    counted.source.lost.add("p0", 5, 7, "corrupt")
    counted.source.problem = "gone"
    counted.failures["snapshots"] += 3
    shown = stream_status(CONFIG, counted)
    assert (shown.source, shown.messages, shown.bytes) == ("tap", 24, sum(map(len, LOG["p0"] + LOG["p1"])))
    assert shown.accesses + sum(shown.rejected_accesses.values()) == 23 * 800
    assert shown.rejected_messages["not_arrow_or_json"] == 1
    assert set(shown.adjusted_accesses) == {"future_clamped", "late"}
    assert shown.messages_lost == {"corrupt": 2, "not_kept": 0, "retention": 0, "truncated": 0}
    assert shown.positions_lost == {"out_of_range": 0, "recreated": 0, "retention": 0, "truncated": 0}
    assert (shown.problem, shown.connected, shown.source_failures) == ("gone", False, 0)
    assert shown.newest_event_unix_seconds == counted.sketches.newest_event_seconds


def test_the_newest_snapshot_is_measured_and_a_problem_is_one_of_snapshots(counted: Ingestor, tmp_path: Path) -> None:
    newest = SnapshotStore(tmp_path, 3).paths()[0]
    counted.source.problem = "broker"
    counted.snapshots.saved_at = time.monotonic() - 4.0
    shown = snapshot_status(counted)
    assert (shown.bytes, shown.written, shown.problem) == (newest.stat().st_size, 1, None)
    assert shown.age_seconds == pytest.approx(4.0, abs=1.0)
    counted._problems["snapshots"] = "disk full"
    again = make_ingestor(FakeSource(LOG), SnapshotStore(tmp_path, 3))
    assert (snapshot_status(again).bytes, snapshot_status(again).written) == (shown.bytes, 0)
    assert snapshot_status(counted).problem == "disk full"


def test_tables_in_every_order_and_in_pages():
    shown = components(placed())
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
    page = components(placed()).rows("items", 0, 10)
    assert [(row.place, row.row, row.tier) for row in page.hottest] == [(1, 7, "DEVICE"), (2, 3, "NODE")]
    assert page.hottest[0].share == pytest.approx(0.75)
    key = int(KEYSPACE.keys(KEYSPACE.index["items"], np.array([7]))[0])
    assert (page.hottest[0].key, page.hottest[0].home_rank) == (key, key % 4)
    assert [(row.place, row.row) for row in components(placed()).rows("items", 1, 10).hottest] == [(2, 3)]
    bare = components(ranks=False).rows("items", 0, 1).hottest[0]
    assert (bare.tier, bare.home_rank) == ("HOME", None)
    assert components().rows("cold", 0, 10).hottest == ()
    with pytest.raises(ApiError, match="no table 'nothing'") as missing:
        components().rows("nothing", 0, 1)
    assert missing.value.status == 404


ROWS = 10**9


def status(rows: np.ndarray) -> SketchStatus:
    sketches = SketchSet([TableSpec("items", ROWS, 4)], SketchSettings(2**20, None, 1e9, 1_000, logarithmic=False))
    assert [choice.kind for choice in sketches.choices()] == ["count_min"]
    sketches.ingest("items", rows, 0, 1.7e9)
    return sketch_status(sketches.choices(), sketches.profile(), 0.0)


def gauges(shown: SketchStatus) -> dict[str, float]:
    return {sample.name: sample.value for family in shown.metrics() for sample in family.samples if not sample.labels}


def test_rows_that_noise_hides_explain_nothing_for_certain() -> None:
    shown = status(np.random.default_rng(1).integers(0, ROWS, 2_000_000))
    assert shown.profile.listed == pytest.approx(0, abs=0.05)
    assert gauges(shown)["flexd_profile_listed_ratio"] < 0.5, "FlexdProfileThin"


def test_popular_rows_explain_what_they_are() -> None:
    random = np.random.default_rng(1)
    popular = random.integers(0, 100, 900_000) * 9_999_999
    shown = status(random.permutation(np.concatenate([popular, random.integers(0, ROWS, 100_000)])))
    assert shown.profile.listed == pytest.approx(0.9, abs=0.03)
    assert gauges(shown)["flexd_profile_listed_ratio"] == shown.profile.listed


def test_sums_are_by_tier_kind_and_link() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(5, steps=2, inter=100))
    monitor.add(1, report(4, inter=10))
    shown = training_status(monitor.totals(), monitor.ranks(), monitor.phases())
    assert shown.accesses == {"HOME": 60, "NODE": 40, "DEVICE": 20}
    assert shown.sent_bytes["all_to_all"] == {"intra": 20, "inter": 110}
    assert shown.sent_bytes["migration"] == {"intra": 6, "inter": 8}
    assert (shown.steps, shown.step_seconds, shown.newest_step) == (3, 1.5, 5)
    sent = {
        tuple(sample.labels.values()): sample.value
        for family in shown.metrics()
        if family.name == "flexd_training_sent_bytes"
        for sample in family.samples
    }
    assert (sent["all_to_all", "inter"], sent["sync", "intra"], len(sent)) == (110, 2, 6)


MEASURED = (ArmReport("direct", 0.52), ArmReport("chain with prefetch", 0.44))


def test_phases_are_the_mean_over_the_ranks_and_unknown_before_any_report() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(1))
    assert training_status(monitor.totals(), monitor.ranks(), monitor.phases()).phases == ()
    for rank, seconds in ((0, 0.2), (1, 0.6)):
        rows = PhaseReport("rows", exposed_seconds=seconds, inter_bytes=1000, inter_collectives=4)
        monitor.add(
            rank,
            replace(
                report(3, steps=2),
                phases=PhasesReport((rows,), 2),
                exchange=UsedExchange(
                    "chain",
                    "" if rank else "measured",
                    "chain with prefetch",
                    () if rank else MEASURED,
                    0 if rank else 90,
                ),
            ),
        )
    shown = training_status(monitor.totals(), monitor.ranks(), monitor.phases())
    (rows_phase,) = (phase for phase in shown.phases if phase.phase == "rows")
    assert (rows_phase.exposed_seconds, rows_phase.inter_bytes, rows_phase.inter_collectives) == (0.2, 500, 2)
    assert (shown.tuning.exchange, shown.tuning.arm, shown.tuning.reason, shown.tuning.measured_at_step) == (
        "chain", "chain with prefetch", "measured", 90,
    )  # fmt: skip
    assert [(one.arm, one.step_seconds, one.in_use) for one in shown.tuning.arms] == [
        ("chain with prefetch", 0.44, True), ("direct", 0.52, False),
    ]  # fmt: skip
    sample = {
        tuple(sample.labels.values()): sample.value
        for family in shown.metrics()
        if family.name == "flexd_training_phase_seconds"
        for sample in family.samples
    }
    assert (sample["rows", "exposed"], sample["push", "exposed"]) == (0.2, 0)


def test_timeline_compares_with_row_wise_and_is_bounded():
    now = [100.0]
    training = TrainingMonitor(clock=lambda: now[0])
    training.add(0, report(1))
    training.add(1, report(2, steps=2, inter=4000))
    now[0] += INTERVAL_SECONDS
    training.add(0, report(3))
    now[0] -= 60  # a clock set back
    training.add(0, report(4))
    timeline = components(training=training).timeline()
    first, second = timeline.samples
    assert (first.unix_seconds, first.steps, second.steps) == (100.0, 3, 2)
    assert first.inter_node_bytes == pytest.approx((1000 + 4000 + 4) / 3)
    assert (first.intra_node_bytes, first.migration_bytes) == (pytest.approx(22 / 3), pytest.approx(14 / 3))
    assert first.accesses == {"HOME": 20, "NODE": 13, "DEVICE": 7}
    # 4 of 5 accesses are to rows of 16 bytes, as is the fifth; half of the homes are in the other node.
    assert first.row_wise_inter_node_bytes == pytest.approx(row_wise_inter_node_bytes(40, 16.0, 0.5))
    assert row_wise_inter_node_bytes(40, 16.0, 0.5) == 40 * (2 * 16 + 8) / 2
    assert (len(timeline.plans), timeline.plans[-1].plan_id) == (100, "p199")
    assert components(training=training, ranks=False).timeline().samples[0].row_wise_inter_node_bytes is None
    for i in range(MAX_SAMPLES + 5):
        now[0] = 1000 + i * INTERVAL_SECONDS
        training.add(0, report(1))
    intervals = training.intervals()
    assert len(intervals) == MAX_SAMPLES
    assert intervals[-1].index * INTERVAL_SECONDS == now[0]
