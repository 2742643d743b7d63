"""Text on a terminal against golden files: styles, widths."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flexd.api.plan import PlanReport
from flexd.cli.blocks import Facts, Sentences, Table
from flexd.cli.main import main
from flexd.cli.screen import renderable
from tests.support.statuses import STATUSES

FULL_PLAN = PlanReport.model_validate(
    {
        "plan_id": "p7",
        "parent_id": "p6",
        "reason": "drift",
        "created_unix_seconds": 1700000000.0,
        "topology_generation": 2,
        "profile_generation": 3,
        "cluster": "azure-a100-200g",
        "replica_slots": [1000],
        "rows_before": {"NODE": 0, "DEVICE": 10},
        "rows": {"NODE": 5332, "DEVICE": 0},
        "promotions": 5332,
        "demotions": 10,
        "migration_bytes": 87380816,
        "migration_seconds": 0.001034,
        "lower_bound_seconds": 0.008365,
        "gap": 0.0107,
        "saved_seconds": 0.000368,
        "saved_share": 0.0046,
        "step_seconds": 0.08,
        "before": {
            "exposed_seconds": 0.008735,
            "total_seconds": 0.008735,
            "bytes": {
                "intra_node": {"all_to_all": 301400000.0, "sync": 158900.0},
                "inter_node": {"all_to_all": 113900000.0, "sync": 61220.0},
            },
            "phases": {
                "forward_ids": {
                    "intra_node": {"bytes": 73570.0, "seconds": 1.897e-05},
                    "inter_node": {"bytes": 27810.0, "seconds": 6.148e-05},
                },
                "forward_rows": {
                    "intra_node": {"bytes": 150700000.0, "seconds": 0.000601},
                    "inter_node": {"bytes": 56950000.0, "seconds": 0.003709},
                },
                "backward_rows": {
                    "intra_node": {"bytes": 150700000.0, "seconds": 0.0006011},
                    "inter_node": {"bytes": 56950000.0, "seconds": 0.003709},
                },
                "sync_mask": {
                    "intra_node": {"bytes": 1.875, "seconds": 7.362e-12},
                    "inter_node": {"bytes": 0.4688, "seconds": 3.028e-11},
                },
                "sync_rows": {
                    "intra_node": {"bytes": 0.0, "seconds": 0.0},
                    "inter_node": {"bytes": 61220.0, "seconds": 2.455e-05},
                },
                "sync_sums": {
                    "intra_node": {"bytes": 122400.0, "seconds": 9.821e-06},
                    "inter_node": {"bytes": 0.0, "seconds": 0.0},
                },
            },
        },
        "after": {
            "exposed_seconds": 0.008365,
            "total_seconds": 0.008365,
            "bytes": {
                "intra_node": {"all_to_all": 301500000.0, "sync": 0.0},
                "inter_node": {"all_to_all": 81210000.0, "sync": 32760000.0},
            },
            "phases": {
                "forward_ids": {
                    "intra_node": {"bytes": 73590.0, "seconds": 1.897e-05},
                    "inter_node": {"bytes": 19820.0, "seconds": 6.096e-05},
                },
                "forward_rows": {
                    "intra_node": {"bytes": 150700000.0, "seconds": 0.0006011},
                    "inter_node": {"bytes": 40600000.0, "seconds": 0.002652},
                },
                "backward_rows": {
                    "intra_node": {"bytes": 150700000.0, "seconds": 0.0006011},
                    "inter_node": {"bytes": 40600000.0, "seconds": 0.002652},
                },
                "sync_mask": {
                    "intra_node": {"bytes": 0.0, "seconds": 0.0},
                    "inter_node": {"bytes": 249.9, "seconds": 1.615e-08},
                },
                "sync_rows": {
                    "intra_node": {"bytes": 0.0, "seconds": 0.0},
                    "inter_node": {"bytes": 32760000.0, "seconds": 0.001778},
                },
                "sync_sums": {
                    "intra_node": {"bytes": 0.0, "seconds": 0.0},
                    "inter_node": {"bytes": 0.0, "seconds": 0.0},
                },
            },
        },
        "baselines": {
            "row_wise_dedup": {
                "exposed_seconds": 0.0196,
                "total_seconds": 0.0196,
                "bytes": {
                    "intra_node": {"all_to_all": 75380000.0, "sync": 0.0},
                    "inter_node": {"all_to_all": 301500000.0, "sync": 0.0},
                },
            },
            "two_hop": {
                "exposed_seconds": 0.008703,
                "total_seconds": 0.008703,
                "bytes": {
                    "intra_node": {"all_to_all": 301500000.0, "sync": 0.0},
                    "inter_node": {"all_to_all": 114000000.0, "sync": 0.0},
                },
            },
        },
        "replication": {
            "messages": [
                "replicas save 339 us of exposed communication per step against the same chain with every row at home",
                "ids: 1,000 requests per rank and step are not sent (0.517 us)",
                "Between nodes an all-reduce moves 18.6 GB/s a rank (75% of the wire), "
                "an all-to-all 15.5 GB/s (62%): 1.20 times as much",
                "the forward exchange takes 1.06 ms less and sends 16.4 MB less between nodes; the "
                "backward exchange takes 1.06 ms less; the synchronisation takes 1.78 ms (exposed: "
                "forward 100%, backward 100%, synchronisation 100%)",
                "replication saves time, not bytes: 32.8 MB of all-to-all between nodes become 32.8 MB of "
                "synchronisation",
            ]
        },
    }
)


STYLE = re.compile(r"\x1b\[[0-9;]*m")
MARKS = {"\x1b[1m": "<b>", "\x1b[2m": "<dim>", "\x1b[1;31m": "<red>", "\x1b[0m": "</>"}
"""Styles as the golden files write them."""


def marked(text: str) -> str:
    """The text with its styles in words. Empty ones and the padding at the end of lines go."""
    for code, mark in MARKS.items():
        text = text.replace(code, mark)
    assert "\x1b" not in text
    lines = [re.sub(r"(<dim>\s*</>|\s)+$", "", line) for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int = 100) -> str:
    """Return what ``flexd ARGUMENTS`` prints on a terminal, which must succeed."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "TZ": "UTC"}.items():
        monkeypatch.setenv(name, value)
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["flexd", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return screen.getvalue()


def test_golden_status_on_a_terminal_with_its_styles(monkeypatch, url, daemon):
    daemon.status = lambda: STATUSES["status-degraded-stream"]
    _compare("status-degraded-stream.terminal", marked(on_a_terminal(monkeypatch, "status", "--url", url)))


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("command", ["get tables", "get ranks", "get history", "status", "plan"])
def test_golden_on_a_terminal(monkeypatch, url, daemon, command, columns):
    """Nothing is wider than the terminal, figures are not broken, and what has no room is named."""
    daemon.status = lambda: STATUSES["status-degraded-stream"]
    daemon.plan = lambda: FULL_PLAN
    text = on_a_terminal(monkeypatch, *command.split(), "--url", url, columns=columns)
    assert STYLE.search(text)
    plain = STYLE.sub("", text).splitlines()
    assert max(map(len, plain)) <= columns
    shown = "".join(f"{line.rstrip()}\n" for line in plain)
    _compare(f"{command.split()[-1]}.terminal-{columns}", shown)


GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {
    "history": "get history",
    "migration": "describe migration latest",
    "rollback": "rollback --reason slow",
    "plans": "get plans",
    "reload-dry-run": "reload --dry-run",
    "rows": "get rows items -n 3",
    "tables": "get tables",
    "throttle": "throttle",
    "ranks": "get ranks",
}
"""By golden file: the command."""


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(flexd_command, url, name):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(*COMMANDS[name].split(), "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    _compare(name, done.stdout)


@pytest.mark.parametrize("name", STATUSES)
def test_status_in_a_pipe(flexd_command, url, daemon, name):
    daemon.status = lambda: STATUSES[name]
    done = flexd_command("status", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    _compare(name, done.stdout)


def _compare(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RECORD_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def shown(*blocks: Facts | Sentences | Table, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(renderable(blocks))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(24, 60))
@pytest.mark.parametrize("figure", ["806.6 MB", "0.517 us", "15.5 GB/s", "12 min", "2 d"])
def test_a_line_never_ends_between_a_figure_and_its_unit(width: int, figure: str) -> None:
    text = f"the buffers of one step, of all ranks together, take {figure} at most"
    blocks = (Facts("", (("memory", text),)), Sentences("", (text,)), Table("", ("what",), ((text,),)))
    for block in blocks:
        lines = shown(block, width=width)
        assert max(map(len, lines)) <= width
        assert any(figure in line for line in lines), lines


def test_sentences_are_told_apart_where_there_are_several() -> None:
    lines = shown(Sentences("why", ("the first of two sentences", "the second")), width=20)
    assert lines == ["why", "  - the first of two", "    sentences", "  - the second"]
    assert shown(Sentences("", ("only one",)), width=20) == ["  only one"]


def test_a_table_names_what_it_leaves_out() -> None:
    table = Table("", ("name", "rows"), (("items", "1,000"),), frozenset(("rows",)), ("rows",))
    assert shown(table, width=12) == ["  name", "  items", "  no room", "  for: rows", "  (-o yaml", "  has them)"]


def test_a_whole_column_is_not_broken() -> None:
    table = Table("", ("phase", "time"), (("forward rows", "1 ms"),), frozenset(("time",)), ("time",))
    assert shown(table, width=16) == ["  phase     time", "  forward   1 ms", "  rows"]
    whole = Table(table.title, table.columns, table.rows, table.right, table.spare, frozenset(("phase",)))
    assert shown(whole, width=16)[:2] == ["  phase", "  forward rows"]
