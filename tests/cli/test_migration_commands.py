"""The history of migrations and abort, as people and scripts see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.cli.exit_codes import ExitCode
from flexd.errors import ApiError

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {
    "history": ["history"],
    "migration": ["migrations", "show", "latest"],
    "abort": ["abort", "--rollback", "--reason", "too slow"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("output", ["table", "json"])
def test_golden(flexd_command, url, name, output):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(*COMMANDS[name], "-o", output, "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"{name}.{'txt' if output == 'table' else 'json'}"
    assert done.stdout == expected.read_text(encoding="utf-8")


def test_options_reach_the_daemon(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.migration_commands.who", lambda: "ann@host")
    listed = flexd_command("migrations", "list", "-n", 1, "--state", "committed", "-o", "json", "--url", url)
    assert [entry["migration_id"] for entry in json.loads(listed.stdout)["migrations"]] == ["p7"]
    assert flexd_command("abort", "--timeout", 7, "--reason", "slow", "--url", url).returncode == 0
    assert flexd_command("abort", "--rollback", "--timeout", 0, "--url", url).returncode == 0
    assert daemon.calls == [
        ("migrations", 1, "COMMITTED"), ("abort", False, "slow", 7.0, "ann@host"), ("abort", True, "", 0.0, "ann@host"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("stopped", ExitCode.OK),
        ("accepted", ExitCode.OK),
        ("ended", ExitCode.REFUSED),
        ("rollback_failed", ExitCode.REFUSED),
        ("timed_out", ExitCode.TIMED_OUT),
    ],
)
def test_the_exit_code_of_abort_tells_the_outcome(flexd_command, url, daemon, outcome, code):
    daemon.outcome = outcome
    done = flexd_command("abort", "--rollback", "--url", url)
    assert done.returncode == code
    assert done.stdout.startswith(outcome.replace("_", " "))


def test_what_is_not_there_is_a_refusal(flexd_command, url, daemon):
    done = flexd_command("migrations", "show", "p/9?x", "--url", url)
    assert (done.returncode, daemon.calls) == (ExitCode.REFUSED, [])
    done = flexd_command("migrations", "show", "p9", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert "no migration 'p9' is kept" in done.stderr
    daemon.error = ApiError("no migration is under way", status=409, remedy="flexd history")
    done = flexd_command("abort", "--url", url)
    assert (done.returncode, done.stdout) == (ExitCode.REFUSED, "")
    assert "no migration is under way" in done.stderr


def test_an_empty_history_says_so(flexd_command, url):
    done = flexd_command("history", "--state", "failed", "--url", url)
    assert done.stdout == "no migration is kept\n"
