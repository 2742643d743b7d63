"""``flexd attempts``."""

from __future__ import annotations

import json

from tests.support.fake_attempts import ATTEMPTS


def test_attempts_are_listed_with_who_holds_the_job(flexd_command, url, daemon):
    ended = flexd_command("attempts", "list", "--url", url)
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["attempt", "state", "ranks", "since", "hosts", "reason"]
    assert lines[1].startswith("prod-0-ab12  holds    4 of 4  ")
    assert lines[1].endswith("10.0.0.1, 10.0.0.2")
    assert lines[2].endswith("10.0.0.9            attempt 'prod-0-ab12' holds job 'job'")
    assert "0 of 4" in lines[3]
    shown = json.loads(flexd_command("attempts", "list", "-o", "json", "--url", url).stdout)
    assert [each["state"] for each in shown["attempts"]] == ["HOLDS", "WAITING", "ENDED"]
    assert shown["attempts"][0] == ATTEMPTS[0].model_dump(mode="json")


def test_an_attempt_is_preferred(flexd_command, url, daemon, monkeypatch):
    monkeypatch.setattr("flexd.cli.attempt_commands.who", lambda: "ann@host")
    ended = flexd_command("attempts", "prefer", "debug", "--reason", "stuck", "--url", url)
    assert (ended.returncode, ended.stdout) == (0, "the job is kept for attempt debug\n")
    again = flexd_command("attempts", "prefer", "prod-0-ab12", "--url", url)
    assert again.stdout == "nothing changes: attempt prod-0-ab12 holds the job, or it is kept for it\n"
    assert daemon.calls == [
        ("prefer", "debug", "stuck", "ann@host"), ("prefer", "prod-0-ab12", "requested by hand", "ann@host"),
    ]  # fmt: skip


def test_an_attempt_is_forgotten_unless_its_ranks_hold_the_job(flexd_command, url):
    assert flexd_command("attempts", "forget", "prod-0-99fe", "--url", url).stdout == "forgotten: prod-0-99fe\n"
    refused = flexd_command("attempts", "forget", "prod-0-ab12", "--url", url)
    assert refused.returncode == 4
    assert "its ranks are alive" in refused.stderr


def test_a_dry_run_changes_nothing(flexd_command, url, daemon):
    lines = [
        flexd_command("attempts", verb, attempt, "--dry-run", "--url", url).stdout
        for verb in ("prefer", "forget")
        for attempt in ("prod-0-ab12", "debug")
    ]
    assert lines == [
        "nothing would change: attempt prod-0-ab12 holds the job\n",
        "the job would be kept for attempt debug\n",
        "would be refused: ranks of attempt prod-0-ab12 hold the job\n",
        "would be forgotten: debug\n",
    ]
    assert set(daemon.calls) == {("attempts",)}
