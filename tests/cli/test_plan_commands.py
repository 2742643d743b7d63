"""``flexd plan``, ``proposals``, ``apply`` and ``replan``."""

from __future__ import annotations

import pytest

from flexd.cli.exit_codes import ExitCode
from flexd.core.errors import PlanError


def test_options_reach_the_daemon(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.plan_commands.who", lambda: "ann@host")
    assert flexd_command("plan", "latest", "--url", url).returncode == 0
    done = flexd_command("apply", "p7", "--wait", "--timeout", 7, "--reason", "go", "--force", "--url", url)
    assert done.returncode == 0, done.stderr
    assert flexd_command("replan", "--force", "--url", url).returncode == 0
    assert daemon.calls == [
        ("proposal", "latest"), ("apply", "p7", "go", 7.0, True, "ann@host"), ("proposal", "p7"),
        ("replan", "requested by hand", 0.0, "ann@host"),
    ]  # fmt: skip


def test_a_refused_plan_is_exit_code_four_with_the_reason(flexd_command, url, daemon):
    assert flexd_command("apply", "p1", "--url", url).returncode == ExitCode.REFUSED
    daemon.error = PlanError("plan p7 is not executed: the ranks have changed", remedy="flexd plan makes a new one")
    done = flexd_command("apply", "p7", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert "the ranks have changed" in done.stderr
    assert "remedy: flexd plan makes a new one" in done.stderr


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("committed", ExitCode.OK),
        ("unchanged", ExitCode.OK),
        ("accepted", ExitCode.OK),
        ("failed", ExitCode.REFUSED),
        ("superseded", ExitCode.REFUSED),
        ("timed_out", ExitCode.TIMED_OUT),
    ],
)
def test_the_exit_code_of_replan_follows_from_its_outcome(flexd_command, url, daemon, outcome, code):
    daemon.outcome = outcome
    done = flexd_command("replan", "--wait", "--url", url)
    assert done.returncode == code
    assert done.stdout.startswith(outcome)
