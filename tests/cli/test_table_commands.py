"""``flexd tables``, ``rows`` and ``topology``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flexd.api.rank import RankPage
from flexd.api.table import HotRowPage, TablePage
from flexd.cli.blocks import Sentences
from flexd.cli.exit_codes import ExitCode
from flexd.cli.table_commands import rank_blocks, row_blocks, table_blocks
from flexd.core.errors import ApiError

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {"tables": ["tables"], "rows": ["rows", "items", "-n", "3"], "topology": ["topology"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(flexd_command, url, name):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(*COMMANDS[name], "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"{name}.txt"
    assert done.stdout == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_json_and_yaml_say_the_same(flexd_command, url, name):
    as_json = json.loads(flexd_command(*COMMANDS[name], "-o", "json", "--url", url).stdout)
    assert yaml.safe_load(flexd_command(*COMMANDS[name], "-o", "yaml", "--url", url).stdout) == as_json


def test_options_reach_the_daemon(flexd_command, url, daemon):
    assert flexd_command("tables", "--order", "memory", "-n", 5, "--offset", 1, "--url", url).returncode == 0
    assert flexd_command("rows", "a b&c", "-n", 7, "--offset", 2, "--url", url).returncode == 0
    assert flexd_command("topology", "--limit", 2, "--offset", 1, "--url", url).returncode == 0
    assert daemon.calls == [("tables", 1, 5, "memory"), ("rows", "a b&c", 2, 7), ("ranks", 1, 2)]
    for wrong in (["tables", "--order", "luck"], ["tables", "-n", 1001], ["rows"], ["topology", "--offset", -1]):
        assert flexd_command(*wrong, "--url", url).returncode == ExitCode.USAGE, wrong


def test_an_unknown_table_is_refused_with_a_remedy(flexd_command, url, daemon):
    daemon.error = ApiError("no table 'x'", status=404, remedy="flexd tables lists them")
    done = flexd_command("rows", "x", "--url", url)
    assert (done.returncode, done.stderr) == (
        ExitCode.REFUSED,
        "error: no table 'x'\nremedy: flexd tables lists them\n",
    )


def test_pages_beyond_the_end_say_so():
    # And nothing else: a heading without rows looks like an answer.
    assert table_blocks(TablePage(total=2, offset=5)) == [Sentences("", ("none of 2 tables there",))]
    assert table_blocks(TablePage(total=1, offset=5)) == [Sentences("", ("none of 1 table there",))]
    assert row_blocks(HotRowPage(table="t", rows=9, total=0, offset=0))[-1].lines == ("no row has been accessed",)
    assert row_blocks(HotRowPage(table="t", rows=9, total=3, offset=5))[-1].lines == ("no rows there",)
    assert rank_blocks(RankPage(problem="no rank is registered"))[0].pairs[0] == ("ranks", "no rank is registered")
