"""The status of the stream, and of snapshots, from the counters of the ingest."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from flexd.api.status import snapshot_status
from flexd.api.stream import SketchStatus, sketch_status, stream_status
from flexd.core.errors import ApiError
from flexd.core.keyspace import TableSpec
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from tests.support.components import CONFIG, KEYSPACE, components, placed
from tests.support.ingest_fakes import LOG, FakeSource, make_ingestor, run_to_the_end


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
    assert shown.positions_lost == {"out_of_range": 0, "retention": 0, "truncated": 0}
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
    second = components(placed()).rows("items", 1, 10)
    assert [(row.place, row.row) for row in second.hottest] == [(2, 3)]
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
