"""``flexd explain`` against a fake daemon."""

from __future__ import annotations

import json

import pytest
import yaml

from flexd.api.explanation import Explanation, HeldRowsReport, RowReport, TableFastMemoryReport
from flexd.cli.blocks import Facts, Table
from flexd.cli.exit_codes import ExitCode
from flexd.cli.explain_command import explain_blocks, split_target
from flexd.core.errors import ApiError


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("items", ("items", None)),
        ("items:12", ("items", 12)),
        ("shop:items:0", ("shop:items", 0)),
        ("items:", ("items:", None)),
        (":5", (":5", None)),
        ("items:x1", ("items:x1", None)),
        ("items:-1", ("items:-1", None)),
        ("items:²", ("items:²", None)),
    ],
)
def test_only_digits_behind_the_last_colon_are_a_row(target, expected):
    assert split_target(target) == expected


def test_explain_reaches_the_daemon(flexd_command, url, daemon):
    row = flexd_command("explain", "a b&c:12", "--url", url)
    assert row.returncode == 0, row.stderr
    assert daemon.calls[-1] == ("explain", "a b&c", 12, 10)
    assert "a b&c:12" in row.stdout
    assert "At NODE it saves 1 ns a step against HOME" in row.stdout
    assert "It is at HOME now and moves with the next plan." in row.stdout
    table = flexd_command("explain", "items", "--hottest", 3, "--url", url)
    assert daemon.calls[-1] == ("explain", "items", None, 3)
    assert "hottest rows" in table.stdout
    assert "promoted from" in table.stdout


@pytest.mark.parametrize(("output", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_explain_speaks_json_and_yaml(flexd_command, url, output, load):
    answer = load(flexd_command("explain", "items:7", "-o", output, "--url", url).stdout)
    assert answer["explained"][0]["row"] == 7
    assert answer["thresholds"][0]["tier"] == "NODE"


def test_explain_of_an_unknown_table_names_the_known_ones(flexd_command, url, daemon):
    daemon.error = ApiError("no table 'x'", status=404, remedy="one of items")
    done = flexd_command("explain", "x", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert done.stderr == "error: no table 'x'\nremedy: one of items\n"


def in_two_memories(row: RowReport) -> Explanation:
    return Explanation(
        table="items", rows=100, explained=(row,),
        fast_memory=TableFastMemoryReport(
            frame_bytes=200, used_rows=50.0, miss_seconds=2e-5, passes=2,
            now=HeldRowsReport(
                frames=1000, held_rows=600.0, misses=10.0, least_touches=0.25, next_frame_misses=0.5,
                next_frame_seconds=1e-5,
            ),
            planned=HeldRowsReport(frames=2000, held_rows=900.0, misses=0.0, least_touches=0.0, next_frame_misses=0.0),
        ),
    )  # fmt: skip


def test_a_row_is_shown_with_the_memory_it_is_in_and_what_one_more_frame_saves():
    row = RowReport(row=7, accesses_per_step=3.0, seconds={"HOME": 2e-9}, in_pass=0.2, in_frame=0.0, planned_in_frame=1)
    shown = explain_blocks(in_two_memories(row), single=True)
    facts = dict(next(block for block in shown if isinstance(block, Facts)).pairs)
    assert facts["fast memory"] == (
        "in slow memory now, in a frame as planned; costs 0.4 reads a step, 8 us; 0.2 uses a pass"
    )
    tables = [block for block in shown if isinstance(block, Table) and block.title.startswith("fast memory")]
    assert [table.title for table in tables] == ["fast memory of a rank, frames of 200 B, a read costs 20 us"]
    assert tables[0].rows == (
        ("now", "1,000", "600", "10", "20.00%", "0.25 uses a pass", "0.5 reads", "10 us"),
        ("planned", "2,000", "900", "0", "0.00%", "all that are used", "0 reads", ""),
    )
    assert tables[0] in explain_blocks(in_two_memories(row), single=False), "of a table too"


def test_a_row_at_the_threshold_is_held_with_a_probability():
    row = RowReport(row=7, seconds={"HOME": 2e-9}, in_pass=0.25, in_frame=0.5, planned_in_frame=1)
    facts = dict(next(b for b in explain_blocks(in_two_memories(row), single=True) if isinstance(b, Facts)).pairs)
    assert facts["fast memory"].startswith("in a frame with 50.00% now, in a frame as planned; costs 0.25 reads")


def test_nothing_is_said_of_memory_where_all_rows_are_fast():
    row = RowReport(row=7, seconds={"HOME": 2e-9})
    shown = explain_blocks(Explanation(table="items", explained=(row,)), single=True)
    assert "fast memory" not in str(shown)
