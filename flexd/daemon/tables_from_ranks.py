"""A daemon whose configuration lists no tables: it takes them from the ranks and keeps them in its state.

::

    LEARNING --all ranks of an attempt have said their tables, and the configuration fits them--> RUNNING
       ^------ the tables cannot be used, e.g. a pin names a table that there is not                 |
    RUNNING --an attempt with other tables may have the job--> RUNNING with these tables <-----------'

Nothing is read from the stream while LEARNING: what is published meanwhile waits in the log. A start with tables in the
state is RUNNING at once, without any rank. Each RUNNING is a ``Daemon`` of its own; counters of tables that stay are
kept, as after a change of ``tables`` in the configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from flexd.api.base import ProbeResult
from flexd.api.daemon import ReloadReport, threads_status
from flexd.api.routes import STATUS, DaemonApi
from flexd.api.status import Status, base_status
from flexd.config.checks import check_config
from flexd.config.model import Config
from flexd.config.tables_file import load_tables, save_tables, with_tables
from flexd.control.daemon.coordinator_types import ControlOptions
from flexd.control.daemon.table_learner import TableLearner
from flexd.control.daemon.table_proposals import ProposedTables
from flexd.core.errors import ApiError, FlexdError
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

_SHARE_SERVER = 0.05


class InactiveDaemon(Protocol):
    """Refuses every command but the status. A subclass adds the status, the probes and the refusal."""

    def refusal(self) -> ApiError:
        """Return the error of every command."""
        ...

    def status(self) -> Status: ...

    def handler(self, name: str) -> Callable[..., Any]:
        """Return the status. Raises ApiError for all other handlers."""
        if name != STATUS.handler:
            raise self.refusal()
        return self.status


class TablesFromRanks(DaemonLoop):
    """Implements ``DaemonApi``: forwards to a ``Daemon``, or says what it waits for.

    Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Raises:
        FlexdError: as ``Daemon``, if tables are in the state.
    """

    def __init__(
        self,
        config: Config,
        file: ConfigFile | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        super().__init__(config, file, supervisor)
        factory.make_state_directory(config)
        state = config.state.dir
        check_owner(state, config.job)
        check_files(state, start_empty=config.state.on_unusable == "reset")
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)
        self._daemon: Daemon | None = None
        self._learning: _Learning | None = None
        self._problem = ""
        """Why the newest tables of ranks were not taken over."""
        tables = load_tables(state)
        if tables:
            self._file.tables_of_ranks = tables
            self._use(with_tables(config, tables))
        else:
            self._learning = _Learning(self)

    @property
    def address(self) -> str:
        """The address of the admin API."""
        return self._server.address

    def start(self) -> None:
        """Start to serve; if a part fails, stop those that were started. Raises FlexdError as ``Daemon.start``."""
        try:
            self._server.start()
            if self._daemon is not None:
                self._daemon.start()
            else:
                self._learn()
        except BaseException:
            self.stop(self._config.shutdown_seconds)
            raise

    def tick(self) -> None:
        """Learn tables, or tick the daemon; take other tables over."""
        learning, daemon = self._learning, self._daemon
        if learning is not None and learning.learner is not None:
            proposed = learning.learner.tick()
        elif daemon is not None:
            daemon.tick()
            proposed = daemon.proposed_tables()
        else:
            return
        if proposed is not None:
            self._loop_watch.attempt(lambda: self._take_over(proposed))

    def stop(self, seconds: float) -> bool:
        """Stop every part. Returns whether all ended within the deadline."""
        budget = ShutdownBudget(seconds)
        if self._learning is not None:
            self._learning.stop()
        if self._daemon is not None:
            budget.stop_part("daemon", self._daemon.stop, reserve=_SHARE_SERVER)
        budget.stop_part("API", self._server.stop)
        return budget.in_time

    def _learn(self, problem: str = "") -> None:
        self._learning = self._learning or _Learning(self)
        self._learning.start(factory.control_options(self._config), problem)
        logger.info("flexd waits for the tables of the ranks, which the configuration does not list")

    def _take_over(self, proposed: ProposedTables) -> None:
        """Continue with the tables of an attempt, if the configuration fits them."""
        config = with_tables(self._config, proposed.tables)
        learning = self._learning
        try:
            check_config(config, "the configuration")
        except FlexdError as error:
            problem = f"{error.message} (tables of attempt {proposed.attempt!r})"
            if learning is not None and learning.learner is not None:
                learning.learner.problem = problem
            if problem != self._problem:
                self._problem = problem
                logger.error("the tables of the ranks cannot be taken over: %s", problem)
            return
        self._problem = ""
        if learning is not None:
            learning.stop()
        daemon, self._daemon, self._learning = self._daemon, None, None
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
        self._daemon = daemon = Daemon(config, self._file, self.supervisor, takes_tables=True)
        return daemon

    def active(self) -> DaemonApi:
        """Return the daemon, or what refuses commands while there is none."""
        if self._daemon is not None:
            return self._daemon
        return self._learning or _Learning(self)

    def handler(self, name: str) -> Callable[..., Any]:
        """Return the handler of the daemon that is active now; the file is read again by this process itself."""
        own: dict[str, Callable[..., Any]] = {"reload": self.reload, "preview_reload": self.preview_reload}
        return own.get(name) or self.active().handler(name)

    def status(self) -> Status:
        return self.active().status()

    def health(self) -> ProbeResult:
        return self.active().health()

    def ready(self) -> ProbeResult:
        return self.active().ready()

    def check(self, config: Config) -> None:
        """Raise FlexdError if ``apply_config`` would."""
        if self._daemon is not None:
            self._daemon.check(config)

    def apply_config(self, config: Config) -> None:
        """Apply settings of a reload. Raises FlexdError; nothing has changed then."""
        if self._daemon is not None:
            self._daemon.apply_config(config)
        elif self._learning is not None and self._learning.learner is not None:
            self._learning.learner.problem = ""
        # The tables of the ranks are not part of what the file says.
        self._config = config if self._config.tables else config.model_copy(update={"tables": []})

    def record_reload(self, who: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        """Record the outcome of a reload."""
        if self._daemon is not None:
            self._daemon.record_reload(who, reason, outcome)
        else:
            logger.info("config reload requested by %s: %s", who or "anonymous", reason)


class _Learning(InactiveDaemon):
    """Implements ``DaemonApi`` while no tables are known: the status and the probes."""

    def __init__(self, owner: TablesFromRanks) -> None:
        self._owner = owner
        self.learner: TableLearner | None = None
        self._lock: StateLock | None = None

    def start(self, options: ControlOptions, problem: str) -> None:
        self._lock = open_state(self._owner._config.state.dir, self._owner._config.job)
        try:
            self.learner = TableLearner(options, self._owner.supervisor)
            self.learner.problem = problem
            self.learner.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        learner, self.learner = self.learner, None
        if learner is not None:
            learner.stop()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def status(self) -> Status:
        owner = self._owner
        base = base_status(owner._config, owner._started, self.health(), self.ready())
        return base.model_copy(update={"config": owner._file.status(), "threads": threads_status(owner.supervisor)})

    def health(self) -> ProbeResult:
        return ProbeResult(ok=True)

    def ready(self) -> ProbeResult:
        return ProbeResult(ok=False, reasons=(self._reason(), *self._owner.supervisor.reasons()))

    def refusal(self) -> ApiError:
        return ApiError(
            self._reason(), status=503, remedy="start the training, or list its tables in the configuration"
        )

    def _reason(self) -> str:
        missing = "starting" if self.learner is None else self.learner.reason()
        return f"no tables yet, the ranks are to say theirs: {missing}"
