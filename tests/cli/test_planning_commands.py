"""Proposals, applying them, and the throttle, as people and scripts see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.api.plan import PlanReport
from flexd.api.planning import GateReport, PlanningStatus, ProposalList, ProposalReport
from flexd.api.throttle import StepTimeReport, ThrottleStatus
from flexd.cli.blocks import Sentences
from flexd.cli.exit_codes import ExitCode
from flexd.cli.plan_view import plan_blocks, planning_block, proposal_blocks
from flexd.cli.throttle_command import ThrottleChange, throttle_blocks, throttle_sentence
from flexd.core.errors import PlanError

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["proposals", "throttle"])
@pytest.mark.parametrize("output", ["table", "json"])
def test_golden(flexd_command, url, name, output):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(name, "-o", output, "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"{name}.{'txt' if output == 'table' else 'json'}"
    assert done.stdout == expected.read_text(encoding="utf-8")


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


def test_a_dry_run_applies_nothing(flexd_command, url, daemon):
    done = flexd_command("apply", "latest", "--dry-run", "-o", "json", "--url", url)
    assert json.loads(done.stdout)["plan_id"] == "p7"
    assert daemon.calls == [("proposal", "latest")]


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


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("committed", ExitCode.OK), ("superseded", ExitCode.REFUSED), ("timed_out", ExitCode.TIMED_OUT)],
)
def test_the_exit_code_of_apply_follows_from_its_outcome(flexd_command, url, daemon, outcome, code):
    daemon.outcome = outcome
    assert flexd_command("apply", "p7", "--wait", "--url", url).returncode == code


def test_a_refused_plan_is_exit_code_four_with_the_reason(flexd_command, url, daemon):
    assert flexd_command("apply", "p1", "--url", url).returncode == ExitCode.REFUSED
    daemon.error = PlanError("plan p7 is not executed: the ranks have changed", remedy="flexd plan makes a new one")
    done = flexd_command("apply", "p7", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert "the ranks have changed" in done.stderr
    assert "remedy: flexd plan makes a new one" in done.stderr


def test_a_plan_with_closed_gates_reports_them():
    gate = GateReport(gate="samples", key="planner.min_samples", open=False, words="the profile is thin: 3 accesses")
    blocks = plan_blocks(PlanReport(plan_id="p", who="ann@host", reason="why", gates=(gate,)))
    assert Sentences("too little is known: flexd apply takes it with --force only", (gate.words,)) in blocks
    assert ("reason", "why, asked for by ann@host") in blocks[0].pairs
    assert "--force" not in str(plan_blocks(PlanReport(plan_id="p", gates=(GateReport(gate="lag", key="k"),))))


def test_nothing_kept_is_said():
    assert proposal_blocks(ProposalList()) == [Sentences("", ("no plan is kept: flexd plan makes one",))]


def test_the_status_reports_what_holds_planning_back():
    gate = GateReport(gate="lag", key="planner.max_lag_messages", open=False, words="9 messages are not read yet")
    shown = dict(
        planning_block(
            PlanningStatus(
                auto=False, held="planner.auto is false", window_open=False, window_changes_unix_seconds=1.7e9,
                waiting_for_window="interval", refused="the profile is thin", gates=(gate,),
                proposals=(
                    ProposalReport(plan_id="seen", dry_run=True),
                    ProposalReport(plan_id="own", reason="interval", closed_gates=("lag",)),
                ),
            )
        ).pairs
    )  # fmt: skip
    assert shown["mode"] == "proposes only"
    assert shown["window"].startswith("opens at ")
    assert (shown["held"], shown["waits"], shown["no plan"]) == (
        "planner.auto is false", "interval", "the profile is thin",
    )  # fmt: skip
    assert shown["too thin"] == gate.words
    assert shown["proposal"] == "own (interval): with --force: lag too thin"
    assert planning_block(PlanningStatus()).pairs == (("mode", "automatic"),)


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_dry_run_of_the_throttle_shows_before_and_after(flexd_command, url, daemon, output):
    done = flexd_command(
        "throttle", "--bytes-per-step", 0, "--bytes-per-second", 5000, "--dry-run", "-o", output, "--url", url
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"throttle-dry-run.{'txt' if output == 'table' else 'json'}"
    assert done.stdout == expected.read_text(encoding="utf-8")
    assert daemon.calls == [("throttle",)]
    # What a dry run foretells is what the change then comes to.
    changed = json.loads(
        flexd_command("throttle", "--bytes-per-step", 0, "--bytes-per-second", 5000, "-o", "json", "--url", url).stdout
    )
    if output == "json":
        foretold = json.loads(done.stdout)["after"]
        assert {name: changed[name] for name in foretold} == foretold


def test_the_question_has_the_changes_of_the_throttle():
    now = ThrottleStatus(bytes_per_step=1_000_000, adaptive=True)
    assert throttle_sentence(ThrottleChange.between(now, 0, 5000, False)) == (
        "a step: 1 MB -> as much as the ranks apply; a second: no limit -> 5 kB; adaptive: on -> off."
    )
    assert throttle_sentence(ThrottleChange.between(now, None, None, True)) == "The throttle is so already."


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
