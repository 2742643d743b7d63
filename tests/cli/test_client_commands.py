"""Commands that read from the daemon: options reach it, and what is wrong is on the screen."""

import io
import json
import re
from pathlib import Path

import pexpect
import pytest

from flexd.affinity import NodeMap
from flexd.api.migration import MigrationList
from flexd.api.plan import UserNodePage
from flexd.api.rank import TopologyStatus
from flexd.api.status import DaemonStatus
from flexd.api.stream import SketchStatus, StreamStatus, TableSketchStatus
from flexd.cli.blocks import Facts, Table
from flexd.cli.client import ExitCode
from flexd.cli.client_commands import STATUS_ROWS, split_target
from flexd.cli.render import blocks_of, show
from flexd.control.daemon.migration import MigrationRecord, MigrationState
from flexd.core.errors import ApiError, PlanError
from tests.support.fake_daemon import USERS


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
    stream = io.StringIO()
    show(blocks_of(status, rows=STATUS_ROWS), stream)
    text = stream.getvalue()
    for expected in (
        "[red]ads[/]", "ready         no", "ranks are missing", "pause reason  night", "12,345", "corrupt 2",
        "retention 4,000", "broker unreachable", "and 3 more", "and 5 more", "25.00%", "rank 3 died", "1 h 6 min",
    ):  # fmt: skip
        assert expected in text, (expected, text)
    assert "empty 0" not in text


def test_text_from_the_daemon_cannot_style_the_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    blocks = blocks_of(DaemonStatus(job="[red]ads[/]\x1b[31m\n", version="1", stream=StreamStatus(source="x")))
    for stream in (terminal, io.StringIO()):
        show(blocks, stream)
        assert "[red]ads[/]�[31m�" in stream.getvalue()


ANN = "ann@host"
BY_HAND = "requested by hand"
CALLS: dict[str, list[tuple[object, ...]]] = {
    "replan --wait --timeout 7 --reason launch": [("replan", "launch", 7, False, ANN)],
    "replan --timeout 7 --force": [("replan", BY_HAND, 0, True, ANN)],
    "replan --dry-run": [("plan",)],
    "apply p7 --wait --timeout 7 --reason go --force": [("proposal", "p7"), ("apply", "p7", "go", 7.0, True, ANN)],
    "apply latest --dry-run": [("proposal", "latest")],
    "abort --timeout 7 --reason slow": [("abort", False, "slow", 7.0, ANN)],
    "rollback --timeout 0": [("abort", True, "", 0.0, ANN)],
    "rollback --dry-run": [("preview_abort", True)],
    "rollback p8 --timeout 7 --reason slow": [("rollback", "p8", None, "slow", 7.0, ANN)],
    "rollback --to 0 --dry-run": [("preview_rollback", "", 0)],
    "throttle": [("throttle",)],
    "throttle --bytes-per-second 5000 --reason peak": [("set_throttle", None, 5000, "peak", ANN)],
    "throttle --bytes-per-step 0": [("set_throttle", 0, None, BY_HAND, ANN)],
    "pause --reason night": [("pause", "night", ANN)],
    "resume": [("resume", BY_HAND, ANN)],
    "reload": [("reload", BY_HAND, ANN)],
    "reload --dry-run": [("preview_reload",)],
}  # fmt: skip
"""By command: the calls of the daemon. A dry run changes nothing."""


@pytest.mark.parametrize("command", CALLS)
def test_options_reach_the_daemon(flexd_command, url, daemon, monkeypatch, command):
    monkeypatch.setattr("flexd.cli.client_commands.requested_by", lambda: ANN)
    done = flexd_command(*command.split(), "--url", url)
    assert done.returncode == 0, done.stderr
    assert daemon.calls == CALLS[command]


def test_a_lifted_limit_is_gone_and_a_wrong_one_is_refused(flexd_command, url, daemon):
    changed = flexd_command("throttle", "--bytes-per-step", 0, "-o", "json", "--url", url)
    assert json.loads(changed.stdout)["bytes_per_step"] is None
    assert flexd_command("throttle", "--bytes-per-step", -1, "--url", url).returncode == ExitCode.USAGE


