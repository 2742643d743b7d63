"""Questions on a terminal."""

from __future__ import annotations

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
    "reload": (["reload"], r"applied.*log\.level.*Reload\?", "reload"),
    "throttle": (["throttle", "--bytes-per-step", "0"], r"1\.049 MB.*Change these limits\?", "set_throttle"),
    "abort": (["abort"], r"rows pushed.*2,000.*Abort\?", "abort"),
    "apply": (["apply", "latest"], r"p7.*Apply p7\?", "apply"),
}
"""By name: the command, what it asks, and what of the daemon it calls after a yes."""


@pytest.mark.parametrize(("name", "answer"), [("reload", "y"), ("throttle", "n"), ("abort", "n"), ("apply", "y")])
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
