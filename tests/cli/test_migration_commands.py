"""``flexd history``, ``migrations`` and ``abort``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.api.abort import AbortPreview, RollbackPreview
from flexd.api.migration import MigrationList, MigrationReport
from flexd.cli.blocks import Sentences
from flexd.cli.exit_codes import ExitCode
from flexd.cli.migration_commands import abort_sentence, history_blocks
from flexd.cli.status_command import migration_facts
from flexd.core.errors import ApiError


def report(state, **fields):
    return MigrationReport(migration_id="p1", plan_id="p1", state=state, **fields)


GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {
    "history": ["history"],
    "migration": ["migrations", "show", "latest"],
    "abort-dry-run": ["abort", "--rollback", "--dry-run"],
    "abort": ["abort", "--rollback", "--reason", "too slow"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(flexd_command, url, name):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(*COMMANDS[name], "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"{name}.txt"
    assert done.stdout == expected.read_text(encoding="utf-8")


def test_a_dry_run_of_abort_aborts_nothing_and_ends_as_abort_would(flexd_command, url, daemon):
    assert flexd_command("abort", "--dry-run", "--url", url).returncode == 0
    assert daemon.calls == [("preview_abort", False)]
    daemon.error = ApiError("no migration is running", status=409, remedy="flexd history")
    done = flexd_command("abort", "--dry-run", "--url", url)
    assert (done.returncode, done.stdout) == (ExitCode.REFUSED, "")
    assert [call[0] for call in daemon.calls] == ["preview_abort"] * 2


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


def test_an_empty_history_is_reported(flexd_command, url):
    done = flexd_command("history", "--state", "failed", "--url", url)
    assert done.stdout == "no recorded migration is failed\n"
    (sentences,) = history_blocks(MigrationList(migrations=(), actions=()))
    assert sentences == Sentences("", ("no migration is recorded",))


def test_how_many_chunks_there_will_be_is_said_only_where_it_is_known():
    report = MigrationReport(
        migration_id="m", plan_id="p", state="PUSHING", chunks=4, chunks_pushed=4, chunks_applied=3
    )
    assert dict(migration_facts(report))["chunks"] == "3 applied, 4 pushed"
    assert dict(migration_facts(report.model_copy(update={"chunks": 9})))["chunks"] == "3 applied, 4 pushed of 9"
