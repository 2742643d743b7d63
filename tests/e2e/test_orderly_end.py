"""SIGTERM in mid-migration: the chunk is finished or abandoned, the state is saved, the next start continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexd.config.load import load_config
from flexd.config.model import Config
from flexd.control.daemon.journal import PlacementJournal
from flexd.demo.options import DemoOptions
from flexd.demo.processes import Ranks
from flexd.demo.runner import Demo
from flexd.sketch.snapshot import SnapshotStore, read
from flexd.stream.sample_kinds import SampleKind
from tests.support.flexd_processes import DAEMON_START_SECONDS
from tests.support.until import until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]

SHUTDOWN_SECONDS = 8.0
PINNED_ROWS = 480


class Job:
    """A daemon whose first plan moves what is pinned, so slowly that it is met in the middle; two ranks."""

    def __init__(self, directory: Path) -> None:
        demo = Demo(
            DemoOptions(
                link_mbit=0.0,
                steps=6_000,
                batch_size=24,
                nodes=2,
                local_ranks=1,
                samples=SampleKind.IMPRESSIONS,
                out_dir=directory,
            ),
            directory,
        )
        self.config_file = directory / "flexd.yaml"
        config = yaml.safe_load(self.config_file.read_text())
        pins = [{"table": config["tables"][0]["name"], "tier": "NODE", "rows": list(range(PINNED_ROWS))}]
        config["planner"] |= {
            "interval_seconds": 3600.0, "min_samples": 20_000, "drift_threshold": None, "pins": pins,
        }  # fmt: skip
        config["control"] |= {"timeout_seconds": 4.0, "chunk_rows": 8, "throttle": {"bytes_per_second": 1_200}}
        config["state"]["snapshot_interval_seconds"] = 3600.0
        config["shutdown_seconds"] = SHUTDOWN_SECONDS
        self.config_file.write_text(yaml.safe_dump(config))
        self.daemon = demo.daemon
        self._setup_file, self._directory = demo.setup_file, directory
        self.ranks: Ranks

    def start(self) -> None:
        self.daemon.start(DAEMON_START_SECONDS)
        self.ranks = Ranks(self._setup_file, 2, self._directory)

    @property
    def config(self) -> Config:
        return load_config(self.config_file, {})

    def close(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.stop()
        self.daemon.kill()

    def status(self) -> dict[str, Any]:
        return self.daemon.status() or {}

    def version(self) -> int:
        return min(records[-1]["version"] for records in self.ranks.records)

    def in_the_middle(self) -> None:
        def halfway() -> bool:
            assert self.ranks.running()
            migration = self.status().get("migration") or {}
            return migration.get("state") == "PUSHING" and migration["chunks_applied"] >= 2

        until(halfway, 90, self.status)

    def end(self) -> int | None:
        """SIGTERM; the exit code."""
        pid = self.daemon.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        # On a busy machine the interpreter itself takes a while to end.
        until(lambda: not self.daemon.alive, SHUTDOWN_SECONDS + 10, "the daemon does not end")
        return self.daemon.exit_code

    def same_versions(self) -> bool:
        steps = self.ranks.step()
        versions = [[record["version"] for record in records[:steps]] for records in self.ranks.records]
        return versions[0] == versions[1]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("orderly"))
    try:
        job.start()
        yield job
    finally:
        job.close()


@pytest.mark.long
def test_ended_in_the_middle_everything_is_saved_and_the_next_start_goes_on(job: Job) -> None:
    job.in_the_middle()
    accesses = job.status()["stream"]["accesses"]
    snapshots = SnapshotStore(job.config.state.dir / "snapshots", 3)
    before = len(snapshots.paths())
    assert job.end() == 0
    assert len(snapshots.paths()) > before, "no snapshot is due for an hour: this is the last one"
    read(snapshots.paths()[0])
    version = job.version()
    # Nothing is in the journal that is not whole, and everything is that the ranks have.
    journal = PlacementJournal(job.config.state.dir / "placement")
    assert journal.truncated_bytes == 0
    assert journal.last_version >= version > 0
    assert len(journal.placement_at(version)) > 0
    journal.close()
    step = job.ranks.step()
    until(lambda: job.ranks.running() and job.ranks.step() > step + 5, 60)
    assert job.version() == version

    job.daemon.start(DAEMON_START_SECONDS)
    until(lambda: job.status().get("ready"), 60, job.status)
    until(lambda: job.version() > version, 60, job.status)
    assert job.status()["stream"]["accesses"] < accesses + 10**7, "it goes on behind what was saved"
    assert job.same_versions()
