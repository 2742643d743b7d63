"""``flexd status`` in the conditions that operators look for."""

from __future__ import annotations

import io
import json

import pytest
import yaml

from flexd.api.migration import MigrationReport
from flexd.api.placement import PlacementStatus
from flexd.api.plan import PlanReport
from flexd.api.prices import LinkPrices, PricesStatus
from flexd.api.rank import TopologyStatus
from flexd.api.sketch import SketchStatus, TableSketchStatus
from flexd.api.snapshot import SnapshotStatus
from flexd.api.status import Status
from flexd.api.stream import OffsetRangeStatus, StreamStatus
from flexd.cli.status_command import MAX_MISSING_RANKS, MAX_TABLES, status_blocks
from flexd.cli.view import show
from tests.support.statuses import HEALTHY, STATUSES


def text_of(blocks) -> str:
    stream = io.StringIO()
    show(blocks, stream)
    return stream.getvalue()


def test_prices_say_whether_and_why_they_are_corrected() -> None:
    reason = "x2.60: held-out error 22%, as probed 66%"
    links = (
        LinkPrices(link="inter_node", reports=40, factor=2.6, reason=reason),
        LinkPrices(link="of_a_newer_daemon", reason="as probed: 3 of 8 reports"),
    )
    lines = text_of(status_blocks(HEALTHY.model_copy(update={"prices": PricesStatus(links=links)}))).splitlines()
    assert next(line for line in lines if "between nodes" in line and "x2.60" in line).endswith(reason)
    assert any("of_a_newer_daemon" in line and "3 of 8 reports" in line for line in lines)
    assert "prices" not in text_of(status_blocks(HEALTHY))


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
            rejected_messages={"corrupt": 2, "empty": 0},
            rejected_accesses={"negative_row": 3},
            messages_lost={"retention": 4_000, "corrupt": 0},
            positions_lost={"retention": 1},
            lost_ranges=[OffsetRangeStatus(partition="t/0", first_offset=10, last_offset=4_009, reason="retention")],
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
        "2 messages (corrupt 2), 3 accesses (negative_row 3)",
        "lost      4000 messages (retention 4000), 1 positions (retention 1)",
        "t/0: 10 to 4009 (retention)",
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


@pytest.mark.parametrize("name", STATUSES)
def test_status_as_json_and_yaml(flexd_command, url, daemon, name):
    daemon.status = lambda: STATUSES[name]
    done = flexd_command("status", "-o", "json", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert yaml.safe_load(flexd_command("status", "-o", "yaml", "--url", url).stdout) == shown
