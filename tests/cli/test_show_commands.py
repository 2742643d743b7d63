"""Commands that read from the daemon: options reach it, and what is wrong is on the screen."""

from __future__ import annotations

import io

import pytest

from flexd.api.migration import MigrationList
from flexd.api.rank import TopologyStatus
from flexd.api.status import DaemonStatus
from flexd.api.stream import SketchStatus, StreamStatus, TableSketchStatus
from flexd.cli.blocks import Facts, Table
from flexd.cli.exit_codes import ExitCode
from flexd.cli.render import blocks_of, show
from flexd.cli.show_commands import STATUS_ROWS, split_target
from flexd.control.daemon.migration import MigrationRecord, MigrationState


def text_of(status: DaemonStatus) -> str:
    stream = io.StringIO()
    show(blocks_of(status, rows=STATUS_ROWS), stream)
    return stream.getvalue()


def test_lists_and_details_reach_the_daemon(flexd_command, url, daemon):
    for command in (
        "get tables --order memory -n 5 --offset 1", "get rows items -n 7 --offset 2", "get ranks -n 2 --offset 1",
        "get history -n 1 --state committed", "describe plan latest", "explain items:12", "explain items --hottest 3",
    ):  # fmt: skip
        done = flexd_command(*command.split(), "--url", url)
        assert done.returncode == 0, done.stderr
    assert daemon.calls == [
        ("tables", 1, 5, "memory"), ("rows", "items", 2, 7), ("ranks", 1, 2), ("migrations", 1, "committed"),
        ("proposal", "latest"), ("explain", "items", 12, 10), ("explain", "items", None, 3),
    ]  # fmt: skip
    assert "It saves time" in flexd_command("explain", "items:12", "--url", url).stdout


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("get tables --order luck", "order"), ("get tables -n 1001", "--limit"),
        ("get rows", "needs the name of a table"), ("get ranks --offset -1", "offset"),
        ("get ranks --order name", "get ranks takes no order"), ("get history --state lost", "state"),
        ("get plans -n 3", "get plans takes no limit"), ("get luck", "luck"), ("describe table items", "table"),
    ],
)  # fmt: skip
def test_wrong_usage_does_not_reach_the_daemon(flexd_command, url, daemon, command, reason):
    done = flexd_command(*command.split(), "--url", url)
    assert (done.returncode, reason in done.stderr) == (ExitCode.USAGE, True), done.stderr
    assert daemon.calls == []


def test_a_list_of_one_is_a_table_and_one_entry_among_facts_is_facts():
    entry = MigrationRecord(
        migration_id="m1", plan_id="p1", state=MigrationState.COMMITTED, rows=27, rows_applied=27, trigger="manual",
        requested_by="ada", reason="campaign", copied_bytes=6_912, created_unix_seconds=1.0, ended_unix_seconds=2.5,
    )  # fmt: skip
    listed = MigrationList(migrations=(entry,))
    assert [type(block) for block in blocks_of(listed, tables=True)] == [Table]
    assert [type(block) for block in blocks_of(listed)] == [Facts]


def test_what_is_not_there_is_a_refusal(flexd_command, url, daemon):
    assert flexd_command("describe", "migration", "p/9?x", "--url", url).returncode == ExitCode.REFUSED
    assert daemon.calls == []
    done = flexd_command("describe", "migration", "p9", "--url", url)
    assert (done.returncode, "no migration 'p9' is kept" in done.stderr) == (ExitCode.REFUSED, True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("items", ("items", None)), ("items:12", ("items", 12)), ("shop:items:0", ("shop:items", 0)),
        ("items:", ("items:", None)), (":5", (":5", None)), ("items:-1", ("items:-1", None)),
        ("items:²", ("items:²", None)),
    ],
)  # fmt: skip
def test_only_digits_behind_the_last_colon_are_a_row(target, expected):
    assert split_target(target) == expected


def test_the_status_shows_what_is_wrong():
    status = DaemonStatus(
        job="[red]ads[/]", version="1", uptime_seconds=4000, reasons=("ranks are missing",), paused=True,
        pause_reason="night",
        stream=StreamStatus(
            source="kafka", lag_messages=12_345, rejected_messages={"corrupt": 2, "empty": 0},
            messages_lost={"retention": 4_000, "corrupt": 0},
            problem="broker unreachable",
        ),
        sketch=SketchStatus(
            tables=tuple(TableSketchStatus(table=f"t{i}", kind="dense", bytes=i) for i in range(STATUS_ROWS + 5)),
        ),
        topology=TopologyStatus(nodes=4, local_ranks=8, missing_ranks=tuple(range(19))),
        migration=MigrationRecord(
            migration_id="m", state=MigrationState.FAILED, rows=4, rows_applied=1, problem="rank 3 died"
        ),
    )  # fmt: skip
    text = text_of(status)
    for expected in (
        "[red]ads[/]", "ready         no", "ranks are missing", "pause reason  night", "12,345", "corrupt 2",
        "retention 4,000", "broker unreachable", "and 3 more", "and 5 more", "25.00%", "rank 3 died", "1 h 6 min",
    ):  # fmt: skip
        assert expected in text, (expected, text)
    assert "empty 0" not in text


def test_text_from_the_daemon_cannot_style_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    blocks = blocks_of(DaemonStatus(job="[red]ads[/]\x1b[31m\n", version="1", stream=StreamStatus(source="x")))
    for stream in (Terminal(), io.StringIO()):
        show(blocks, stream)
        assert "[red]ads[/]�[31m�" in stream.getvalue()
