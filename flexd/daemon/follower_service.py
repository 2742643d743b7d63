"""The life cycle of a follower: it counts, pushes and tells about itself; it plans nothing.

Without ``tables`` in its configuration it has those of its leader::

    WAITING --the leader sends its tables, and the configuration fits them--> COUNTING
    COUNTING --the leader refuses counts because its tables are others-----> COUNTING with these tables

Nothing is read from the stream while WAITING. A start with tables in the state is COUNTING at once. Counts that the
leader refuses for its new tables are dropped: they lie above its positions, and are read again from there.
"""

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
from flexd.config.checks import check_config
from flexd.config.model import Config
from flexd.core.errors import ApiError, FlexdError
from flexd.core.keyspace import TableSpec
from flexd.core.process_start import ProcessStart
from flexd.core.signal_flag import SignalFlag
from flexd.core.supervision import Supervisor
from flexd.daemon import factory, tables_of_follower
from flexd.daemon.active_daemon import InactiveDaemon
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.follower_inspection import FollowerInspection
from flexd.daemon.scale_out import FollowerUnit, remote_follower, tables_request
from flexd.daemon.shutdown_budget import ShutdownBudget
from flexd.scaleout.tables_request import TablesRequest
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
        self._inspection = FollowerInspection(config)
        self._lists_tables = bool(config.tables)
        self._problem = ""
        """Why the leader's newest tables are not in use."""
        self._rejected: tuple[Config, tuple[TableSpec, ...]] | None = None
        self._unit: FollowerUnit | None = None
        self._request: TablesRequest | None = None
        known = config if self._lists_tables else tables_of_follower.with_tables_of_state(config)
        if known.tables:
            self._unit = self._unit_with(known)
        else:
            self._request = tables_request(config, self.supervisor)
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)
        self._stopping, self._reload_requested = SignalFlag(), SignalFlag()

    @property
    def address(self) -> str:
        """The address of the admin API."""
        return self._server.address

    def start(self) -> None:
        """Starts every part, or none. Raises ApiError if an address is taken."""
        self._server.start()
        if self._unit is not None:
            self._unit.start()
        elif self._request is not None:
            self._request.start()
            logger.info("flexd waits for the leader's tables, which the configuration does not list")
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
        if self._unit is not None:
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
                self.tick()
        finally:
            in_time = self._stop()
        return in_time

    def tick(self) -> None:
        """Go on with the leader's tables if they are others and the configuration lists none."""
        if self._lists_tables:
            return
        unit, request = self._unit, self._request
        tables = unit.leader_tables() if unit is not None else request.leader_tables() if request is not None else ()
        known = self._file.tables_of_ranks if unit is not None else None
        if tables and tables != known and self._rejected != (self._config, tables):
            self._loop_watch.attempt(lambda: self._replace_tables(tables))

    def _replace_tables(self, tables: tuple[TableSpec, ...]) -> None:
        """Count with these tables from now on. Raises FlexdError; it waits for tables again then."""
        config = tables_of_follower.with_tables(self._config, tables)
        try:
            check_config(config, "the configuration")
        except FlexdError as error:
            self._rejected, self._problem = (self._config, tables), f"{error.message} (tables of the leader)"
            logger.error("the leader's tables cannot be used: %s", self._problem)
            return
        tables_of_follower.save(config)
        seconds = self._config.shutdown_seconds
        if self._unit is not None and not self._unit.discard(seconds):
            logger.warning("the ingest with the former tables has not ended within %g s; it is stopped again", seconds)
            return
        if self._request is not None:
            self._request.stop(1.0)
        self._unit = self._request = None
        self._problem, self._rejected = "", None
        try:
            unit = self._unit_with(config)
            unit.start()
        except FlexdError as error:
            self._problem = error.message
            self._request = request = tables_request(self._config, self.supervisor)
            request.start()
            raise
        self._unit = unit
        logger.info("%d tables, of the leader", len(tables))

    def _unit_with(self, config: Config) -> FollowerUnit:
        """Build the unit and make this configuration the one in effect."""
        unit = remote_follower(config, self.supervisor)
        if not self._lists_tables:
            self._file.tables_of_ranks = config.keyspace().tables
        self._config = self._file.config = config
        self._inspection = FollowerInspection(config)
        return unit

    def _reload_quietly(self) -> None:
        with contextlib.suppress(FlexdError):  # It is logged and counted.
            self.reload(who="SIGHUP")

    def _stop(self) -> bool:
        seconds = self._config.shutdown_seconds
        budget = ShutdownBudget(seconds)
        if self._unit is not None:
            budget.stop_part("ingest", self._unit.stop, reserve=1.0 - _SHARE_INGEST)
        if self._request is not None:
            budget.stop_part("the request for tables", self._request.stop, reserve=1.0 - _SHARE_INGEST)
        budget.stop_part("API", self._server.stop)
        return budget.in_time

    def status(self) -> Status:
        base = base_status(self._config, self._started, self.health(), self.ready())
        unit, leader = self._unit, self._config.scale_out.leader or ""
        update: dict[str, object] = {"config": self._file.status(), "threads": threads_status(self.supervisor)}
        link = unit or self._request
        if unit is not None:
            update["stream"] = stream_status(self._config, unit.ingestor.stats())
            update["sketch"] = sketch_status(unit.ingestor.choices(), None, math.nan)
        if link is not None:
            update["scale_out"] = follower_status(leader, link.stats())
        return base.model_copy(update=update)

    @property
    def inspect(self) -> InspectApi:
        return self._inspection

    def health(self) -> ProbeResult:
        unit = self._unit
        if unit is None or self._stopping.is_set() or unit.ingestor.stats().running:
            return ProbeResult(ok=True)
        return ProbeResult(ok=False, reasons=("the ingest thread has ended",))

    def ready(self) -> ProbeResult:
        unit, request = self._unit, self._request
        reasons = [self._problem] if self._problem else []
        if unit is not None:
            reasons += unit.ingestor.stats().not_ready
        elif not self._problem:
            missing = "they are being replaced" if request is None else request.missing()
            reasons.append(f"no tables yet, the leader is to send its own: {missing}")
        reasons += self.supervisor.reasons()
        if self._stopping.is_set():
            reasons.append("shutting down")
        return ProbeResult(ok=not reasons, reasons=tuple(reasons))

    def refusal(self) -> ApiError:
        return ApiError(
            "a follower plans and moves nothing", status=409, remedy=f"ask the leader ({self._config.scale_out.leader})"
        )
