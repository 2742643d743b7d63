from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.throttle import Throttle
from flexd.stream.tap_source import TapSource
from tests.support.ranks_in_threads import SECRET, TABLES
from tests.support.repository import child_environment


class Hosted:
    """A coordinator in this process, with its reports and events."""

    def __init__(
        self,
        directory: Path,
        port: int = 0,
        tap: TapSource | None = None,
        throttle: Throttle | None = None,
        **options: object,
    ) -> None:
        self.journal = PlacementJournal(directory)
        self.reports: list[tuple[int, object]] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        settings: dict[str, object] = {"timeout_seconds": 4.0, "tick_seconds": 0.005, "secret": SECRET, **options}
        self.coordinator = Coordinator(
            ControlOptions("job", listen_port=port, **settings), TABLES, self.journal,  # type: ignore[arg-type]
            on_report=lambda rank, report: self.reports.append((rank, report)),
            on_event=lambda name, fields: self.events.append((name, dict(fields))), tap=tap,
            throttle=throttle,
        )  # fmt: skip
        self.coordinator.start()
        self.port = self.coordinator.port

    def ready(self) -> bool:
        live = self.coordinator.live()
        return live is not None and live.ready

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def close(self) -> None:
        assert self.coordinator.stop(15)
        self.journal.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Hosted]]:
    """Return a function that makes coordinators; a second one in the same directory stands for a restarted daemon."""
    made: list[Hosted] = []

    def make(directory: Path | None = None, **options: object) -> Hosted:
        made.append(Hosted(directory or tmp_path / "state", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for hosted in made:
        hosted.coordinator.stop(15)
        hosted.journal.close()


class ChildProcess:
    """A process of ``tests.support``; its lines of JSON are read as they come."""

    def __init__(self, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=child_environment(),
        )  # fmt: skip
        self.lines: list[Any] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(json.loads(line))

    def events(self, name: str) -> list[Any]:
        return [line[1] for line in list(self.lines)[1:] if line[0] == name]

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])


@pytest.fixture
def start() -> Iterator[Callable[..., ChildProcess]]:
    made: list[ChildProcess] = []

    def run(module: str, *arguments: object) -> ChildProcess:
        made.append(ChildProcess(module, *arguments))
        return made[-1]

    yield run
    for process in made:
        process.process.kill()
        process.process.wait(10)
