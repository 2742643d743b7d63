"""The daemon as a real process that is killed and stopped while ranks train."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration_record import MigrationState
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, migrate, same_content, target
from tests.support.until import until


def daemon_on(
    start: Callable[..., Any], directory: Path, port: int = 0, seed: int = 1, timeout_seconds: float = 3.0
) -> Any:
    """Start a daemon in a process of its own and wait until it listens."""
    daemon = start("daemon_process", port, directory, seed, 5, timeout_seconds)
    until(lambda: daemon.lines)
    return daemon


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_daemon_killed_in_the_middle_of_migrations_continues_from_its_journal(
    start: Callable[..., Any], tmp_path: Path, host: Callable[..., Any], kills: int
) -> None:
    daemon = daemon_on(start, tmp_path / "state")
    port = daemon.lines[0]
    with Ranks(port, timeout_seconds=3.0) as ranks:
        for round_number in range(kills):
            version = ranks.placements[0].version
            until(lambda version=version: ranks.placements[0].version > version + 20, what=ranks.state())
            daemon.process.kill()
            daemon.process.wait(10)
            steps = ranks.steps
            until(lambda steps=steps: ranks.steps > steps + 50)
            if round_number < kills - 1:
                daemon = daemon_on(start, tmp_path / "state", port, seed=10 + round_number)
                until(lambda daemon=daemon: daemon.events("epoch_live"), what=ranks.state())
                assert daemon.events("placement_listed") == []
        final = host(tmp_path / "state", port=port)
        until(final.ready, what=ranks.state())
        migration = migrate(final.coordinator, "final", target(5), 100)
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


def test_training_goes_on_while_the_daemon_is_stopped(start: Callable[..., Any], tmp_path: Path) -> None:
    daemon = daemon_on(start, tmp_path / "state", timeout_seconds=1.5)
    with Ranks(daemon.lines[0], RankLayout(2, 1), timeout_seconds=1.0) as ranks:
        until(lambda: ranks.placements[0].version > 10, what=ranks.state())
        daemon.process.send_signal(signal.SIGSTOP)
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
            daemon.process.send_signal(signal.SIGCONT)
        until(lambda: ranks.placements[0].version > version + 10, what=ranks.state() + str(daemon.lines[-5:]))
        assert same_content(ranks.history)
