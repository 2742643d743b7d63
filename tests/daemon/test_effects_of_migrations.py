"""A running daemon keeps what migrations saved: at the next migration, when the ranks change, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flexd.config.load import parse_config
from flexd.control.daemon.migration_record import EffectRecord
from flexd.control.daemon.migration_states import MigrationState
from flexd.daemon import Daemon
from flexd.operations.history import MigrationHistory
from flexd.operations.state_file import NAME, StateFile
from flexd.operations.triggers import Trigger, TriggerKind
from tests.support.ranks_in_threads import Ranks, target
from tests.support.until import until

SECONDS = 30.0
SHUTDOWN_SECONDS = 20.0


class Trained:
    """A daemon with four ranks whose steps take as long as ``seconds`` says for their placement version."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seconds = 0.1
        self.daemon = Daemon(
            parse_config({
                "job": "job",
                "tables": [{"name": "item", "rows": 50_000, "dim": 8}, {"name": "shop", "rows": 1_000, "dim": 16}],
                "stream": {"source": {"kind": "synthetic", "accesses_per_second": 1_000}},
                "control": {"listen_port": 0},
                "server": {"port": 0},
                "planner": {"auto": False},
                "state": {"dir": str(directory / "state")},
                "shutdown_seconds": SHUTDOWN_SECONDS,
            })
        )  # fmt: skip
        self.daemon.start()
        self.stopped = False

    def ranks(self, attempt: str) -> Ranks:
        ranks = Ranks(self.daemon.control_port, secret=None, attempt=attempt)
        ranks.reported = lambda _, report: replace(report, step_seconds=self.seconds)
        return ranks

    def move(self, name: str, seed: int, seconds: float) -> None:
        """Migrate, train at the new version with steps of these seconds, and wait until they are measured."""
        until(self.daemon._coordinator.live, SECONDS, self.state)
        live = self.daemon._coordinator.live()
        assert live is not None
        until(lambda: self.measured_at(self.daemon._coordinator.placement().version), SECONDS)
        done = self.daemon._planning.executions.start_move(
            name, target(seed), live.generation, Trigger(TriggerKind.MANUAL, "", "ada"), live
        )
        self.seconds = seconds
        assert done.migration.wait(SECONDS) is MigrationState.COMMITTED
        until(lambda: self.measured_at(done.migration.record.last_version), SECONDS)

    def state(self) -> str:
        return str(self.daemon.status().topology)

    def generation(self) -> int:
        live = self.daemon._coordinator.live()
        return 0 if live is None else live.generation

    def measured_at(self, version: int) -> bool:
        steps = self.daemon._training.step_times.at_version(version)
        return steps is not None and steps.steps > 2

    def kept(self, name: str) -> EffectRecord | None:
        self.daemon._history.flush(1.0)
        found = MigrationHistory(StateFile(self.directory / "state" / NAME), 100).find(name)
        return None if found is None else found.effect

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            assert self.daemon.stop(SHUTDOWN_SECONDS)


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(tmp_path)
    yield trained
    trained.stop()


def saved(effect: EffectRecord | None) -> bool:
    """Return whether steps before and after were measured, the later ones shorter."""
    return effect is not None and effect.saving_seconds is not None and effect.saving_seconds > 0


def test_the_effect_is_kept_when_the_daemon_ends(it: Trained) -> None:
    with it.ranks("a1"):
        it.move("m1", 1, 0.05)
        assert it.kept("m1") is None
        it.stop()
    assert saved(it.kept("m1"))
