"""Two daemons, one lease: the leader is killed, stopped, resumed and ended while the ranks train on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flexd.demo.options import DemoOptions
from flexd.demo.ports import free_ports
from flexd.demo.processes import DaemonProcess, Ranks
from flexd.demo.runner import Demo
from flexd.stream.sample_kinds import SampleKind
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.flexd_processes import DAEMON_START_SECONDS, flexd
from tests.support.until import until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

STEPS = 6_000
"""More than are trained: the ranks are ended with the last test."""
LEASE_SECONDS = 4.0


class Member:
    """One of the daemons, with a directory and ports of its own; state and lease are shared."""

    def __init__(self, name: str, directory: Path, config: dict[str, Any]) -> None:
        self.name = name
        self.control_port, http_port = free_ports(2)
        config = {
            **config,
            "control": {**config["control"], "listen_port": self.control_port},
            "server": {"port": http_port},
            "high_availability": {
                "lease": {"kind": "file"}, "identity": name, "duration_seconds": LEASE_SECONDS, "renew_seconds": 0.5,
            },
        }  # fmt: skip
        own = directory / name
        own.mkdir()
        self.config_file = own / "flexd.yaml"
        self._config = config
        self.pin([])
        self.url = f"http://127.0.0.1:{http_port}"
        self.process = DaemonProcess(self.config_file, self.url, own)

    def pin(self, pins: list[dict[str, Any]]) -> None:
        """Into the file, for the next reload or start."""
        config = {**self._config, "planner": {**self._config["planner"], "pins": pins}}
        self.config_file.write_text(yaml.safe_dump(config))

    def post(self, path: str, body: object = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=COMMAND_HEADERS, timeout=30)

    def status(self) -> dict[str, Any]:
        return self.process.status() or {}

    def role(self) -> str:
        shown = self.status().get("leadership") or {}
        return str(shown.get("role", ""))

    def term(self) -> int:
        return int((self.status().get("leadership") or {}).get("term", 0))

    def signal(self, number: int) -> None:
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self) -> None:
        if self.process.alive:
            self.signal(signal.SIGCONT)
        self.process.kill()


class Pair:
    """Two daemons and two ranks; migrations are so slow that each is met in the middle."""

    def __init__(self, directory: Path) -> None:
        demo = Demo(
            DemoOptions(
                link_mbit=0.0,
                steps=STEPS,
                batch_size=24,
                nodes=2,
                local_ranks=1,
                samples=SampleKind.IMPRESSIONS,
                out_dir=directory,
            ),
            directory,
        )
        config = yaml.safe_load((directory / "flexd.yaml").read_text())
        # Only what is pinned moves, and that slowly: thirty chunks, five a second.
        config["planner"] |= {"interval_seconds": 3600.0, "min_samples": 20_000, "drift_threshold": None}
        config["control"] |= {"timeout_seconds": 4.0, "chunk_rows": 16, "throttle": {"bytes_per_second": 10_000}}
        config["state"]["snapshot_interval_seconds"] = 1.0
        self._config = config
        self._pinned = 0
        self.members = [Member(name, directory, config) for name in ("one", "two")]
        addresses = ",".join(f"127.0.0.1:{member.control_port}" for member in self.members)
        replace(demo.setup, control=addresses).save(demo.setup_file)
        self._setup_file, self._directory = demo.setup_file, directory
        self.ranks: Ranks

    def start(self) -> None:
        self.members[0].process.start(DAEMON_START_SECONDS)
        self.ranks = Ranks(self._setup_file, 2, self._directory)
        until(lambda: self.members[0].role() == "leader", 60)
        self.members[1].process.start(DAEMON_START_SECONDS)

    def close(self) -> None:
        try:
            if hasattr(self, "ranks"):
                self.ranks.stop()
        finally:
            for member in self.members:
                member.kill()

    def leader(self) -> Member:
        return next(member for member in self.members if member.role() == "leader")

    def other(self, member: Member) -> Member:
        return next(each for each in self.members if each is not member)

    def version(self) -> int:
        return min(records[-1]["version"] for records in self.ranks.records)

    def steps_on(self, steps: int = 10) -> None:
        now = self.ranks.step()
        until(lambda: self.ranks.running() and self.ranks.step() >= now + steps, 60, "training does not go on")

    def same_versions(self) -> bool:
        """Return whether all ranks had the same placement version at every step."""
        steps = self.ranks.step()
        versions = [[record["version"] for record in records[:steps]] for records in self.ranks.records]
        return versions[0] == versions[1]

    def in_the_middle_of_a_migration(self, leader: Member) -> dict[str, Any]:
        """Makes the leader migrate, and returns when some chunks are applied and others are not."""
        self._pinned += 1
        rows = list(range(500 * self._pinned, 500 * self._pinned + 480))
        pins = [{"table": self._config["tables"][0]["name"], "tier": "NODE", "rows": rows}]
        for member in self.members:
            member.pin(pins)
        assert leader.post("/v1/config/reload").json()["applied"] == ["planner.pins"]
        until(lambda: leader.post("/v1/replan", {}).is_success, 60, leader.status)

        def halfway() -> dict[str, Any] | None:
            migration = leader.status().get("migration") or {}
            return migration if 2 <= migration.get("chunks_applied", 0) <= 20 else None

        return dict(until(halfway, 60, leader.status))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        pair.start()
        until(lambda: pair.ranks.running() and pair.members[0].status().get("ready"), 90, pair.members[0].status)
        yield pair
    finally:
        pair.close()


def test_a_standby_says_so_and_refuses_verbs_with_the_leaders_name(pair: Pair) -> None:
    standby = pair.members[1]
    assert standby.role() == "standby"
    shown = standby.status()["leadership"]
    assert shown["holder"].startswith("one/")
    assert httpx.get(f"{standby.url}/healthz").status_code == 200
    ready = httpx.get(f"{standby.url}/readyz")
    assert ready.status_code == 503
    assert "one/" in ready.json()["reasons"][0]
    for path in ("/v1/replan", "/v1/pause", "/v1/plan"):
        refused = standby.post(path, {})
        assert refused.status_code == 503, path
        assert "one/" in refused.json()["error"]["message"]
    assert "flexd_leading 0.0" in httpx.get(f"{standby.url}/metrics").text
    assert "flexd_leading 1.0" in httpx.get(f"{pair.members[0].url}/metrics").text


def test_abort_stops_at_a_chunk_and_rollback_goes_back_to_where_it_started(pair: Pair) -> None:
    leader = pair.leader()

    def answer(*arguments: str) -> dict[str, Any]:
        done = flexd(*arguments, "-o", "json", "--url", leader.url)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    empty = leader.status()["placement"]["digest"]
    pair.in_the_middle_of_a_migration(leader)
    stopped = answer("abort", "--yes", "--reason", "too soon")
    assert stopped["outcome"] == "stopped"
    until(lambda: pair.version() == stopped["placement_version"], 30, leader.status)
    partly = leader.status()["placement"]
    assert partly["version"] == stopped["placement_version"]
    assert partly["digest"] != empty
    assert 0 < stopped["migration"]["rows_applied"] < stopped["migration"]["rows"]
    pair.in_the_middle_of_a_migration(leader)
    back = answer("abort", "--rollback", "--yes", "--reason", "loss is rising")
    assert back["outcome"] == "rolled_back"
    assert leader.status()["placement"]["digest"] == partly["digest"]
    until(lambda: pair.version() == back["placement_version"], 30, leader.status)
    assert pair.same_versions()
    states = [entry["state"] for entry in answer("history")["migrations"]]
    assert states[:3] == ["COMMITTED", "ABORTED", "ABORTED"], "the way back, and what was stopped"


def test_the_standby_takes_over_when_the_leader_is_killed_in_mid_migration(pair: Pair) -> None:
    leader = pair.leader()
    heir = pair.other(leader)
    migration = pair.in_the_middle_of_a_migration(leader)
    assert migration["state"] == "PUSHING"
    before = pair.version()
    generation = leader.status()["topology"]["generation"]
    leader.process.kill()
    killed = time.monotonic()
    until(lambda: heir.role() == "leader", 60, heir.status)
    leading = time.monotonic()
    until(lambda: heir.status().get("ready"), 60, heir.status)
    print(f"killed: leads after {leading - killed:.1f} s, ranks ready after {time.monotonic() - killed:.1f} s")
    status = heir.status()
    assert status["topology"]["generation"] == generation, "the journal knows these ranks"
    assert status["placement"]["version"] >= before
    assert status["stream"]["problem"] is None
    until(lambda: pair.version() > before, 60, "the placement goes on from where it was")
    assert pair.same_versions()
    leader.process.start(DAEMON_START_SECONDS)
    until(lambda: leader.role() == "standby", 60, leader.status)


@pytest.mark.long
def test_a_stopped_leader_is_replaced_and_does_no_harm_when_it_is_resumed(pair: Pair) -> None:
    leader = pair.leader()
    heir = pair.other(leader)
    pair.in_the_middle_of_a_migration(leader)
    old_term, before = leader.term(), pair.version()
    leader.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: heir.role() == "leader" and heir.status().get("ready"), 90, heir.status)
    print(f"stopped: the ranks follow the next leader after {time.monotonic() - stopped:.1f} s")
    assert heir.term() > old_term
    until(lambda: pair.version() > before, 60)
    resumed_at = pair.ranks.step()
    leader.signal(signal.SIGCONT)
    until(lambda: leader.role() == "standby", 60, leader.status)
    shown = leader.status()["leadership"]
    assert shown["holder"].startswith(f"{heir.name}/")
    until(lambda: pair.ranks.step() > resumed_at + 20, 60)
    assert heir.role() == "leader"
    assert heir.status()["ready"]
    assert pair.same_versions()
    refused = leader.post("/v1/replan", {})
    assert refused.status_code == 503


def test_a_leader_that_is_ended_hands_over_without_waiting_for_the_lease(pair: Pair) -> None:
    leader = pair.leader()
    heir = pair.other(leader)
    pair.in_the_middle_of_a_migration(leader)
    before = pair.version()
    leader.signal(signal.SIGTERM)
    until(lambda: not leader.process.alive, 30, leader.status)
    assert leader.process.exit_code == 0
    until(lambda: heir.role() == "leader" and heir.status().get("ready"), 60, heir.status)
    assert heir.status()["placement"]["version"] >= before
    pair.steps_on()
    assert pair.same_versions()


@pytest.mark.long
def test_a_pause_and_a_throttle_hold_when_the_leader_is_killed(pair: Pair) -> None:
    leader = pair.leader()
    heir = pair.other(leader)
    if not heir.process.alive:  # ended by the test before, if that ran
        heir.process.start(DAEMON_START_SECONDS)
    until(lambda: heir.role() == "standby", 60, heir.status)
    pair.in_the_middle_of_a_migration(leader)
    for command in (
        ["pause", "--yes", "--reason", "loss is rising"], ["throttle", "--yes", "--bytes-per-second", "9000"],
    ):  # fmt: skip
        done = flexd(*command, "--url", leader.url)
        assert done.returncode == 0, done.stderr
    leader.process.kill()
    until(lambda: heir.role() == "leader" and heir.status().get("ready"), 90, heir.status)
    status = heir.status()
    assert (status["paused"], status["pause_reason"]) == (True, "loss is rising")
    assert status["throttle"]["bytes_per_second"] == 9_000
    refused = heir.post("/v1/replan", {})
    assert (refused.status_code, "paused" in refused.text) == (409, True)
    # What the dead leader had under way does not go on either, nor does the new one plan because it is new.
    until(lambda: pair.version() == heir.status()["placement"]["version"], 30, heir.status)
    held = pair.version()
    pair.steps_on(40)
    assert (pair.version(), heir.status()["migration"]) == (held, None)
    done = flexd("resume", "--yes", "--url", heir.url)
    assert done.returncode == 0, done.stderr
    until(lambda: pair.version() > held, 60, heir.status)
    assert pair.same_versions()
