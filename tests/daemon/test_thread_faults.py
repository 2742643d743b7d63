"""An exception in any thread of the daemon is counted, shown and survived, or ends the daemon in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.core import fault_points as faults
from flexd.daemon import Daemon
from flexd.operations.autoplan import AutoPlanner
from tests.support.until import until

SHUTDOWN_SECONDS = 20.0


def config(directory: Path, **sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 3_000, "dim": 4}],
            "stream": {"source": {"kind": "synthetic", "accesses_per_second": 20_000}, "poll_seconds": 0.05},
            "sketch": {"memory_bytes": 2**22},
            "control": {"listen_port": 0},
            "planner": {"drift_interval_seconds": 0.05},
            "server": {"port": 0},
            "state": {"dir": str(directory / "state"), "snapshot_interval_seconds": 3600.0},
            "shutdown_seconds": SHUTDOWN_SECONDS,
            **sections,
        }
    )


class Running:
    """The daemon's loop in a thread, as the main thread runs it."""

    def __init__(self, config: Config) -> None:
        self.daemon = Daemon(config)
        self.daemon.start()
        self.ended: bool | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.ended = self.daemon.run_until_stopped()

    def until(self, condition: Callable[[], object]) -> Any:
        return until(condition, 30, self.daemon.status)

    def stop(self) -> None:
        self.daemon.request_stop()
        self._thread.join(SHUTDOWN_SECONDS + 5)
        assert self.ended is True, "the daemon ends in order and within its deadline"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def run(**sections: Any) -> Running:
        made.append(Running(config(tmp_path, **sections)))
        return made[-1]

    yield run
    faults.arm({})
    for running in made:
        running.stop()


def test_a_fault_of_planning_degrades_the_daemon_until_it_works_again(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = True

    def tick(_: AutoPlanner) -> None:
        if failing:
            raise KeyError("no such column")

    monkeypatch.setattr(AutoPlanner, "tick", tick)
    running = start()
    reasons = lambda: [reason for reason in running.daemon.ready().reasons if "planning" in reason]  # noqa: E731
    running.until(reasons)
    assert "KeyError: 'no such column'" in reasons()[0]
    assert running.daemon.health().ok, "a restart would not help, so the daemon is not unhealthy"
    failing = False
    running.until(lambda: not reasons())
