"""One daemon: build, start, tick, stop.

::

    WAITING --the state directory has changed so that it can be used--> LEARNING or RUNNING     LEARNING --all ranks of
an attempt have said their tables, and the configuration fits them--> RUNNING        ^------ the tables cannot be used,
e.g. a pin names a table that there is not                 |     RUNNING --an attempt with other tables may have the
job--> RUNNING with these tables <-----------'

WAITING (``state.on_unusable: wait``) holds no lock of the directory: an operator runs ``flexd state reset`` meanwhile.
Nothing is read from the stream before RUNNING: what is published waits in the log. A start with tables in the
configuration or the state is RUNNING at once, without any rank. Each RUNNING has ``DaemonComponents`` of its own;
counters of tables that stay are kept, as after a change of ``tables`` in the configuration.
"""

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

from flexd.api.base import ProbeResult
from flexd.api.routes import Answer, Operation
from flexd.api.status import DaemonStatus, ReloadReport, base_status, threads_status
from flexd.config.model import Config, check_config
from flexd.control.daemon.coordinator import TableLearner
from flexd.control.daemon.membership import ProposedTables
from flexd.core.errors import ApiError, FlexdError, StateVersionError, UnusableStateError, named_error
from flexd.core.fast_start import resume_garbage_collector
from flexd.core.supervision import EXIT_UNSAFE_STATE, Supervisor, UnsafeStateError, arm, set_up_logging
from flexd.daemon.components import DaemonComponents, ShutdownBudget
from flexd.daemon.config_file import ConfigFile, control_options, load_tables, save_tables, with_tables
from flexd.daemon.state_directory import StateLock, check_files, open_state
from flexd.operations.decisions import NAME, StateDatabase
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer

logger = logging.getLogger("flexd")

