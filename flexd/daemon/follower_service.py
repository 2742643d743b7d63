"""The life cycle of a follower: it counts, pushes and tells about itself; it plans nothing."""

from __future__ import annotations

import contextlib
import logging
import math

from flexd.api.config import ReloadReport
from flexd.api.errors import ProbeResult
from flexd.api.interface import InspectApi
from flexd.api.scale_out import follower_status
from flexd.api.sketch import sketch_status
from flexd.api.status import Status, base_status
from flexd.api.stream import stream_status
from flexd.api.threads import threads_status
from flexd.config.model import Config
from flexd.core.errors import ApiError, FlexdError
from flexd.core.process_start import ProcessStart
from flexd.core.signal_flag import SignalFlag
from flexd.core.supervision import Supervisor
from flexd.daemon import factory
from flexd.daemon.active_daemon import InactiveDaemon
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.follower_inspection import FollowerInspection
from flexd.daemon.scale_out import remote_follower
from flexd.daemon.shutdown_budget import ShutdownBudget
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics

logger = logging.getLogger("flexd")

_SHARE_INGEST = 0.7
TICK_SECONDS = 0.1


class FollowerDaemon(InactiveDaemon):
    """Implements ``DaemonApi``; the verbs that plan or push are refused with the leader's address.

    Raises:
        FlexdError: a part cannot be made from the configuration.
    """

    def __init__(self, config: Config, file: ConfigFile | None = None) -> None:
        self._config = config
        self._file = file or ConfigFile(config)
        self._started = ProcessStart()
        self.supervisor = Supervisor()
        self._loop_watch = self.supervisor.watch("loop")
        factory.make_state_directory(config)
        self._unit = remote_follower(config, self.supervisor)
        self._inspection = FollowerInspection(config)
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)
        self._stopping, self._reload_requested = SignalFlag(), SignalFlag()

    @property
    def address(self) -> str:
        """The address of the admin API."""
        return self._server.address

    def start(self) -> None:
        """Starts every part, or none. Raises ApiError if an address is taken."""
        self._server.start()
        self._unit.start()
        logger.info("flexd follows %s: API %s", self._config.scale_out.leader, self._server.address)

    def request_stop(self) -> None:
        """Make ``run_until_stopped`` end within ``shutdown_seconds``. Returns at once; safe in signal handlers."""
        self._stopping.set()

    def request_reload(self) -> None:
        """Make the loop reload the configuration file. Returns at once; safe in signal handlers."""
        self._reload_requested.set()

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        """Reload the hot keys that a follower uses: log lines, snapshots and its shutdown. It keeps no history."""
        logger.info("config reload requested by %s: %s", who or "anonymous", reason)
        return self._file.reload(self._apply_config)

    def preview_reload(self) -> ReloadReport:
        """Implement ``DaemonApi.preview_reload``."""
        return self._file.preview(lambda _: None)

    def _apply_config(self, config: Config) -> None:
        self._config = config
        self._unit.ingestor.set_snapshot_interval(config.state.snapshot_interval_seconds)

    def run_until_stopped(self) -> bool:
        """Run until a stop is requested or a thread cannot go on safely (``supervisor.fatal``), then stop.

        Returns whether every part ended within the deadline.
        """
        try:
            while not self._stopping.wait(TICK_SECONDS) and not self.supervisor.fatal:
                if self._reload_requested.is_set():
                    self._reload_requested.clear()
                    self._loop_watch.attempt(self._reload_quietly)
        finally:
            in_time = self._stop()
        return in_time

    def _reload_quietly(self) -> None:
        with contextlib.suppress(FlexdError):  # It is logged and counted.
            self.reload(who="SIGHUP")

    def _stop(self) -> bool:
        seconds = self._config.shutdown_seconds
        budget = ShutdownBudget(seconds)
        budget.stop_part("ingest", self._unit.stop, reserve=1.0 - _SHARE_INGEST)
        budget.stop_part("API", self._server.stop)
        return budget.in_time

    def status(self) -> Status:
        base = base_status(self._config, self._started, self.health(), self.ready())
        return base.model_copy(
            update={
                "stream": stream_status(self._config, self._unit.ingestor.stats()),
                "sketch": sketch_status(self._unit.ingestor.choices(), None, math.nan),
                "config": self._file.status(),
                "threads": threads_status(self.supervisor),
                "scale_out": follower_status(self._config.scale_out.leader or "", self._unit.stats()),
            }
        )

    @property
    def inspect(self) -> InspectApi:
        return self._inspection

    def health(self) -> ProbeResult:
        if self._stopping.is_set() or self._unit.ingestor.stats().running:
            return ProbeResult(ok=True)
        return ProbeResult(ok=False, reasons=("the ingest thread has ended",))

    def ready(self) -> ProbeResult:
        reasons = list(self._unit.ingestor.stats().not_ready)
        reasons += self.supervisor.reasons()
        if self._stopping.is_set():
            reasons.append("shutting down")
        return ProbeResult(ok=not reasons, reasons=tuple(reasons))

    def refusal(self) -> ApiError:
        return ApiError(
            "a follower plans and moves nothing", status=409, remedy=f"ask the leader ({self._config.scale_out.leader})"
        )
