import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.pusher import Throttle
from flexd.core.placement import RankLayout
from flexd.stream.tap_source import TapSource
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.until import until


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


@pytest.fixture
def job(host: Callable[..., Hosted]) -> Callable[..., contextlib.AbstractContextManager[tuple[Hosted, Ranks]]]:
    """Return a function that makes a coordinator with live ranks."""

    @contextlib.contextmanager
    def make(layout: RankLayout | None = None, **options: object) -> Iterator[tuple[Hosted, Ranks]]:
        hosted = host(**options)
        with Ranks(hosted.port, layout) as ranks:
            until(hosted.ready, what=ranks.state)
            yield hosted, ranks

    return make
