"""Daemons in this process, on a synthetic stream and without ranks."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexd.config.model import Config, load_config, parse_config
from flexd.daemon import Daemon
from flexd.daemon.config_file import ConfigFile
from tests.support.until import until

SHUTDOWN_SECONDS = 20.0


def settings(directory: Path) -> dict[str, Any]:
    """Return the usual configuration of a test, with its state in a directory."""
    return {
        "job": "j",
        "tables": [{"name": "item", "rows": 3_000, "dim": 4}],
        "stream": {"source": {"kind": "synthetic", "accesses_per_second": 20_000}, "poll_seconds": 0.05},
        "sketch": {"memory_bytes": 2**22},
        "control": {"listen_port": 0},
        "server": {"port": 0},
        "state": {"dir": str(directory / "state"), "snapshot_interval_seconds": 3600.0},
        "shutdown_seconds": SHUTDOWN_SECONDS,
    }


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that makes a configuration; its sections replace the usual ones."""
    return lambda **sections: parse_config(settings(tmp_path) | sections)


class DaemonOnFile:
    """A daemon, not started, on a file that the test changes."""

    def __init__(self, directory: Path, **sections: Any) -> None:
        self.path = directory / "flexd.yaml"
        self.settings = settings(directory) | sections
        self.write()
        config = load_config(self.path, {})
        self.daemon = Daemon(config, ConfigFile(config, self.path, {}))

    def write(self, **sections: Any) -> None:
        self.path.write_text(yaml.safe_dump(self.settings | sections))


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
