"""Text of commands in a pipe against golden files (RECORD_GOLDEN=1 writes them anew)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.statuses import STATUSES

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {
    "history": "get history",
    "migration": "describe migration latest",
    "rollback": "rollback --reason slow",
    "plans": "get plans",
    "reload-dry-run": "reload --dry-run",
    "rows": "get rows items -n 3",
    "tables": "get tables",
    "throttle": "throttle",
    "ranks": "get ranks",
}
"""By golden file: the command."""


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(flexd_command, url, name):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    done = flexd_command(*COMMANDS[name].split(), "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    _compare(name, done.stdout)


@pytest.mark.parametrize("name", STATUSES)
def test_status_in_a_pipe(flexd_command, url, daemon, name):
    daemon.status = lambda: STATUSES[name]
    done = flexd_command("status", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    _compare(name, done.stdout)


def _compare(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RECORD_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")
