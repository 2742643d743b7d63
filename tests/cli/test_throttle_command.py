"""``flexd throttle``: show, change, dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.api.throttle import StepTimeReport, ThrottleStatus
from flexd.cli.exit_codes import ExitCode
from flexd.cli.throttle_command import ThrottleChange, throttle_blocks, throttle_sentence

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["throttle"])
def test_golden(flexd_command, url, name):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(name, "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"{name}.txt"
    assert done.stdout == expected.read_text(encoding="utf-8")


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


def test_a_dry_run_of_the_throttle_shows_before_and_after(flexd_command, url, daemon):
    change = ("throttle", "--bytes-per-step", 0, "--bytes-per-second", 5000)
    done = flexd_command(*change, "--dry-run", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / "throttle-dry-run.txt"
    assert done.stdout == expected.read_text(encoding="utf-8")
    assert daemon.calls == [("throttle",)]
    # What a dry run foretells is what the change then comes to.
    changed = json.loads(flexd_command(*change, "-o", "json", "--url", url).stdout)
    foretold = json.loads(flexd_command(*change, "--dry-run", "-o", "json", "--url", url).stdout)["after"]
    assert {name: changed[name] for name in foretold} == foretold


def test_the_question_has_the_changes_of_the_throttle():
    now = ThrottleStatus(bytes_per_step=1_000_000, adaptive=True)
    assert throttle_sentence(ThrottleChange.between(now, 0, 5000, False)) == (
        "a step: 1 MB -> as much as the ranks apply; a second: no limit -> 5 kB; adaptive: on -> off."
    )
    assert throttle_sentence(ThrottleChange.between(now, None, None, True)) == "The throttle has these limits already."


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
