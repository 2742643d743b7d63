"""A live job: daemon and training ranks as processes, driven with the command line, stopped and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexd.demo.processes import Ranks
from flexd.demo.runner import Demo
from flexd.demo.setup import HISTORY, DemoOptions, EmulatedCluster
from flexd.stream.sample_kinds import BatchOptions, SampleKind
from tests.support.flexd_processes import DAEMON_START_SECONDS, flexd
from tests.support.until import until


def state_of(pid: int) -> str:
    """Return the letter of the process state: "T" if stopped."""
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int, timeout_seconds: float = 10.0) -> None:
    """Send SIGSTOP and wait: when ``kill`` returns the signal is only pending, and a thread may still serve a call."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path("/proc") / str(pid) / "task"
    until(
        lambda: all(state_of(int(task.name)) == "T" for task in tasks.iterdir()),
        timeout_seconds, f"all threads of process {pid} are stopped",
    )  # fmt: skip


pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]

STEPS = 4_000
"""More than are trained: the ranks are ended with the last test."""


class LiveJob:
    """The processes of a demo, which run on by themselves. The daemon plans only on request."""

    def __init__(self, directory: Path) -> None:
        self._demo = Demo(
            DemoOptions(
                cluster=EmulatedCluster(link_mbit=0.0),
                batches=BatchOptions(HISTORY, 24, STEPS, SampleKind.IMPRESSIONS),
                out_dir=directory,
            ),
            directory,
        )
        config_file = directory / "flexd.yaml"
        config = yaml.safe_load(config_file.read_text())
        config["planner"] |= {"interval_seconds": 3600.0, "min_samples": 20_000}
        config["control"]["timeout_seconds"] = 5.0
        config_file.write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{config['server']['port']}"
        self.daemon = self._demo.daemon
        self.daemon.start(DAEMON_START_SECONDS)
        self.ranks = Ranks(self._demo.setup)

    def close(self) -> None:
        self.ranks.stop()
        self.daemon.kill()

    def cli(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return flexd(*arguments, "--url", self.url)

    def answer(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        done = self.cli(*arguments, "-o", "json")
        assert done.returncode == code, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def status(self) -> dict[str, Any]:
        return self.daemon.status() or {}

    def ready(self) -> bool:
        return bool(self.status().get("ready"))

    def version(self) -> int:
        """Placement version after the newest step that every rank has done."""
        return min(records[-1]["version"] for records in self.ranks.records)

    def steps_on(self, steps: int = 20) -> None:
        """Waits until every rank has gone on by so many steps."""
        now = self.ranks.step()
        until(lambda: self.ranks.running() and self.ranks.step() >= now + steps, 60, "training does not go on")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    job = LiveJob(tmp_path_factory.mktemp("job"))
    try:
        until(lambda: job.ranks.running() and job.ready(), 90, job.status)
        until(lambda: (job.status().get("last_plan") or {}).get("plan_id"), 90, job.status)
        until(lambda: job.status()["placement"]["version"] > 0, 90, job.status)  # its migration has ended
        yield job
    finally:
        job.close()


def test_replan_waits_until_every_rank_has_it(job: LiveJob) -> None:
    job.steps_on()
    result = job.answer("replan", "--wait", "--timeout", 40, "--reason", "by the test")
    assert result["outcome"] in ("committed", "unchanged")
    assert result["plan"]["reason"] == "by the test"
    if result["outcome"] == "committed":
        assert result["migration"]["state"] == "committed"
        assert result["migration"]["progress"] == 1.0
    assert result["placement_version"] >= 1
    until(lambda: job.version() >= result["placement_version"], 30)
    assert job.status()["last_plan"]["reason"] == "by the test"


def test_training_goes_on_while_the_daemon_is_stopped_and_it_recovers(job: LiveJob) -> None:
    pid = job.daemon.pid
    assert pid is not None
    records = job.ranks.records
    stop(pid)
    try:
        assert job.daemon.status() is None
        # Beyond the control channel's deadline of 5 s, so that the ranks' agents run into it.
        for _ in range(6):
            job.steps_on(20)
            assert job.daemon.status() is None
    finally:
        os.kill(pid, signal.SIGCONT)
    stopped_at = job.ranks.step()
    until(job.ready, 60, job.status)
    assert job.daemon.alive
    assert job.daemon.pid == pid
    result = job.answer("replan", "--wait", "--timeout", 60)
    assert result["outcome"] in ("committed", "unchanged")
    accesses = job.status()["stream"]["accesses"]
    until(lambda: job.status()["stream"]["accesses"] > accesses, 30, job.status)
    job.steps_on()
    assert job.ranks.step() > stopped_at
    versions = [[record["version"] for record in rank[: job.ranks.step()]] for rank in records]
    assert all(version[: len(versions[0])] == versions[0][: len(version)] for version in versions)
