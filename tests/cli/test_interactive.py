"""Questions on a terminal."""

from __future__ import annotations

import pytest

from flexd.api.pause import PauseState
from flexd.cli.exit_codes import ExitCode
from tests.support.terminals import ended


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
    "reload": (["reload"], r"Would apply from flexd\.yaml: log\.level; tables would wait .*Reload\?", "reload"),
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


@pytest.mark.parametrize("command", ["replan", "pause", "resume"])
def test_a_dry_run_changes_nothing_and_needs_no_confirmation(flexd_command, url, daemon, command):
    done = flexd_command(command, "--dry-run", "-o", "json", "--url", url)
    assert done.returncode == 0, done.stderr
    assert {call[0] for call in daemon.calls} <= {"plan", "status"}
    if command == "pause":
        assert PauseState.model_validate_json(done.stdout) == PauseState(
            paused=True, reason="requested by hand", changed=True
        )
