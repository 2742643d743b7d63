"""``flexd throttle``: show, change, dry run."""

from __future__ import annotations

import json

from flexd.cli.exit_codes import ExitCode


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
