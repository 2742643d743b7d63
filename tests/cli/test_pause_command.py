"""``flexd pause`` and ``resume``."""

from __future__ import annotations


def test_options_reach_the_daemon(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.pause_command.who", lambda: "ann@host")
    monkeypatch.setattr("flexd.cli.plan_commands.who", lambda: "ann@host")
    assert flexd_command("replan", "--wait", "--timeout", 7, "--reason", "launch", "--url", url).returncode == 0
    assert flexd_command("replan", "--timeout", 7, "--url", url).returncode == 0
    assert flexd_command("pause", "--reason", "night", "--url", url).stdout == "paused: night\n"
    assert flexd_command("resume", "--url", url).stdout == "running\n"
    assert flexd_command("resume", "--url", url).stdout == "already running\n"
    assert flexd_command("resume", "--reason", "morning", "--url", url).returncode == 0
    assert daemon.calls == [
        ("replan", "launch", 7), ("replan", "requested by hand", 0), ("pause", "night", "ann@host"),
        ("resume", "requested by hand", "ann@host"), ("resume", "requested by hand", "ann@host"),
        ("resume", "morning", "ann@host"),
    ]  # fmt: skip
