"""The daemon's life cycle: build and start all parts, tick, and stop all parts within the deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from flexd.api.base import ProbeResult
from flexd.api.components import Components
from flexd.api.daemon import ReloadReport, threads_status
from flexd.api.migration_commands import MigrationCommands
from flexd.api.operator_commands import OperatorCommands
from flexd.api.plan_commands import PlanCommands
from flexd.api.status import Status, base_status
from flexd.config.model import Config
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.event_log import MigrationEvent
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.table_proposals import ProposedTables
from flexd.control.daemon.throttle import Throttle, ThrottleLimits
from flexd.control.protocol.report import StepReport
from flexd.core.errors import FlexdError
from flexd.core.fault_points import fault_point
from flexd.core.supervision import Supervisor
from flexd.daemon import factory
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.loop import DaemonLoop
from flexd.daemon.shutdown_budget import Share, ShutdownBudget
from flexd.daemon.state_files import check_files, open_state
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.decisions import DecisionFile
from flexd.operations.drift import DriftMonitor
from flexd.operations.effects import EffectRecorder
from flexd.operations.executions import Executions
from flexd.operations.history import MigrationHistory
from flexd.operations.live_prices import LivePrices
from flexd.operations.planning import Planning
from flexd.operations.rollback_recovery import RollbackRecovery
from flexd.operations.state_file import NAME, StateFile
from flexd.operations.training_monitor import SlowMemoryMonitor, TrainingMonitor
from flexd.operations.verification import Verifier
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics
from flexd.sketch.dead_letters import DeadLetterFile
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.tap_source import TapSource

logger = logging.getLogger("flexd")

KEEP_MIGRATIONS = 1000
"""In the history."""
HEALTHY_TICK_SECONDS = 30.0
"""The daemon is unhealthy if its loop has not ticked for this long; planning a large job takes seconds."""


class Daemon(DaemonLoop):
    """Implements ``DaemonApi`` over its parts.

    Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Args:
        file: the file that the configuration was read from, for reloads.
        supervisor: of the process; records the faults of every thread.
        serves: False if the owner, ``flexd.daemon.deferred``, serves the API and calls ``tick`` and ``stop``.
        takes_tables: the tables of ``config`` are those of ranks.

    Raises:
        FlexdError: a part cannot be created from the configuration; nothing is left running.
    """

    def __init__(
        self,
        config: Config,
        file: ConfigFile | None = None,
        supervisor: Supervisor | None = None,
        *,
        serves: bool = True,
        takes_tables: bool = False,
    ) -> None:
        super().__init__(config, file, supervisor)
        self._serves, self._takes_tables = serves, takes_tables
        self._planning_watch = self.supervisor.watch("loop", "planning")
        factory.make_state_directory(config)
        self._state_lock = open_state(config.state.dir, config.job)
        try:
            self._make_parts(config, self.supervisor)
        except BaseException:
            # Not left to the garbage collector, which is paused: a daemon that waits would lock itself out.
            self._state_lock.release()
            raise

    def _make_parts(self, config: Config, supervisor: Supervisor) -> None:
        keyspace = config.keyspace()
        state = config.state.dir
        start_empty = config.state.on_unusable == "reset"
        check_files(state, start_empty=start_empty)
        cluster = factory.make_cluster(config)
        control = replace(factory.control_options(config), takes_tables=self._takes_tables)
        self._training = TrainingMonitor()
        self._slow_memory = SlowMemoryMonitor(len(keyspace.tables))
        self._journal = PlacementJournal(state / "placement")
        work = OffsetsInWork(state)
        source = factory.make_source(config, work)
        self._snapshots = SnapshotStore(state / "snapshots", config.state.keep_snapshots)
        self._ingestor = Ingestor(
            source,
            keyspace.tables,
            factory.sketch_settings(config),
            self._snapshots,
            dead_letters=DeadLetterFile(state / "dead-letters.jsonl", config.stream.dead_letter_bytes),
            snapshot_interval_seconds=config.state.snapshot_interval_seconds,
            poll_seconds=config.stream.poll_seconds,
            max_message_bytes=config.stream.max_message_bytes,
            supervisor=supervisor,
            work=work,
            start_empty=start_empty,
        )
        tap = source if isinstance(source, TapSource) else None
        throttle = Throttle(ThrottleLimits(**config.control.throttle.model_dump()))
        self._small_state = StateFile(state / NAME)
        self._history = MigrationHistory(self._small_state, KEEP_MIGRATIONS, supervisor=supervisor)
        self._effects = EffectRecorder(self._training.step_times, self._history.record_saving)
        self._coordinator = Coordinator(
            control, keyspace, self._journal, self._take_report, self._on_event, tap, throttle,
            on_migration=self._record_migration, supervisor=supervisor,
        )  # fmt: skip
        decisions = DecisionFile(self._small_state)
        self.operator = OperatorCommands(config.control, decisions, self._history, self._coordinator, throttle)
        moves = self._history.newest_moves(1)
        executions = self._executions = Executions(
            config.control, keyspace, self._coordinator, moves[0].plan_id if moves else ""
        )
        prices = self._prices = LivePrices(cluster, self._training, self._coordinator)
        self._drift = DriftMonitor(
            config.planner, keyspace, prices, self._ingestor.profile, self._coordinator, executions, self._training,
            supervisor,
        )  # fmt: skip
        samples_kept = config.sketch.coaccess_memory_bytes > 0
        planning = self._planning = Planning(
            config, keyspace, prices, self._ingestor.profile, self._coordinator, self._training, executions,
            self._drift.planned, self.operator.record_withheld,
            AffinityMonitor(keyspace, self._ingestor.sketches.coaccess, supervisor) if samples_kept else None,
        )  # fmt: skip
        late = RollbackRecovery(executions, self._history, self._coordinator, decisions)
        self._verifier = Verifier(config.planner, keyspace, executions, self._coordinator, decisions, self._history)
        self._auto = AutoPlanner(
            config.planner, planning, self._drift, self._coordinator.live, late.resume, self._verifier
        )
        self.inspect = Components(
            config, keyspace, self._ingestor, self._coordinator, self._planning, self._training, self._drift,
            self._auto, throttle, self._history, self._snapshots, self._slow_memory, self._effects,
        )  # fmt: skip
        self._server = DaemonServer(self, Metrics(self), config.server, supervisor) if self._serves else None
        self._stopping = threading.Event()
        self._ticked_at = time.monotonic()
        self.planning = PlanCommands(
            keyspace, self._planning, self._auto, self._coordinator, self._stopping, self.operator
        )
        self.migrations = MigrationCommands(
            self._planning.executions, self._history, self._coordinator, self._auto, self._stopping, late, decisions,
            self._effects,
        )  # fmt: skip

    def start(self) -> None:
        """Start every part; if one fails, stop those that were started.

        Raises:
            FlexdError: an address is taken, or a part cannot start.
        """
        try:
            self._history.start()
            # A taken address is detected at once.
            self._coordinator.listen()
            self._ingestor.start()
            self._drift.start()
            if self._server is not None:
                self._server.start()
            self._coordinator.start()
        except BaseException:
            self.stop(self._config.shutdown_seconds)
            raise
        logger.info(
            "flexd is up: API %s, control channel %s:%d", self.address, self._config.control.listen_host,
            self._coordinator.port,
        )  # fmt: skip

    @property
    def address(self) -> str:
        """The address of the admin API; empty if the daemon's owner serves it."""
        return "" if self._server is None else self._server.address

    @property
    def control_port(self) -> int:
        return self._coordinator.port

    def proposed_tables(self) -> ProposedTables | None:
        """Return the tables that the ranks of a new attempt have, if they are not the daemon's."""
        return self._coordinator.proposed_tables()

    def tick(self) -> None:
        """Run the periodic work of the loop: retry failed writes, and plan unless planning is paused.

        What it raises is recorded by the supervisor and attempted again after a back-off; the loop ticks on.
        """
        self._ticked_at = time.monotonic()
        self._loop_watch.attempt(self._tick_operator)
        if self.operator.paused is None:
            self._planning_watch.attempt(self._auto.tick)

    def _tick_operator(self) -> None:
        fault_point("thread.loop")
        self.operator.tick()

    def stop(self, seconds: float) -> bool:
        """Stop every part. Returns whether all ended within the deadline.

        The channel stops first, so that no chunk starts after the last snapshot; the API stops last, so that the
        shutdown can be observed.
        """
        self._stopping.set()
        self._loop_watch.rest()
        self._planning_watch.rest()
        budget, after = ShutdownBudget(seconds), Share.INGEST + Share.DRIFT + Share.HISTORY + Share.SERVER
        budget.stop_part("control channel", self._coordinator.stop, reserve=after)
        budget.stop_part("ingest", self._ingestor.stop, reserve=after - Share.INGEST)
        budget.stop_part("drift", self._drift.stop, reserve=Share.HISTORY + Share.SERVER)
        self._effects.store()
        budget.stop_part("history", self._history.stop, reserve=Share.SERVER)
        self._small_state.close()
        self._journal.close()
        self._state_lock.release()
        if self._server is not None:
            budget.stop_part("API", self._server.stop)
        late = ", ".join(budget.late)
        logger.info("flexd has stopped%s", f", but these parts did not end within the deadline: {late}" if late else "")
        return budget.in_time

    def _take_report(self, rank: int, report: StepReport) -> None:
        self._training.add(rank, report)
        if report.steps == 0:  # of a mistake alone
            return
        self._slow_memory.add(report)
        self._prices.add(rank, report)
        self._verifier.add(rank, report)

    def _record_migration(self, event: MigrationEvent) -> None:
        # First the migration, to which its effect refers.
        self._history.record_migration(event)
        self._executions.on_migration(event)
        self._effects.on_migration(event)

    def _on_event(self, name: str, fields: Mapping[str, object]) -> None:
        if name == "epoch_live":
            self._effects.end_generation()
            self._training.new_generation()
        elif name in ("migration_committed", "tap_urgent"):
            self._ingestor.snapshots.request()

    def check(self, config: Config) -> None:
        """Raise FlexdError if ``apply_config`` would."""
        self._planning.check(config)

    def apply_config(self, config: Config) -> None:
        """Apply settings that differ from the current ones only in ``flexd.config.load.HOT_KEYS``.

        Raises:
            FlexdError: they name a table that there is not, or the like; nothing has changed.
        """
        self.check(config)
        self._config = config
        self._planning.apply_config(config)
        self._drift.apply_config(config.planner)
        self._auto.apply_config(config.planner)
        self.operator.apply_config(config.control)
        self.inspect.settings = config
        self._ingestor.snapshots.interval_seconds = config.state.snapshot_interval_seconds
        self._snapshots.keep = config.state.keep_snapshots

    def record_reload(self, requested_by: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        """Record the outcome of a reload."""
        self.operator.record_reload(requested_by, reason, outcome)

    def status(self) -> Status:
        base = base_status(self._config, self._started, self.health(), self.ready())
        return self.inspect.status(base).model_copy(
            update={
                "paused": self.operator.paused is not None,
                "pause_reason": self.operator.pause_reason,
                "paused_by": None if self.operator.paused is None else self.operator.paused.requested_by or None,
                "decisions": self.operator.decisions_status(),
                "config": self._file.status(),
                "threads": threads_status(self.supervisor),
            }
        )

    def handler(self, name: str) -> Callable[..., Any]:
        """Implement ``DaemonApi.handler``."""
        handler: Callable[..., Any] = attrgetter(name)(self)
        return handler

    def health(self) -> ProbeResult:
        reasons = []
        silent = time.monotonic() - self._ticked_at
        if silent > HEALTHY_TICK_SECONDS:
            reasons.append(f"the loop has not ticked for {silent:.0f} s")
        if not self._ingestor.running and not self._stopping.is_set():
            reasons.append("the ingest thread has ended")
        return ProbeResult(ok=not reasons, reasons=tuple(reasons))

    def ready(self) -> ProbeResult:
        reasons = [f"{part}: {problem}" for part, problem in self._ingestor.problems()]
        live = self._coordinator.live()
        if live is None or not live.ready:
            reasons.append(f"ranks: {self._coordinator.status().reason}")
        reasons += self.supervisor.reasons()
        if self._stop_requested or self._stopping.is_set():
            reasons.append("shutting down")
        return ProbeResult(ok=not reasons, reasons=tuple(reasons))
