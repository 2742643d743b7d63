"""``flexd tables``, ``rows`` and ``topology``."""

from __future__ import annotations

from flexd.api.rank import RankPage
from flexd.api.table import HotRowPage, TablePage
from flexd.cli.blocks import Sentences
from flexd.cli.exit_codes import ExitCode
from flexd.cli.table_commands import rank_blocks, row_blocks, table_blocks


def test_options_reach_the_daemon(flexd_command, url, daemon):
    assert flexd_command("tables", "--order", "memory", "-n", 5, "--offset", 1, "--url", url).returncode == 0
    assert flexd_command("rows", "a b&c", "-n", 7, "--offset", 2, "--url", url).returncode == 0
    assert flexd_command("topology", "--limit", 2, "--offset", 1, "--url", url).returncode == 0
    assert daemon.calls == [("tables", 1, 5, "memory"), ("rows", "a b&c", 2, 7), ("ranks", 1, 2)]
    for wrong in (["tables", "--order", "luck"], ["tables", "-n", 1001], ["rows"], ["topology", "--offset", -1]):
        assert flexd_command(*wrong, "--url", url).returncode == ExitCode.USAGE, wrong


def test_pages_beyond_the_end_say_so():
    # And nothing else: a heading without rows looks like an answer.
    assert table_blocks(TablePage(total=2, offset=5)) == [Sentences("", ("none of 2 tables there",))]
    assert table_blocks(TablePage(total=1, offset=5)) == [Sentences("", ("none of 1 table there",))]
    assert row_blocks(HotRowPage(table="t", rows=9, total=0, offset=0))[-1].lines == ("no row has been accessed",)
    assert row_blocks(HotRowPage(table="t", rows=9, total=3, offset=5))[-1].lines == ("no rows there",)
    assert rank_blocks(RankPage(problem="no rank is registered"))[0].pairs[0] == ("ranks", "no rank is registered")
