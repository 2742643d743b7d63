"""``flexd tables``, ``rows`` and ``topology``."""

from __future__ import annotations

from flexd.cli.exit_codes import ExitCode


def test_options_reach_the_daemon(flexd_command, url, daemon):
    assert flexd_command("tables", "--order", "memory", "-n", 5, "--offset", 1, "--url", url).returncode == 0
    assert flexd_command("rows", "a b&c", "-n", 7, "--offset", 2, "--url", url).returncode == 0
    assert flexd_command("topology", "--limit", 2, "--offset", 1, "--url", url).returncode == 0
    assert daemon.calls == [("tables", 1, 5, "memory"), ("rows", "a b&c", 2, 7), ("ranks", 1, 2)]
    for wrong in (["tables", "--order", "luck"], ["tables", "-n", 1001], ["rows"], ["topology", "--offset", -1]):
        assert flexd_command(*wrong, "--url", url).returncode == ExitCode.USAGE, wrong
