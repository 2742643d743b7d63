"""Text of commands in a pipe against golden files, and what each asks of the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.statuses import STATUSES

GOLDEN = Path(__file__).parent / "golden"
CHANGE = ("throttle", "--bytes-per-step", "0", "--bytes-per-second", "5000")
COMMANDS: dict[str, tuple[tuple[str, ...], list[tuple[object, ...]] | None]] = {
    "history": (("history",), None),
    "migration": (("migrations", "show", "latest"), None),
    "abort": (("abort", "--rollback", "--reason", "too slow"), None),
    "abort-dry-run": (("abort", "--rollback", "--dry-run"), [("preview_abort", True)]),
    "proposals": (("proposals",), None),
    "reload": (("reload", "--reason", "quieter"), [("reload", "quieter", "ann@host")]),
    "reload-dry-run": (("reload", "--dry-run"), [("preview_reload",)]),
    "rows": (("rows", "items", "-n", "3"), None),
    "tables": (("tables",), None),
    "throttle": (("throttle",), [("throttle",)]),
    "throttle-dry-run": ((*CHANGE, "--dry-run"), [("throttle",)]),
    "topology": (("topology",), None),
}
"""By golden file: the command, and its calls where they matter: a dry run changes nothing."""


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(flexd_command, url, daemon, monkeypatch, name):
    """The files under ``golden`` are what was once looked at and found right; write them anew with care."""
    arguments, calls = COMMANDS[name]
    monkeypatch.setattr("flexd.cli.config_commands.who", lambda: "ann@host")
    done = flexd_command(*arguments, "--url", url, TZ="UTC")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert calls in (None, daemon.calls)


@pytest.mark.parametrize("name", STATUSES)
def test_status_in_a_pipe(flexd_command, url, daemon, name):
    daemon.status = lambda: STATUSES[name]
    done = flexd_command("status", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
