"""The commands at a terminal, as somebody sits in front of it: questions, colours, screens that renew themselves."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from flexd.api.pause import PauseState
from flexd.cli.exit_codes import ExitCode
from tests.support.plans import FULL_PLAN
from tests.support.repository import ROOT
from tests.support.statuses import STATUSES

pytestmark = pytest.mark.alone

SECONDS = 30
GOLDEN = Path(__file__).parent / "golden"
MARKS = {"\x1b[1m": "<b>", "\x1b[2m": "<dim>", "\x1b[1;31m": "<red>", "\x1b[0m": "</>"}
"""Styles as the golden files write them."""
ALTERNATE_SCREEN = "\x1b[?1049h"
STYLE = re.compile(r"\x1b\[[0-9;]*m")
Terminal = Callable[..., pexpect.spawn]


@pytest.fixture
def terminal(url) -> Iterator[Terminal]:
    """Starts ``flexd ARGUMENTS`` on a terminal of its own."""
    made: list[pexpect.spawn] = []

    def start(*arguments: str, columns: int = 100, **environment: str) -> pexpect.spawn:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("FLEXD") and name != "NO_COLOR"
        }
        process = pexpect.spawn(
            sys.executable, ["-m", "flexd", *arguments, "--url", url], cwd=os.fspath(ROOT),
            env={**clean, "TERM": "xterm", "COLUMNS": str(columns), "TZ": "UTC", **environment}, timeout=SECONDS,
            dimensions=(40, columns), encoding="utf-8",
        )  # fmt: skip
        made.append(process)
        return process

    yield start
    for process in made:
        process.close(force=True)


def ended(process: pexpect.spawn) -> tuple[str, int]:
    """(what it still printed, exit status)"""
    process.expect(pexpect.EOF)
    process.close()
    return process.before.replace("\r\n", "\n"), process.exitstatus


def marked(text: str) -> str:
    """The text with its styles in words. Empty ones and the padding at the end of lines go."""
    for code, mark in MARKS.items():
        text = text.replace(code, mark)
    assert "\x1b" not in text
    lines = [re.sub(r"(<dim>\s*</>|\s)+$", "", line) for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def test_commands_with_effects_need_confirmation(terminal, daemon):
    process = terminal("pause", "--reason", "night")
    process.expect(r"Pause\? \[y/N\]")
    process.sendline("")
    text, status = ended(process)
    assert "nothing was changed" in text
    assert status == ExitCode.FAILED
    assert daemon.calls == []


def test_control_c_at_the_question_changes_nothing(terminal, daemon):
    process = terminal("pause", "--reason", "night")
    process.expect(r"Pause\? \[y/N\]")
    process.sendintr()
    text, status = ended(process)
    assert "nothing was changed" in text
    assert status == ExitCode.INTERRUPTED
    assert daemon.calls == []


def test_yes_is_yes_whether_typed_or_given(terminal, daemon):
    process = terminal("replan")
    process.expect(r"As of now nothing would move\. Replan\? \[y/N\]")
    process.sendline("y")
    text, status = ended(process)
    assert (status, "committed" in text) == (0, True)
    assert [call[0] for call in daemon.calls] == ["plan", "replan"]
    text, status = ended(terminal("resume", "--yes"))
    assert (status, text.strip()) == (0, "already running")
    assert "?" not in text


QUESTIONS = {
    "reload": (["reload"], r"Would take from flexd\.yaml: log\.level; tables would wait .*Reload\?", "reload"),
    "throttle": (["throttle", "--bytes-per-step", "0"], r"a step: 1\.049 MB -> as much .*Change\?", "set_throttle"),
    "abort": (["abort"], r"Migration p8 would stop behind chunk 2, .* not be started\. Abort\?", "abort"),
    "apply": (["apply", "latest"], r"Plan p7: nothing would move\. Apply\?", "apply"),
}
"""By name: the command, what it asks, and what of the daemon it calls after a yes."""


@pytest.mark.parametrize("answer", ["n", "y"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_question_describes_the_effect_of_a_yes(terminal, daemon, name, answer):
    command, question, verb = QUESTIONS[name]
    process = terminal(*command)
    process.expect(rf"(?s){question} \[y/N\]")
    asked = [call[0] for call in daemon.calls]
    assert verb not in asked
    process.sendline(answer)
    text, status = ended(process)
    after = [call[:2] for call in daemon.calls[len(asked) :]]
    if answer == "n":
        assert (status, after) == (ExitCode.FAILED, [])
        assert "nothing was changed" in text
        return
    assert status == 0
    assert after[0][0] == verb
    # Not "latest": that may be another plan by now.
    assert name != "apply" or after[0] == ("apply", "p7")


@pytest.mark.parametrize("command", [["throttle"], ["reload", "--yes"], ["throttle", "--adaptive", "on", "--yes"]])
def test_no_confirmation_without_effects_or_with_yes(terminal, command):
    text, status = ended(terminal(*command))
    assert (status, "[y/N]" in text) == (0, False)


@pytest.mark.parametrize("command", ["replan", "pause", "resume"])
def test_a_dry_run_changes_nothing_and_needs_no_confirmation(flexd_command, url, daemon, command):
    done = flexd_command(command, "--dry-run", "-o", "json", "--url", url)
    assert done.returncode == 0, done.stderr
    assert {call[0] for call in daemon.calls} <= {"plan", "status"}
    if command == "pause":
        assert PauseState.model_validate_json(done.stdout) == PauseState(
            paused=True, reason="requested by hand", changed=True
        )


def test_top_draws_on_a_screen_of_its_own_and_leaves_it(terminal):
    process = terminal("top", "--delay", "0.2")
    process.expect_exact(ALTERNATE_SCREEN)
    process.expect("traffic of a rank and step")
    process.expect("row-wise")
    process.expect("ranks")
    # Names of tables are shown as they are, not obeyed.
    process.expect_exact("<img src=x")
    process.sendintr()
    text, status = ended(process)
    assert status == 0
    assert "Traceback" not in text


def test_watching_goes_on_when_the_daemon_fails_for_a_while(terminal, daemon):
    process = terminal("tables", "--watch", "0.2")
    process.expect("every 0.2 s")
    process.expect("items")
    daemon.error = RuntimeError("away")
    process.expect("error: .*the daemon failed")
    daemon.error = None
    process.expect("items")
    process.sendintr()
    assert ended(process)[1] == 0


@pytest.mark.parametrize("name", STATUSES)
def test_golden_status_on_a_terminal_with_its_styles(terminal, daemon, name):
    daemon.status = lambda: STATUSES[name]
    text, status = ended(terminal("status"))
    assert status == 0
    assert marked(text) == (GOLDEN / f"{name}.terminal.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("command", ["tables", "topology", "history", "status", "plan", "proposals", "explain items"])
def test_golden_on_a_terminal(terminal, daemon, command, columns):
    """Nothing is wider than the terminal, figures are not broken, and what has no room is named."""
    daemon.status = lambda: STATUSES["status-degraded-stream"]
    daemon.plan = lambda: FULL_PLAN
    text, status = ended(terminal(*command.split(), columns=columns))
    assert status == 0
    assert STYLE.search(text)
    plain = STYLE.sub("", text).splitlines()
    assert max(map(len, plain)) <= columns
    shown = "".join(f"{line.rstrip()}\n" for line in plain)
    assert shown == (GOLDEN / f"{command.split()[0]}.terminal-{columns}.txt").read_text(encoding="utf-8")


def test_no_color_leaves_no_colour_on_a_terminal(terminal, daemon):
    daemon.status = lambda: STATUSES["status-degraded-stream"]
    assert "<red>NOT READY" in marked(ended(terminal("status"))[0])
    assert "\x1b[1;31m" not in ended(terminal("status", NO_COLOR="1"))[0]


def test_top_in_a_pipe_looks_once_and_is_plain(flexd_command, url):
    done = flexd_command("top", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout == (Path(__file__).parent / "golden" / "top.txt").read_text(encoding="utf-8")
