"""``flexd throttle``: show, change, dry run."""

from __future__ import annotations

import json

from flexd.api.throttle import StepTimeReport, ThrottleStatus
from flexd.cli.exit_codes import ExitCode
from flexd.cli.throttle_command import throttle_blocks


def test_a_throttle_is_shown_or_changed(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.throttle_command.who", lambda: "ann@host")
    flexd_command("throttle", "--url", url)
    flexd_command("throttle", "--bytes-per-second", 5000, "--reason", "peak hours", "--url", url)
    changed = flexd_command("throttle", "--bytes-per-step", 0, "--adaptive", "on", "-o", "json", "--url", url)
    assert daemon.calls == [
        ("throttle",), ("set_throttle", None, 5000, None, "peak hours", "ann@host"),
        ("set_throttle", 0, None, True, "requested by hand", "ann@host"),
    ]  # fmt: skip
    assert json.loads(changed.stdout)["bytes_per_step"] is None
    assert flexd_command("throttle", "--bytes-per-step", -1, "--url", url).returncode == ExitCode.USAGE
    assert flexd_command("throttle", "--adaptive", "maybe", "--url", url).returncode == ExitCode.USAGE


def test_the_throttle_reports_why_a_migration_waits():
    status = ThrottleStatus(
        adaptive=True, effective_bytes_per_step=16384, state="paused", why="paused for 5 s, at the floor already: p90",
        waits_for="adaptive_pause", waiting_seconds={"adaptive_pause": 12.0, "bytes_per_step": 0.0},
        baseline=StepTimeReport(p50_seconds=0.01, p90_seconds=0.012), decisions={"slowed": 3, "sped": 0, "paused": 1},
    )  # fmt: skip
    (block,) = throttle_blocks(status)
    shown = dict(block.pairs)
    assert shown["why"] == status.why
    assert shown["now"].startswith("paused, 16.38 kB")
    assert shown["chunk waits for"] == "adaptive pause"
    assert shown["waited"].startswith("adaptive pause ")
    assert "bytes per step" not in shown["waited"]
    assert shown["decisions"] == "slowed 3, sped 0, paused 1"