def test_a_refusal_is_exit_code_four_with_the_reason(flexd_command, url, daemon):
    assert flexd_command("apply", "p1", "--url", url).returncode == ExitCode.REFUSED
    daemon.error = ApiError("no migration is running", status=409, remedy="flexd get history")
    done = flexd_command("abort", "--url", url)
    assert (done.returncode, done.stdout) == (ExitCode.REFUSED, "")
    daemon.error = PlanError("plan p7 is not executed: the ranks have changed", remedy="flexd plan makes a new one")
    done = flexd_command("apply", "p7", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert "remedy: flexd plan makes a new one" in done.stderr


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("committed", 0), ("unchanged", 0), ("accepted", 0), ("failed", 4), ("superseded", 4), ("timed_out", 5)],
)
def test_the_exit_code_follows_from_the_outcome(flexd_command, url, daemon, outcome, code):
    daemon.outcome = outcome
    done = flexd_command("replan", "--wait", "--url", url)
    assert done.returncode == code
    assert outcome in done.stdout.splitlines()[0]


def ended(process: pexpect.spawn) -> tuple[str, int]:
    """Return the rest of the output and the exit status."""
    process.expect(pexpect.EOF)
    process.close()
    return process.before.replace("\r\n", "\n"), process.exitstatus


def test_control_c_at_the_question_changes_nothing(terminal, daemon):
    process = terminal("pause", "--reason", "night")
    process.expect(r"Pause\? \[y/N\]")
    for _ in range(10):  # ``input`` misses one that comes just before its read begins
        process.sendintr()
        if process.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=3) == 0:
            break
    process.close()
    assert "nothing was changed" in process.before
    assert process.exitstatus == ExitCode.INTERRUPTED
    assert daemon.calls == []


def test_yes_is_yes_whether_typed_or_given(terminal, daemon):
    process = terminal("replan")
    process.expect(r"Replan\? \[y/N\]")
    process.sendline("y")
    text, status = ended(process)
    assert (status, "committed" in text) == (0, True)
    assert [call[0] for call in daemon.calls] == ["plan", "replan"]
    text, status = ended(terminal("resume", "--yes"))
    assert (status, "paused" in text) == (0, True)
    assert "Resume?" not in text


QUESTIONS = {
    "reload": (r"applied.*log\.level.*Reload\?", "preview_reload", "reload"),
    "throttle --bytes-per-step 0": (r"1\.049 MB.*Change these limits\?", "throttle", "set_throttle"),
    "abort": (r"rows pushed.*2,000.*Abort\?", "preview_abort", "abort"),
    # Not "latest": that may be another plan by now.
    "apply latest": (r"p7.*Apply p7\?", "proposal", "apply"),
}
"""By command: what it asks, and what it calls of the daemon before the question and after a yes."""


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("command", QUESTIONS)
def test_the_question_describes_the_effect_of_a_yes(flexd_command, url, daemon, monkeypatch, command, answer):
    question, before, after = QUESTIONS[command]
    for module in ("options", "client_commands"):
        monkeypatch.setattr(f"flexd.cli.{module}.must_ask", lambda yes: not yes)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    done = flexd_command(*command.split(), "--url", url)
    assert re.search(rf"(?s){question} \[y/N\]", done.stderr), done.stderr
    assert ("nothing was changed" in done.stderr) is (answer == "n")
    assert done.returncode == (0 if answer == "y" else ExitCode.FAILED)
    called = [call[0] for call in daemon.calls]
    assert called[: 1 + (answer == "y")] == ([before, after] if answer == "y" else [before])
    assert (after in called) is (answer == "y")
    assert command != "apply latest" or answer == "n" or daemon.calls[1][:2] == ("apply", "p7")


def test_all_pages_become_one_map(flexd_command, url, daemon, tmp_path: Path) -> None:
    out = tmp_path / "nodes.npz"
    done = flexd_command("affinity", "users", "-o", out, "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"7 users in 2 nodes: {out}" in done.stdout
    assert "90.00% of those without affinity" in done.stdout
    assert [call[1] for call in daemon.calls] == [0, 3, 6]
    read = NodeMap.load(out)
    assert read.ids.tolist() == list(USERS)
    assert read.nodes_of.tolist() == [user % 2 for user in USERS]


def test_pages_of_two_learnings_are_not_mixed(flexd_command, url, daemon, tmp_path: Path, monkeypatch) -> None:
    whole, learnings = daemon.user_nodes, iter([1, 2, 2, 2, 2])

    def learnt_anew(offset: int, limit: int) -> UserNodePage:
        number = next(learnings, 0)
        page = whole(offset, limit)
        return page.model_copy(update={"learnt": number, "nodes_of": (number - 1,) * len(page.ids)})

    monkeypatch.setattr(daemon, "user_nodes", learnt_anew)
    out = tmp_path / "nodes.npz"
    assert flexd_command("affinity", "users", "-o", out, "--url", url).returncode == 0
    assert NodeMap.load(out).nodes_of.tolist() == [1] * len(USERS)
