"""Daemons in this process, on a synthetic stream and without ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.daemon import Daemon
from tests.support.until import until

SHUTDOWN_SECONDS = 20.0


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that makes a configuration; its sections replace the usual ones."""

    def make(**sections: Any) -> Config:
        return parse_config(
            {
                "job": "j",
                "tables": [{"name": "item", "rows": 3_000, "dim": 4}],
                "stream": {"source": {"kind": "synthetic", "accesses_per_second": 20_000}, "poll_seconds": 0.05},
                "sketch": {"memory_bytes": 2**22},
                "control": {"listen_port": 0},
                "server": {"port": 0},
                "state": {"dir": str(tmp_path / "state"), "snapshot_interval_seconds": 3600.0},
                "shutdown_seconds": SHUTDOWN_SECONDS,
                **sections,
            }
        )

    return make


class Running:
    """The daemon's loop in a thread, as the main thread runs it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.daemon.start()
        self.ended: bool | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.ended = self.daemon.run_until_stopped()

    def stop(self) -> None:
        self.daemon.request_stop()
        self._thread.join(SHUTDOWN_SECONDS + 5)
        assert self.ended is True, "the daemon ends in order and within its deadline"

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, 30, self.daemon.status)


@pytest.fixture
def start() -> Iterator[Callable[[Config | Daemon], Running]]:
    """Return a function that runs a daemon; all of them are stopped at the end."""
    made: list[Running] = []

    def run(given: Config | Daemon) -> Running:
        made.append(Running(Daemon(given) if isinstance(given, Config) else given))
        return made[-1]

    yield run
    for running in made:
        running.stop()
