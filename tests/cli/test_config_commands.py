"""``flexd reload`` and the text of configurations."""

from __future__ import annotations

from pathlib import Path

from flexd.api.config import KeyChange, ReloadReport
from flexd.cli.config_commands import flat, reload_blocks, reload_sentence
from flexd.cli.exit_codes import ExitCode
from flexd.core.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"


def test_golden(flexd_command, url, daemon, monkeypatch):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    monkeypatch.setattr("flexd.cli.config_commands.who", lambda: "ann@host")
    done = flexd_command("reload", "--reason", "quieter", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / "reload.txt"
    assert done.stdout == expected.read_text(encoding="utf-8")
    assert daemon.calls == [("reload", "quieter", "ann@host")]


def test_a_dry_run_previews_and_reloads_nothing(flexd_command, url, daemon):
    done = flexd_command("reload", "--dry-run", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / "reload-dry-run.txt"
    assert done.stdout == expected.read_text(encoding="utf-8")
    assert daemon.calls == [("preview_reload",)]


def test_a_secret_that_changes_is_named_without_its_value():
    change = KeyChange(key="stream.source.sasl_password", before="**", after="**")
    _, changes = reload_blocks(ReloadReport(file="f", applied=(change.key,), changes=(change,)))
    assert changes.rows == ((change.key, "(a secret)", "(another)", "at once"),)


def test_the_question_has_the_changes():
    assert reload_sentence(ReloadReport(file="f.yaml", pending=("job",))) == (
        "Would apply from f.yaml: nothing; job would wait for a restart."
    )
    assert reload_sentence(ReloadReport(file="f.yaml")) == "f.yaml equals the running configuration."


def test_values_are_written_as_the_file_has_them():
    assert flat({"a": {"b": [True, None, 1.5, "x"]}, "c": {}}) == {
        "a.b[0]": "true", "a.b[1]": "null", "a.b[2]": "1.5", "a.b[3]": "x", "c": "{}",
    }  # fmt: skip


def test_a_file_that_is_wrong_is_refused_with_the_key_path(flexd_command, url, daemon):
    daemon.error = ConfigError("flexd.yaml: log.level: Input should be 'debug' (got 'loud')", remedy="repair it")
    done = flexd_command("reload", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert "log.level" in done.stderr
    assert "repair it" in done.stderr
