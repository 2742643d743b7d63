"""One of several daemons of a job: it leads while it holds the lease, and is a standby otherwise.

::

    STANDBY --lease acquired--> LEADING --lease lost, or the process stops--> STANDBY or end
       ^------ the state cannot be opened, or a part does not start: the lease is released for a while

Every leadership is a ``Daemon`` of its own with the directory of its term; no object of an earlier one is reused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

from flexd.api.config import ReloadReport
from flexd.api.errors import ProbeResult
from flexd.api.interface import DaemonApi
from flexd.api.leadership import LeadershipStatus
from flexd.api.status import Status
from flexd.config.availability import FileLease, KubernetesLease
from flexd.config.model import Config
from flexd.core.errors import ApiError, ConfigError, FlexdError
from flexd.core.process_start import ProcessStart
from flexd.core.signal_flag import SignalFlag
from flexd.core.supervision import Supervisor
from flexd.daemon import factory
from flexd.daemon.active_daemon import ActiveDaemon
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.service import HEALTHY_TICK_SECONDS, TICK_SECONDS, Daemon
from flexd.daemon.shutdown_budget import ShutdownBudget
from flexd.daemon.standby import Standby
from flexd.daemon.state_files import check_import_ended
from flexd.daemon.tables_from_ranks import TablesFromRanks
from flexd.ha.file_store import FileLeaseStore
from flexd.ha.kubernetes_store import KubernetesLeaseStore
from flexd.ha.leadership import Leadership
from flexd.ha.lease import Lease
from flexd.ha.lease_renewer import LeaseRenewer
from flexd.ha.lease_store import LeaseStore
from flexd.ha.term_directories import highest_term, open_term_directory
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics

logger = logging.getLogger("flexd")

MAX_TAKEOVER_SECONDS = 300.0
"""The loop does not tick while a large snapshot is read, which takes minutes."""
_RELOAD_SECONDS = 5.0
_SHARE_LEASE = 0.05
_SHARE_SERVER = 0.05


class HighAvailabilityDaemon(ActiveDaemon):
    """Leads or stands by; its API responds in both roles.

    Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Raises:
        FlexdError: the lease store or the state directory cannot be used.
    """

    def __init__(self, config: Config, file: ConfigFile | None = None) -> None:
        self._config = config
        self._file = file or ConfigFile(config)
        self._started = ProcessStart()
        self.supervisor = Supervisor()
        self._loop_watch = self.supervisor.watch("loop")
        factory.make_state_directory(config)
        self._state_dir = config.state.dir
        # A first term would copy a part of the import.
        check_import_ended(self._state_dir)
        settings = config.high_availability
        self._store = make_lease_store(config)
        # Unique for every start: a restarted process is another holder, with another term.
        identity = f"{settings.identity or socket.gethostname()}/{os.getpid()}-{os.urandom(4).hex()}"
        lease = Lease(self._store, identity, settings.duration_seconds, lambda: highest_term(self._state_dir))
        self._renewer = LeaseRenewer(lease, settings.renew_seconds, self.supervisor)
        self._standby = Standby(config, self._renewer, self._started, self.supervisor)
        self._leading: Daemon | TablesFromRanks | None = None
        self._starting = threading.Lock()
        """Held while a leadership starts, so that no settings are applied meanwhile."""
        self._term = self._failed_term = 0
        self._leadership_acquisitions = self._leadership_losses = 0
        self._taking_over = False
        self._stopping, self._reload_requested = SignalFlag(), SignalFlag()
        self._ticked_at = time.monotonic()
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)

    @property
    def address(self) -> str:
        """The address of the admin API."""
        return self._server.address

    @property
    def leads(self) -> bool:
        return self._leading is not None

    def start(self) -> None:
        """Serve the API and try to acquire the lease. Raises ApiError if an address is taken."""
        self._server.start()
        self._renewer.start()
        logger.info("flexd stands by as %s: API %s", self._renewer.lease.identity, self._server.address)

    def request_stop(self) -> None:
        """Make ``run_until_stopped`` end within ``shutdown_seconds``. Returns at once; safe in signal handlers."""
        self._stopping.set()

    def request_reload(self) -> None:
        """Make the loop reload the configuration file. Returns at once; safe in signal handlers."""
        self._reload_requested.set()

    def run_until_stopped(self) -> bool:
        """Lead and stand by in turn until a stop is requested or a thread cannot go on safely (``supervisor.fatal``).

        Returns whether every part ended in time.
        """
        try:
            while not self._stopping.wait(TICK_SECONDS) and not self.supervisor.fatal:
                self._ticked_at = time.monotonic()
                if self._reload_requested.is_set():
                    self._reload_requested.clear()
                    self._loop_watch.attempt(self._reload_quietly)
                self._tick()
        finally:
            in_time = self._stop()
        return in_time

    def _tick(self) -> None:
        lease = self._renewer.lease
        if self._leading is None:
            term = lease.term
            if term not in (0, self._failed_term):
                self._taking_over = True
                self._lead(term)
                self._taking_over = False
        elif lease.holds(self._term):
            self._leading.tick()
        else:
            self._leadership_losses += 1
            logger.warning("term %d is over: %s", self._term, self._standby.reason)
            # The loop does not tick meanwhile: stay below the limit of ``health``.
            self._stand_down(min(self._config.shutdown_seconds, HEALTHY_TICK_SECONDS / 2))

    def _reload_quietly(self) -> None:
        with contextlib.suppress(FlexdError):  # It is logged and counted.
            self.reload(who="SIGHUP")

    def _stop(self) -> bool:
        budget = ShutdownBudget(self._config.shutdown_seconds)
        budget.stop_part("leading", self._stand_down, reserve=_SHARE_LEASE + _SHARE_SERVER)
        # The lease is released last: the next leader finds the last snapshot, and this daemon no longer writes.
        budget.stop_part("lease", self._renewer.stop, reserve=_SHARE_SERVER)
        if budget.in_time:
            self._store.close()
        budget.stop_part("API", self._server.stop)
        return budget.in_time

    def _lead(self, term: int) -> None:
        lease = self._renewer.lease
        try:
            leadership = Leadership(open_term_directory(self._state_dir, term), term, partial(lease.holds, term))
            with self._starting:
                make = Daemon if self._config.tables else TablesFromRanks
                daemon = make(self._config, leadership, self._file, self.supervisor)
                daemon.start()
                self._term, self._leading = term, daemon
        except Exception as error:
            if not isinstance(error, FlexdError):
                self._loop_watch.count(error)
            logger.error("cannot lead in term %d: %s", term, error)
            self._standby.problem, self._failed_term = str(error), term
            self._renewer.release_for(2 * lease.duration_seconds)
            return
        self._standby.problem = ""
        self._leadership_acquisitions += 1
        logger.info("term %d: %s leads", term, lease.identity)

    def _stand_down(self, seconds: float) -> bool:
        daemon, self._leading = self._leading, None
        return daemon is None or daemon.stop(seconds)

    def active(self) -> DaemonApi:
        """Return the leading daemon, or the standby."""
        return self._leading or self._standby

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        """Implement ``DaemonApi.reload`` in both roles; a leader records it."""
        try:
            report = self._file.reload(self._apply_config)
        except FlexdError as error:
            self._record_reload(who, reason, error)
            raise
        self._record_reload(who, reason, report)
        return report

    def preview_reload(self) -> ReloadReport:
        """Implement ``DaemonApi.preview_reload`` in both roles."""
        leading = self._leading
        return self._file.preview(leading.check if leading is not None else lambda _: None)

    def _record_reload(self, who: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        leading = self._leading
        if leading is None:
            logger.info("config reload requested by %s: %s", who or "anonymous", reason)
        else:
            leading.record_reload(who, reason, outcome)

    def _apply_config(self, config: Config) -> None:
        if not self._starting.acquire(timeout=_RELOAD_SECONDS):
            raise ApiError("this daemon is taking over", status=503, remedy="reload when it leads")
        try:
            if self._leading is not None:
                self._leading.apply_config(config)
            self._config = config
        finally:
            self._starting.release()

    def status(self) -> Status:
        lease, seen = self._renewer.lease, self._renewer.lease.last_record
        leadership = LeadershipStatus(
            role="leader" if self._leading is not None else "standby",
            identity=lease.identity,
            lease=lease.location,
            term=0 if seen is None else seen.term,
            held_term=lease.term,
            holder=None if seen is None or not seen.holder else seen.holder,
            leadership_acquisitions=self._leadership_acquisitions,
            leadership_losses=self._leadership_losses,
            lease_failures=self._renewer.failures,
            problem=self._renewer.problem or self._standby.problem or None,
        )
        return self.active().status().model_copy(update={"leadership": leadership, "config": self._file.status()})

    def health(self) -> ProbeResult:
        silent = time.monotonic() - self._ticked_at
        if silent > (MAX_TAKEOVER_SECONDS if self._taking_over else HEALTHY_TICK_SECONDS):
            return ProbeResult(ok=False, reasons=(f"the loop has not ticked for {silent:.0f} s",))
        return self.active().health()


def make_lease_store(config: Config) -> LeaseStore:
    """Return the store of ``high_availability.lease``.

    Raises:
        LeaseError: the store cannot be used.
        ConfigError: no lease is configured.
    """
    settings = config.high_availability
    lease = settings.lease
    if isinstance(lease, FileLease):
        return FileLeaseStore(lease.path or Path(config.state.dir) / "lease")
    if isinstance(lease, KubernetesLease):
        return KubernetesLeaseStore(lease.name, lease.namespace, timeout_seconds=settings.renew_seconds)
    raise ConfigError("high_availability.lease.kind: none", remedy="set it to file or kubernetes")
