"""``flexd history``, ``migrations`` and ``abort``."""

from __future__ import annotations

import json

import pytest

from flexd.api.abort import AbortPreview, RollbackPreview
from flexd.api.migration import MigrationReport
from flexd.cli.exit_codes import ExitCode
from flexd.cli.migration_commands import abort_sentence
from flexd.core.errors import ApiError


def report(state, **fields):
    return MigrationReport(migration_id="p1", plan_id="p1", state=state, **fields)


@pytest.mark.parametrize(
    ("preview", "expected"),
    [
        (AbortPreview(migration=report("PENDING")), "Migration p1 would stop before its first chunk."),
        (
            AbortPreview(migration=report("PENDING"), rollback=RollbackPreview(to_version=3)),
            "Migration p1 would stop before its first chunk. Nothing would be taken back yet.",
        ),
        (
            AbortPreview(migration=report("PUSHING", chunks_pushed=3, rows=90), rows_pushed=30, waiting=("a", "b")),
            "Migration p1 would stop behind chunk 3, with 30 of 90 rows on every rank. "
            "2 behind it would not be started.",
        ),
        (
            AbortPreview(migration=report("FAILED"), rollback=RollbackPreview(to_version=3, promotions=2, bytes=128)),
            "Migration p1 has ended with an earlier daemon. The way back to placement version 3 would promote 2 rows "
            "and demote 0, 128 B copied.",
        ),
    ],
)
def test_one_sentence_has_the_position_of_the_stop_and_the_rollback(preview, expected):
    assert abort_sentence(preview) == expected


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
def test_the_exit_code_of_abort_follows_from_its_outcome(flexd_command, url, daemon, outcome, code):
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
    daemon.error = ApiError("no migration is running", status=409, remedy="flexd history")
    done = flexd_command("abort", "--url", url)
    assert (done.returncode, done.stdout) == (ExitCode.REFUSED, "")
    assert "no migration is running" in done.stderr
