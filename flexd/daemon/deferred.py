"""A daemon that cannot count yet: its configuration lists no tables, or it cannot continue from the saved state.

::

    WAITING --the state directory has changed so that it can be used--> LEARNING or RUNNING
    LEARNING --all ranks of an attempt have said their tables, and the configuration fits them--> RUNNING
       ^------ the tables cannot be used, e.g. a pin names a table that there is not                 |
    RUNNING --an attempt with other tables may have the job--> RUNNING with these tables <-----------'

WAITING (``state.on_unusable: wait``) holds no lock of the directory: an operator runs ``flexd state reset`` meanwhile.
Nothing is read from the stream before RUNNING: what is published waits in the log. A start with tables in the
configuration or the state is RUNNING at once, without any rank. Each RUNNING is a ``Daemon`` of its own; counters of
tables that stay are kept, as after a change of ``tables`` in the configuration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexd.api.base import ProbeResult
from flexd.api.daemon import ReloadReport, threads_status
from flexd.api.routes import STATUS
from flexd.api.status import Status, base_status
from flexd.config.checks import check_config
from flexd.config.model import Config
from flexd.config.tables_file import load_tables, save_tables, with_tables
from flexd.control.daemon.table_learner import TableLearner
from flexd.control.daemon.table_proposals import ProposedTables
from flexd.core.errors import ApiError, FlexdError, StateVersionError, UnusableStateError
from flexd.core.supervision import Supervisor
from flexd.daemon import factory
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.loop import DaemonLoop
from flexd.daemon.service import Daemon
from flexd.daemon.shutdown_budget import ShutdownBudget
from flexd.daemon.state_files import StateLock, check_files, check_owner, open_state
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics

logger = logging.getLogger("flexd")

LOOK_SECONDS = 1.0
"""Time between two looks at a state directory that cannot be used."""
_SHARE_SERVER = 0.05


class DeferredDaemon(DaemonLoop):
    """Implements ``DaemonApi``: forwards to a ``Daemon``, or says what it waits for and refuses every command.

    Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Raises:
        FlexdError: as ``Daemon``, if there are tables and it does not wait for the state.
    """

    def __init__(
        self,
        config: Config,
        file: ConfigFile | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        super().__init__(config, file, supervisor)
        factory.make_state_directory(config)
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)
        self._daemon: Daemon | None = None
        self._learner: TableLearner | None = None
        self._lock: StateLock | None = None
        self._problem = ""
        """Why the state cannot be used, or the newest tables of ranks were not taken over."""
        self._seen: frozenset[tuple[str, int]] | None = None
        """The files of the state that cannot be used; None where they can."""
        self._look_at = 0.0
        self._open()

    @property
    def address(self) -> str:
        """The address of the admin API."""
        return self._server.address

    def start(self) -> None:
        """Start to serve; if a part fails, stop those that were started. Raises FlexdError as ``Daemon.start``."""
        try:
            self._server.start()
            self._begin()
        except BaseException:
            self.stop(self._config.shutdown_seconds)
            raise

    def tick(self) -> None:
        """Look at the state, learn tables, or tick the daemon; take other tables over."""
        if self._seen is not None:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_SECONDS
                self._loop_watch.attempt(self._look)
            return
        proposed = None
        if self._learner is not None:
            proposed = self._learner.tick()
        elif self._daemon is not None:
            self._daemon.tick()
            proposed = self._daemon.proposed_tables()
        else:  # neither could be started after the last take-over
            self._loop_watch.attempt(self._learn)
        if proposed is not None:
            self._loop_watch.attempt(lambda: self._take_over(proposed))

    def stop(self, seconds: float) -> bool:
        """Stop every part. Returns whether all ended within the deadline."""
        budget = ShutdownBudget(seconds)
        self._stop_learning()
        if self._daemon is not None:
            budget.stop_part("daemon", self._daemon.stop, reserve=_SHARE_SERVER)
        budget.stop_part("API", self._server.stop)
        return budget.in_time

    def _open(self) -> None:
        """Make the daemon if there are tables and the state can be used."""
        config, state = self._config, self._config.state
        try:
            check_owner(state.dir, config.job)
            check_files(state.dir, start_empty=state.on_unusable == "reset")
            tables = () if config.tables else load_tables(state.dir)
            if tables:
                self._file.tables_of_ranks = tables
            if tables or config.tables:
                self._use(with_tables(config, tables) if tables else config)
        except (UnusableStateError, StateVersionError) as error:
            if state.on_unusable != "wait":
                raise
            self._wait_for_state(error, _files(state.dir))
        else:
            self._seen = None

    def _begin(self) -> None:
        if self._daemon is not None:
            self._daemon.start()
        elif self._seen is None:
            self._learn()

    def _look(self) -> None:
        """Try again if the files of the state have changed."""
        if _files(self._config.state.dir) == self._seen:
            return
        try:
            self._open()
            self._begin()
        except FlexdError as error:
            # Another process has the directory or an address: no file shows when that ends.
            self._daemon = None
            self._wait_for_state(error, frozenset())

    def _wait_for_state(self, error: FlexdError, seen: frozenset[tuple[str, int]]) -> None:
        self._seen, before, self._problem = seen, self._problem, str(error)
        if self._problem != before:
            logger.error("flexd waits: %s", self._problem)

    def _learn(self, problem: str = "") -> None:
        self._lock = open_state(self._config.state.dir, self._config.job)
        try:
            self._learner = TableLearner(factory.control_options(self._config), self.supervisor)
            self._learner.problem = problem
            self._learner.start()
        except BaseException:
            self._stop_learning()
            raise
        logger.info("flexd waits for the tables of the ranks, which the configuration does not list")

    def _stop_learning(self) -> None:
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.stop()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_over(self, proposed: ProposedTables) -> None:
        """Continue with the tables of an attempt, if the configuration fits them."""
        config = with_tables(self._config, proposed.tables)
        try:
            check_config(config, "the configuration")
        except FlexdError as error:
            problem = f"{error.message} (tables of attempt {proposed.attempt!r})"
            if self._learner is not None:
                self._learner.problem = problem
            if problem != self._problem:
                self._problem = problem
                logger.error("the tables of the ranks cannot be taken over: %s", problem)
            return
        self._problem = ""
        self._stop_learning()
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.stop(self._config.shutdown_seconds)
        try:
            save_tables(self._config.state.dir, proposed.tables, proposed.attempt)
            self._file.tables_of_ranks = proposed.tables
            self._use(config).start()
        except FlexdError as error:
            self._daemon = None
            self._learn(f"{error.message} (tables of attempt {proposed.attempt!r})")
            raise
        logger.info("%d tables, of the ranks of attempt %r", len(proposed.tables), proposed.attempt)

    def _use(self, config: Config) -> Daemon:
        check_config(config, "the configuration, with the tables of the ranks")
        self._file.config = config
        takes_tables = not self._config.tables
        self._daemon = Daemon(config, self._file, self.supervisor, serves=False, takes_tables=takes_tables)
        return self._daemon

    def handler(self, name: str) -> Callable[..., Any]:
        """Return the handler of the daemon that is active now; the file is read again by this process itself.

        Raises:
            ApiError: there is no daemon yet; of all handlers but the status.
        """
        own: dict[str, Callable[..., Any]] = {"reload": self.reload, "preview_reload": self.preview_reload}
        if name in own:
            return own[name]
        daemon = self._daemon
        if daemon is not None:
            return daemon.handler(name)
        if name != STATUS.handler:
            remedy = "start the training, or list its tables in the configuration"
            if self._seen is not None:
                remedy = "run `flexd state show`"
            raise ApiError(self._reason(), status=503, remedy=remedy)
        return self.status

    def status(self) -> Status:
        daemon = self._daemon
        if daemon is not None:
            return daemon.status()
        base = base_status(self._config, self._started, self.health(), self.ready())
        return base.model_copy(update={"config": self._file.status(), "threads": threads_status(self.supervisor)})

    def health(self) -> ProbeResult:
        daemon = self._daemon
        return ProbeResult(ok=True) if daemon is None else daemon.health()

    def ready(self) -> ProbeResult:
        daemon = self._daemon
        if daemon is not None:
            return daemon.ready()
        return ProbeResult(ok=False, reasons=(self._reason(), *self.supervisor.reasons()))

    def _reason(self) -> str:
        if self._seen is not None:
            return f"state: {self._problem}"
        learner = self._learner
        missing = "starting" if learner is None else learner.reason()
        return f"no tables yet, the ranks are to say theirs: {missing}"

    def check(self, config: Config) -> None:
        """Raise FlexdError if ``apply_config`` would."""
        if self._daemon is not None:
            self._daemon.check(config)

    def apply_config(self, config: Config) -> None:
        """Apply settings of a reload. Raises FlexdError; nothing has changed then."""
        if self._daemon is not None:
            self._daemon.apply_config(config)
        elif self._learner is not None:
            self._learner.problem = ""
        # The tables of the ranks are not part of what the file says.
        self._config = config if self._config.tables else config.model_copy(update={"tables": []})

    def record_reload(self, requested_by: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        """Record the outcome of a reload."""
        if self._daemon is not None:
            self._daemon.record_reload(requested_by, reason, outcome)
        else:
            logger.info("config reload requested by %s: %s", requested_by or "anonymous", reason)


def _files(state_dir: Path) -> frozenset[tuple[str, int]]:
    """Return the files of the directory with the times of their last change: different after any change of them."""
    found = set()
    for path in (*state_dir.glob("*"), *state_dir.glob("*/*")):
        try:
            # The lock is touched by every attempt.
            if path.name != "lock":
                found.add((str(path), path.stat().st_mtime_ns))
        except OSError:
            continue
    return frozenset(found)
