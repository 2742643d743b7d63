"""The daemon as a real process that is killed and stopped; ranks as real processes with their own gloo group."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.repository import child_environment
from tests.support.until import until


def spawn(module: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=child_environment(),
    )  # fmt: skip


class DaemonProcess:
    """A daemon in a process of its own; ``events`` holds what it printed."""

    def __init__(self, directory: Path, port: int = 0, seed: int = 1, timeout_seconds: float = 3.0) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.process = spawn("daemon_process", port, directory, seed, 5, timeout_seconds)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.events.append(tuple(json.loads(line)))  # type: ignore[arg-type]

    def count(self, name: str) -> int:
        return sum(event == name for event, _ in list(self.events))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def daemons() -> Iterator[Callable[..., DaemonProcess]]:
    made: list[DaemonProcess] = []

    def make(*arguments: Any, **more: Any) -> DaemonProcess:
        made.append(DaemonProcess(*arguments, **more))
        return made[-1]

    yield make
    for daemon in made:
        daemon.kill()


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_daemon_killed_in_the_middle_of_migrations_continues_from_its_journal(
    daemons: Callable[..., DaemonProcess], tmp_path: Path, host: Callable[..., Any], kills: int
) -> None:
    daemon = daemons(tmp_path / "state")
    with Ranks(daemon.port, timeout_seconds=3.0) as ranks:
        for round_number in range(kills):
            version = ranks.placements[0].version
            until(lambda version=version: ranks.placements[0].version > version + 20, what=ranks.state())
            daemon.kill()
            steps = ranks.steps
            until(lambda steps=steps: ranks.steps > steps + 50)
            if round_number < kills - 1:
                daemon = daemons(tmp_path / "state", daemon.port, seed=10 + round_number)
                until(lambda daemon=daemon: daemon.count("epoch_live"), what=ranks.state())
                assert daemon.count("placement_listed") == 0
        final = host(tmp_path / "state", port=daemon.port)
        until(final.ready, what=ranks.state())
        migration = final.coordinator.migrate("final", lambda p: p.delta_to(target(5)).chunks(100))
        assert migration.wait(20) is MigrationState.COMMITTED
        assert final.coordinator.live().generation == 1
        assert ranks.all_at(target(5))
        assert same_content(ranks.history)
        assert len({placement.version for placement in ranks.placements}) == 1
        versions = [version for version, _ in ranks.history[0]]
        assert versions == list(range(1, len(versions) + 1))
        assert same_as_journal(tmp_path / "state", final, ranks)


def same_as_journal(directory: Path, final: Any, ranks: Ranks) -> bool:
    """Return whether the placement that the next daemon reads is that of the ranks."""
    final.close()
    journal = PlacementJournal(directory)
    version = ranks.placements[0].version
    return journal.placement_at(version).digest() == ranks.placements[0].digest()


def test_training_goes_on_while_the_daemon_is_stopped(daemons: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    daemon = daemons(tmp_path / "state", timeout_seconds=1.5)
    with Ranks(daemon.port, RankLayout(2, 1), timeout_seconds=1.0) as ranks:
        until(lambda: ranks.placements[0].version > 10, what=ranks.state())
        daemon.signal(signal.SIGSTOP)
        try:
            steps = ranks.steps
            errors = [rank.agent.counters.get("errors", 0) for rank in ranks.ranks]  # while the daemon started
            # Every agent passes its deadlines.
            until(
                lambda: all(
                    rank.agent.counters.get("errors", 0) >= before + 2
                    for rank, before in zip(ranks.ranks, errors, strict=True)
                ),
                what=ranks.state(),
            )
            assert ranks.steps > steps + 100
            version = ranks.placements[0].version
        finally:
            daemon.signal(signal.SIGCONT)
        until(lambda: ranks.placements[0].version > version + 10, what=ranks.state() + str(daemon.events[-5:]))
        assert same_content(ranks.history)
