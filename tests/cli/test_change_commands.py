"""Commands that change something: what reaches the daemon, and the exit status."""

from __future__ import annotations

import json

import pytest

from flexd.cli.exit_codes import ExitCode
from flexd.core.errors import ApiError, PlanError

ANN = "ann@host"
BY_HAND = "requested by hand"
CALLS: dict[str, list[tuple[object, ...]]] = {
    "replan --wait --timeout 7 --reason launch": [("replan", "launch", 7)],
    "replan --timeout 7 --force": [("replan", BY_HAND, 0, ANN)],
    "replan --dry-run": [("plan",)],
    "apply p7 --wait --timeout 7 --reason go --force": [
        ("proposal", "p7"), ("apply", "p7", "go", 7.0, True, ANN), ("proposal", "p7"),
    ],
    "apply latest --dry-run": [("proposal", "latest")],
    "abort --timeout 7 --reason slow": [("abort", False, "slow", 7.0, ANN)],
    "rollback --timeout 0": [("abort", True, "", 0.0, ANN)],
    "rollback --dry-run": [("preview_abort", True)],
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
    monkeypatch.setattr("flexd.cli.change_commands.requested_by", lambda: ANN)
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
