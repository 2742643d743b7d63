"""flexd as users run it: commands, daemons and training jobs as processes, each with a deadline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from flexd.config.model import Config, load_config
from flexd.daemon.config_file import sketch_settings
from flexd.demo.processes import DaemonProcess, free_ports
from flexd.sketch.sketch_set import SketchSet
from tests.support.repository import ROOT
from tests.support.saved_sketches import loaded_sketches, newest_snapshot
from tests.support.until import until

DAEMON_START_SECONDS = 90.0
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def run(*arguments: object, seconds: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in the root of the repository, with its output in pipes."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEXD_")} | environment
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=environ,
        check=False,
    )  # fmt: skip


def flexd(*arguments: object, seconds: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "flexd", *arguments, seconds=seconds, **environment)


class RunningDaemon:
    """Run ``flexd run`` on a configuration written for it, with its API and control channel on free ports."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        control_port, http_port = free_ports(2)
        settings = {
            "job": "test",
            "state": {"dir": str(directory / "state"), "snapshot_interval_seconds": 0.5},
            **settings,
            "control": {"listen_port": control_port, **settings.get("control", {})},
            "server": {"port": http_port, **settings.get("server", {})},
        }
        self.config_file = directory / "flexd.yaml"
        self.config_file.write_text(yaml.safe_dump(settings))
        self.url = f"http://127.0.0.1:{http_port}"
        self.process = DaemonProcess(self.config_file, self.url, directory)

    def __enter__(self) -> RunningDaemon:
        self.process.start(DAEMON_START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()

    @property
    def config(self) -> Config:
        return load_config(self.config_file, {})

    def status(self) -> dict[str, Any]:
        """Return the daemon's status; one request may time out on a busy machine, so it is repeated."""
        return until(self._status_if_alive, DAEMON_START_SECONDS, lambda: f"no status of {self.url}")

    def _status_if_alive(self) -> dict[str, Any] | None:
        assert self.process.alive, f"the daemon ended with exit code {self.process.exit_code}"
        return self.process.status()

    def metrics(self) -> dict[str, float]:
        """Return the samples of the metrics page by ``name`` or ``name{values of its labels}``."""
        page = httpx.get(f"{self.url}/metrics", timeout=10).text
        found = {}
        for line in page.splitlines():
            match = _SAMPLE.match(line)
            if match:
                labels = ",".join(value for _, value in _LABEL.findall(match[2] or ""))
                found[f"{match[1]}{{{labels}}}" if labels else match[1]] = float(match[3])
        return found


def saved_sketches(config: Config) -> SketchSet:
    """Return the counters in the newest snapshot of a daemon."""
    meta, arrays = newest_snapshot(config.state.dir / "snapshots")
    return loaded_sketches(config.keyspace().tables, sketch_settings(config), meta["sketches"], arrays)


def weights(sketches: SketchSet, config: Config) -> dict[str, np.ndarray]:
    """Return the decayed accesses of every row, by table."""
    return {table.name: sketches.query(table.name, np.arange(table.rows)) for table in config.tables}
