"""Questions on a terminal."""

from __future__ import annotations

import io
import re

import pexpect
import pytest

from flexd.cli.exit_codes import ExitCode
from tests.support.terminals import ended


def interrupted(process: pexpect.spawn) -> tuple[str, int]:
    """Press Control-C until the process ends: ``input`` misses one that comes just before its read begins."""
    for _ in range(10):
        process.sendintr()
        if process.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=3) == 0:
            break
    process.close()
    return process.before.replace("\r\n", "\n"), process.exitstatus


def test_control_c_at_the_question_changes_nothing(terminal, daemon):
    process = terminal("pause", "--reason", "night")
    process.expect(r"Pause\? \[y/N\]")
    text, status = interrupted(process)
    assert "nothing was changed" in text
    assert status == ExitCode.INTERRUPTED
    assert daemon.calls == []


def test_yes_is_yes_whether_typed_or_given(terminal, daemon):
    process = terminal("replan")
    process.expect(r"Replan\? \[y/N\]")
    process.sendline("y")
    text, status = ended(process)
    assert (status, "committed" in text) == (0, True)
    assert [call[0] for call in daemon.calls] == ["plan", "replan"]
    text, status = ended(terminal("resume", "--yes"))
    assert (status, "paused" in text) == (0, True)
    assert "Resume?" not in text


QUESTIONS = {
    "reload": (r"applied.*log\.level.*Reload\?", "preview_reload", "reload"),
    "throttle --bytes-per-step 0": (r"1\.049 MB.*Change these limits\?", "throttle", "set_throttle"),
    "abort": (r"rows pushed.*2,000.*Abort\?", "preview_abort", "abort"),
    # Not "latest": that may be another plan by now.
    "apply latest": (r"p7.*Apply p7\?", "proposal", "apply"),
}
"""By command: what it asks, and what it calls of the daemon before the question and after a yes."""


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("command", QUESTIONS)
def test_the_question_describes_the_effect_of_a_yes(flexd_command, url, daemon, monkeypatch, command, answer):
    question, before, after = QUESTIONS[command]
    for module in ("options", "change_commands"):
        monkeypatch.setattr(f"flexd.cli.{module}.must_ask", lambda yes: not yes)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    done = flexd_command(*command.split(), "--url", url)
    assert re.search(rf"(?s){question} \[y/N\]", done.stderr), done.stderr
    assert ("nothing was changed" in done.stderr) is (answer == "n")
    assert done.returncode == (0 if answer == "y" else ExitCode.FAILED)
    called = [call[0] for call in daemon.calls]
    assert called[: 1 + (answer == "y")] == ([before, after] if answer == "y" else [before])
    assert (after in called) is (answer == "y")
    assert command != "apply latest" or answer == "n" or daemon.calls[1][:2] == ("apply", "p7")
