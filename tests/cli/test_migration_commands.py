"""``flexd history``, ``migrations`` and ``abort``."""

from __future__ import annotations

import json

from flexd.cli.exit_codes import ExitCode
from flexd.core.errors import ApiError


def test_options_reach_the_daemon(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.migration_commands.who", lambda: "ann@host")
    listed = flexd_command("migrations", "list", "-n", 1, "--state", "committed", "-o", "json", "--url", url)
    assert [entry["migration_id"] for entry in json.loads(listed.stdout)["migrations"]] == ["p7"]
    assert flexd_command("abort", "--timeout", 7, "--reason", "slow", "--url", url).returncode == 0
    assert flexd_command("abort", "--rollback", "--timeout", 0, "--url", url).returncode == 0
    assert daemon.calls == [
        ("migrations", 1, "COMMITTED"), ("abort", False, "slow", 7.0, "ann@host"), ("abort", True, "", 0.0, "ann@host"),
    ]  # fmt: skip


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