TICK_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""Time between two looks at a state directory that cannot be used."""
HEALTHY_TICK_SECONDS = 30.0
"""The daemon is unhealthy if its loop has not ticked for this long; planning a large job takes seconds."""
STALE_SECONDS = 1.0
"""A request makes an older status anew: the loop is at work on a plan."""
RENEWAL_SHARE = 0.01
"""Largest share of time spent on making the status: one that took long is kept for longer."""
_OWN_HANDLERS = ("status", "reload", "preview_reload")


class Daemon:
    """Implements ``DaemonApi``. Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Args:
        file: the file that the configuration was read from, for reloads; it has the configuration in effect.

    Attributes:
        supervisor: records the faults of every thread.

    Raises:
        FlexdError: a part cannot be created from the configuration; nothing is left running.
    """

    def __init__(self, config: Config, file: ConfigFile | None = None) -> None:
        self._file = file or ConfigFile(config)
        self._takes_tables = not config.tables
        self._started_unix_seconds, self._started_at = time.time(), time.monotonic()
        self.supervisor = Supervisor()
        works = ("", "drift", "planning", "tables", "status")
        self._watches = {work: self.supervisor.watch("loop", work) for work in works}
        # Looked at between two ticks. No ``threading.Event``: a signal handler that runs inside ``Event.wait``, which
        # holds the event's lock, would block for ever in ``Event.set``.
        self._stop_requested = self._reload_requested = False
        self._ticked_at = time.monotonic()
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)
        self._lock: StateLock | None = None
        self._state = StateDatabase(config.state.dir / NAME)
        self._learner: TableLearner | None = None
        self._components: DaemonComponents | None = None
        # Why the state cannot be used, or the newest tables of ranks were not taken over.
        self._problem = ""
        # The files of the state that cannot be used; None where they can.
        self._seen: frozenset[tuple[str, int]] | None = None
        self._look_at = 0.0
        self._renewing = threading.Lock()
        self._build()
        self.renew_status()

    @property
    def _config(self) -> Config:
        """The configuration in effect, with the tables of the ranks if it lists none and they are known."""
        return self._file.config

    @property
    def address(self) -> str:
        """The address of the admin API."""
        return self._server.address

    @property
    def components(self) -> DaemonComponents:
        """Those of a running daemon. Raises ApiError (503) while it waits for its state or its tables."""
        components = self._components
        if components is None:
            remedy = "start the training, or list its tables in the configuration"
            if self._seen is not None:
                remedy = "run `flexd state show`"
            raise ApiError(self._reason(), status=503, remedy=remedy)
        return components

    def start(self) -> None:
        """Start every part and serve the API; if one fails, stop those that were started.

        Raises:
            FlexdError: an address is taken, or a part cannot start.
        """
        try:
            # A taken address is found before any rank is served.
            self._server.bind()
            self._begin()
            self.renew_status()
            self._server.start()
        except BaseException:
            self.stop(self._config.shutdown_seconds)
            raise
        port = self._components.coordinator.port if self._components else self._config.control.listen_port
        logger.info("flexd is up: API %s, control channel %s:%d", self.address, self._config.control.listen_host, port)

    def run_until_stopped(self) -> bool:
        """Tick until a stop is requested or a thread cannot go on safely (``supervisor.fatal``), then stop.

        Returns whether every part ended within the deadline.
        """
        try:
            while not self._stop_requested and not self.supervisor.fatal:
                if self._reload_requested:
                    self._reload_requested = False
                    self._watches[""].attempt(self._reload_quietly)
                self.tick()
                time.sleep(TICK_SECONDS)
        finally:
            ended = self.stop(self._config.shutdown_seconds)
        return ended

    def request_stop(self) -> None:
        """Make ``run_until_stopped`` end within ``shutdown_seconds``. Returns at once; safe in signal handlers."""
        self._stop_requested = True

    def request_reload(self) -> None:
        """Make the loop reload the configuration file. Returns at once; safe in signal handlers."""
        self._reload_requested = True

    def tick(self) -> None:
        """Look at the state, learn tables, or do the periodic work of the parts; take other tables over.

        What that raises is recorded by the supervisor and attempted again after a back-off; the loop ticks on.
        """
        self._ticked_at = time.monotonic()
        if self._seen is not None:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_SECONDS
                self._watches[""].attempt(self._look)
        else:
            self._watches[""].attempt(self._work)
            if self._components is not None:
                self._watches["drift"].attempt(self._components.drift.tick)
                if self._components.operator.paused is None:
                    self._watches["planning"].attempt(self._components.auto.tick)
        if time.monotonic() >= self._renew_at:
            self._watches["status"].attempt(self.renew_status)

    def _work(self) -> None:
        proposed = None
        if self._learner is not None:
            proposed = self._learner.tick()
        elif self._components is not None:
            self._components.tick()
            proposed = self._components.coordinator.proposed_tables() if self._takes_tables else None
        else:  # neither could be started after the last take-over
            self._learn()
        if proposed is not None:
            self._watches["tables"].attempt(lambda: self._take_over(proposed))

    def stop(self, seconds: float) -> bool:
        """Stop every part. Returns whether all ended within the deadline.

        The API stops last, so that the shutdown can be observed.
        """
        self._stop_requested = True
        self._watches["status"].attempt(self.renew_status)
        for watch in self._watches.values():
            watch.rest()
        budget = ShutdownBudget(seconds)
        self._stop_learning()
        if self._components is not None:
            self._components.stop(budget)
        self._release_state()
        budget.stop_part("API", self._server.stop)
        late = ", ".join(budget.late)
        logger.info("flexd has stopped%s", f", but these parts did not end within the deadline: {late}" if late else "")
        return not budget.late

    def _build(self) -> None:
        """Lock the state, and make the parts if the tables are known. Raises FlexdError; nothing is locked then."""
        state = self._config.state
        try:
            self._lock = open_state(state.dir, self._config.job)
            check_files(state.dir, start_empty=state.on_unusable == "reset")
            tables = load_tables(self._state) if self._takes_tables else ()
            if tables or not self._takes_tables:
                self._file.use_tables(tables, self._make_components)
        except BaseException as error:
            # Not left to the garbage collector, which is paused: a daemon that waits would lock itself out.
            self._release_state()
            if state.on_unusable != "wait" or not isinstance(error, UnusableStateError | StateVersionError):
                raise
            self._wait_for_state(error, _files(state.dir))
        else:
            self._seen = None

    def _begin(self) -> None:
        if self._components is not None:
            self._components.start()
        elif self._seen is None:
            self._learn()

    def _look(self) -> None:
        if _files(self._config.state.dir) == self._seen:
            return
        try:
            self._build()
            self._begin()
        except Exception as error:
            # Another process has the directory or an address: no file shows when that ends.
            self._components = None
            self._release_state()
            self._wait_for_state(error, frozenset())
            if not isinstance(error, FlexdError):
                raise

    def _wait_for_state(self, error: Exception, seen: frozenset[tuple[str, int]]) -> None:
        self._seen, before = seen, self._problem
        self._problem = str(error) if isinstance(error, FlexdError) else named_error(error)
        if self._problem != before:
            logger.error("flexd waits: %s", self._problem)

    def _release_state(self) -> None:
        self._state.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_components(self, config: Config) -> None:
        check_config(config, "the configuration, with the tables of the ranks")
        self._components = DaemonComponents(config, self._state, self.supervisor, takes_tables=self._takes_tables)

    def _learn(self, problem: str = "") -> None:
        try:
            self._learner = TableLearner(control_options(self._config), self.supervisor)
            self._learner.members.problem = problem
            self._learner.start()
        except BaseException:
            self._stop_learning()
            raise
        logger.info("flexd waits for the tables of the ranks, which the configuration does not list")

    def _stop_learning(self) -> None:
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.stop()

    def _take_over(self, proposed: ProposedTables) -> None:
        """Continue with the tables of an attempt, if the configuration fits them."""
        try:
            check_config(with_tables(self._config, proposed.tables), "the configuration")
        except FlexdError as error:
            problem = f"{error.message} (tables of attempt {proposed.attempt!r})"
            if self._learner is not None:
                self._learner.members.problem = problem
            if problem != self._problem:
                self._problem = problem
                logger.error("the tables of the ranks cannot be taken over: %s", problem)
            return
        self._problem = ""
        self._stop_learning()
        components, self._components = self._components, None
        if components is not None:
            budget = ShutdownBudget(self._config.shutdown_seconds)
            components.stop(budget)
            self._ticked_at = time.monotonic()
            if budget.late:
                # Beside new parts they would count the stream twice, or write the same journal.
                late = f"{', '.join(budget.late)} did not end within {self._config.shutdown_seconds:g} s"
                self.supervisor.end_daemon("loop", UnsafeStateError(late, remedy="the daemon starts anew"))
                return
        try:
            save_tables(self._state, proposed)
            self._file.use_tables(proposed.tables, self._make_components)
            self._begin()
        except Exception as error:
            self._components = None
            problem = error.message if isinstance(error, FlexdError) else named_error(error)
            self._learn(f"{problem} (tables of attempt {proposed.attempt!r})")
            raise
        logger.info("%d tables, of the ranks of attempt %r", len(proposed.tables), proposed.attempt)

    def reload(self, reason: str = "", requested_by: str = "") -> ReloadReport:
        """Read the file again, apply its hot keys, and record the outcome. Raises FlexdError; nothing changes then."""
        try:
            report = self._file.reload(self._apply_config)
        except FlexdError as error:
            self._record_reload(requested_by, reason, error)
            raise
        self._record_reload(requested_by, reason, report)
        return report

    def preview_reload(self) -> ReloadReport:
        """Return what ``reload`` would do now. Changes nothing."""
        components = self._components
        return self._file.preview(
            lambda config: None if components is None else components.inspect.planning.check(config)
        )

    def _reload_quietly(self) -> None:
        with contextlib.suppress(FlexdError):  # It is logged and counted.
            self.reload(requested_by="SIGHUP")

    def _apply_config(self, config: Config) -> None:
        """Apply settings of a reload. Raises FlexdError; nothing has changed then."""
        if self._components is not None:
            self._components.apply_config(config)
        elif self._learner is not None:
            self._learner.members.problem = ""

    def _record_reload(self, requested_by: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        if self._components is not None:
            self._components.operator.record_reload(requested_by, reason, outcome)
        else:
            logger.info("config reload requested by %s: %s", requested_by or "anonymous", reason)

    def call(self, route: Operation[Answer], **given: Any) -> Answer:
        """Implement ``DaemonApi.call``: statuses read afterwards show what a POST has changed."""
        try:
            handler = attrgetter(route.handler)(self if route.handler in _OWN_HANDLERS else self.components)
            answer: Answer = handler(**given)
            return answer
        finally:
            if route.method == "POST":
                self.renew_status()

    def status(self) -> DaemonStatus:
        """Return the status that is kept, with its age."""
        kept, now = self._kept, time.monotonic()
        if now - kept[0] > STALE_SECONDS and now >= self._renew_at:
            self.renew_status()
            kept = self._kept
        return kept[1].model_copy(update={"age_seconds": max(0.0, now - kept[0])})

    def renew_status(self) -> None:
        """Make the status anew that requests read. What was done before the call is in it."""
        with self._renewing:
            began, components = time.monotonic(), self._components
            reasons = [self._reason()] if components is None else components.not_ready()
            reasons += self.supervisor.reasons()
            if self._stop_requested:
                reasons.append("shutting down")
            base = base_status(
                self._config, self._started_unix_seconds, time.monotonic() - self._started_at, self.health(), reasons
            )
            base = base.model_copy(update={"config": self._file.status(), "threads": threads_status(self.supervisor)})
            self._kept = began, base if components is None else components.status(base)
            self._renew_at = time.monotonic() + (time.monotonic() - began) / RENEWAL_SHARE

    def health(self) -> ProbeResult:
        components, reasons = self._components, []
        silent = time.monotonic() - self._ticked_at
        if silent > HEALTHY_TICK_SECONDS:
            reasons.append(f"the loop has not ticked for {silent:.0f} s")
        if components is not None and not components.ingestor.running and not self._stop_requested:
            reasons.append("the ingest thread has ended")
        return ProbeResult(ok=not reasons, reasons=tuple(reasons))

    def ready(self) -> ProbeResult:
        status = self.status()
        return ProbeResult(ok=status.ready, reasons=() if status.ready else status.reasons)

    def _reason(self) -> str:
        if self._seen is not None:
            return f"state: {self._problem}"
        learner = self._learner
        missing = "starting" if learner is None else learner.reason()
        return f"no tables yet, the ranks are to say theirs: {missing}"


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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""``malloc.h`` of glibc."""
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The largest value that glibc accepts."""
TRIM_THRESHOLD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Let the process reuse freed buffers of up to ``MMAP_THRESHOLD_BYTES`` instead of returning them to the kernel.

    A Kafka client copies every fetch (megabytes) several times. By default each copy is fresh memory, which the kernel
    zeroes and maps page by page and takes back when it is freed; that takes longer than the copying itself. At most
    ``TRIM_THRESHOLD_BYTES`` at the end of each heap are kept, and the free space between buffers in use.

    Returns:
        False if nothing was changed: another C library, or the environment configures malloc.
    """
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))


def run_daemon(config: Config, path: Path | None = None) -> int:
    """Run until SIGTERM or SIGINT; SIGHUP reloads the file at ``path``.

    Returns the exit code: 0, 1 if a part did not end within the deadline, or ``EXIT_UNSAFE_STATE``.
    """
    # The file may have changed since it was read, so a signal before there is a daemon is not lost.
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))
    set_up_logging(config.job, config.log.level, config.log.format)
    arm()
    keep_freed_memory()
    daemon = Daemon(config, ConfigFile(config, path))
    daemon.supervisor.watch_uncaught()
    signal.signal(signal.SIGHUP, lambda *_: daemon.request_reload())
    if early:
        daemon.request_reload()
    daemon.start()
    resume_garbage_collector()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.request_stop())
    in_time = daemon.run_until_stopped()
    if daemon.supervisor.fatal:
        return EXIT_UNSAFE_STATE
    return 0 if in_time else 1
