"""``flexd reload`` as people and scripts see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexd.cli.exit_codes import ExitCode
from flexd.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("output", ["table", "json"])
def test_golden(flexd_command, url, daemon, output, monkeypatch):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    monkeypatch.setattr("flexd.cli.reload_command.who", lambda: "ann@host")
    done = flexd_command("reload", "--reason", "quieter", "-o", output, "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    expected = GOLDEN / f"reload.{'txt' if output == 'table' else 'json'}"
    assert done.stdout == expected.read_text(encoding="utf-8")
    assert daemon.calls == [("reload", "quieter", "ann@host")]


def test_a_file_that_is_wrong_is_refused_with_the_key_path(flexd_command, url, daemon):
    daemon.error = ConfigError("flexd.yaml: log.level: Input should be 'debug' (got 'loud')", remedy="repair it")
    done = flexd_command("reload", "--url", url)
    assert done.returncode == ExitCode.REFUSED
    assert "log.level" in done.stderr
    assert "repair it" in done.stderr
