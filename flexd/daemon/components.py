"""The parts of a daemon that has tables: made from the configuration, started together, stopped within one deadline."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from flexd.api.handlers import Components, OperatorCommands, PlanCommands
from flexd.api.migration_commands import MigrationCommands
from flexd.api.status import DaemonStatus
from flexd.config.model import Config
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import MigrationState
from flexd.control.daemon.pusher import Throttle, ThrottleLimits
from flexd.control.protocol.report import StepReport
from flexd.core.supervision import Supervisor, fault_point
from flexd.daemon.config_file import control_options, make_decoder, make_source, sketch_settings
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.autoplan import AutoPlanner, DriftMonitor
from flexd.operations.decisions import DecisionFile, StateDatabase
from flexd.operations.executions import Executions
from flexd.operations.history import MigrationHistory
from flexd.operations.live_plan import LivePrices, PlanMaker
from flexd.operations.planning import Planning
from flexd.operations.training_monitor import TrainingMonitor
from flexd.operations.verification import Verifier
from flexd.sketch.dead_letters import DeadLetterFile
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.tap_source import TapSource
from flexd.stream.types import OffsetsInWork

logger = logging.getLogger("flexd")

KEEP_MIGRATIONS = 1000
"""In the history."""
MIN_SHARE = 0.02
"""Share of the deadline that a part gets even if earlier parts have used all of it: it may need almost nothing."""
INGEST_SHARE, SERVER_SHARE = 0.5, 0.1
"""Shares of ``shutdown_seconds`` reserved for parts; the control channel has the rest."""


class ShutdownBudget:
    """Stops parts one after another. Later parts get the time that earlier ones left unused.

    Args:
        seconds: deadline of all parts together.
        clock: monotonic seconds.

    Attributes:
        late: names of the parts that have not ended in time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._deadline = clock() + seconds
        self.late: list[str] = []

    def stop_part(self, name: str, stop: Callable[[float], bool], reserve: float = 0.0) -> bool:
        """Call ``stop`` with the seconds left to this part. Returns its result: whether the part ended.

        Args:
            name: name of the part in ``late``.
            stop: stops the part within the given seconds.
            reserve: share (0 to 1) of the deadline reserved for later parts.
        """
        left = self._deadline - self._clock() - reserve * self._seconds
        try:
            ended = stop(max(left, MIN_SHARE * self._seconds))
        except Exception:
            # The parts after it must be stopped all the same.
            logger.exception("stopping %s failed", name)
            ended = False
        if not ended:
            self.late.append(name)
        return ended


class DaemonComponents:
    """Call ``start``, then ``tick`` and ``auto.tick`` regularly, then ``stop``.

    Args:
        state: the small state; the caller closes it after ``stop``.
        supervisor: of the process; records the faults of every thread.
        takes_tables: the tables of ``config`` are those of ranks.

    Attributes:
        inspect, planning, migrations, operator: the handlers of the routes.

    Raises:
        FlexdError: a part cannot be created from the configuration; nothing is left running.
    """

    def __init__(
        self, config: Config, state: StateDatabase, supervisor: Supervisor, *, takes_tables: bool = False
    ) -> None:
        keyspace = config.keyspace()
        directory = config.state.dir
        control = replace(control_options(config), takes_tables=takes_tables)
        self.training = TrainingMonitor(len(keyspace.tables))
        self._journal = PlacementJournal(directory / "placement")
        work = OffsetsInWork(directory)
        source = make_source(config, work)
        self._counts_rows = isinstance(source, TapSource)
        self._snapshots = SnapshotStore(directory / "snapshots", config.state.keep_snapshots)
        self.ingestor = Ingestor(
            source,
            keyspace.tables,
            sketch_settings(config),
            self._snapshots,
            dead_letters=DeadLetterFile(directory / "dead-letters.jsonl", config.stream.dead_letter_bytes),
            snapshot_interval_seconds=config.state.snapshot_interval_seconds,
            poll_seconds=config.stream.poll_seconds,
            max_message_bytes=config.stream.max_message_bytes,
            supervisor=supervisor,
            work=work,
            decoder=make_decoder(config),
            unbounded=() if self._counts_rows else config.unbounded(),
            start_empty=config.state.on_unusable == "reset",
        )
        throttle = Throttle(ThrottleLimits(**config.control.throttle.model_dump()))
        self._history = MigrationHistory(state, KEEP_MIGRATIONS)
        self.coordinator = Coordinator(
            control, keyspace, self._journal, self._take_report, self._on_event,
            source if isinstance(source, TapSource) else None, throttle, supervisor,
        )  # fmt: skip
        decisions = DecisionFile(state)
        self.operator = OperatorCommands(config.control, decisions, self._history, self.coordinator, throttle)
        self._executions = Executions(keyspace, self.coordinator, self._history, decisions)
        self._prices = LivePrices(config.cluster(), self.training, self.coordinator)
        maker = PlanMaker(
            config.planner, keyspace, self._prices, self.ingestor.profile, self.coordinator, self.training,
            counts_rows=self._counts_rows,
        )  # fmt: skip
        self.drift = DriftMonitor(maker, self.coordinator, self._executions)
        planning = Planning(
            config, maker, self.coordinator, self._executions, self.drift.planned, self.operator.record_withheld,
            AffinityMonitor(keyspace, self.ingestor.sketches.coaccess, supervisor)
            if config.sketch.coaccess_memory_bytes
            else None,
        )  # fmt: skip
        self._verifier = Verifier(maker, self._executions, self.coordinator, decisions, self._history)
        self.auto = AutoPlanner(
            config.planner, planning, self.drift, self.coordinator.live, self._executions.resume_rollback,
            self._verifier,
        )  # fmt: skip
        self.inspect = Components(
            config, keyspace, self.ingestor, self.coordinator, planning, self.training, self.drift,
            self.auto, throttle, self._history,
        )  # fmt: skip
        self._stopping = threading.Event()
        self._recording = threading.Lock()
        self.planning = PlanCommands(keyspace, planning, self.auto, self.coordinator, self._stopping, self.operator)
        self.migrations = MigrationCommands(
            self._executions, self._history, self.coordinator, self.auto, self._stopping, decisions,
        )  # fmt: skip

    def start(self) -> None:
        """Start every part; if one fails, stop those that were started.

        Raises:
            FlexdError: an address is taken, or a part cannot start.
        """
        try:
            # A taken address is detected at once.
            self.coordinator.listen()
            self.ingestor.start()
            self.coordinator.start()
        except BaseException:
            self.stop(ShutdownBudget(self.inspect.settings.shutdown_seconds))
            raise

    def tick(self) -> None:
        """Retry failed writes, and record what the control channel has done and decided by itself."""
        fault_point("thread.loop")
        self._record_migrations()
        self._history.write()
        self.operator.tick()

    def stop(self, budget: ShutdownBudget) -> None:
        """Stop every part; a second call does nothing.

        The channel stops first, so that no chunk starts after the last snapshot.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        budget.stop_part("control channel", self.coordinator.stop, reserve=INGEST_SHARE + SERVER_SHARE)
        self._record_migrations()
        budget.stop_part("ingest", self.ingestor.stop, reserve=SERVER_SHARE)
        self._history.write()
        self._journal.close()

    def _take_report(self, rank: int, report: StepReport) -> None:
        self.training.add(rank, report)
        if report.steps == 0:  # of a mistake alone
            return
        self._prices.add(rank, report)
        self._verifier.add(rank, report)

    def _record_migrations(self) -> None:
        with self._recording:
            while (event := self.coordinator.next_event()) is not None:
                self._history.record_migration(event.migration.record)
                self._executions.on_migration(event)
                if event.transition is not None and event.transition.after is MigrationState.COMMITTED:
                    self.ingestor.snapshots.request()

    def _on_event(self, name: str, fields: Mapping[str, object]) -> None:
        if name == "epoch_live":
            self._record_migrations()
            self.training.new_generation()
            self._warn_of_unbounded_ids()
        elif name == "tap_urgent":
            self.ingestor.snapshots.request()

    def _warn_of_unbounded_ids(self) -> None:
        live = self.coordinator.live()
        if live is None or live.trainer is None or self._counts_rows:
            return
        theirs, ours = live.trainer.unbounded_tables(self.inspect.keyspace.tables), self.inspect.settings.unbounded()
        if names := theirs - ours:
            logger.warning(
                "tables %s have unbounded ids in the trainer, and a stream has ids, not the rows that they have: none "
                "of their rows is copied - count with stream.source.kind tap, or say ids: unbounded of them in tables",
                ", ".join(sorted(names)),
            )
        if names := ours - theirs:
            logger.warning(
                "tables %s have ids: unbounded in the configuration, and in the trainer ids are rows: the counts of "
                "their rows are wrong - correct tables",
                ", ".join(sorted(names)),
            )

    def apply_config(self, config: Config) -> None:
        """Apply settings that differ from the current ones only in ``flexd.config.model.HOT_KEYS``.

        Raises:
            FlexdError: they name a table that there is not, or the like; nothing has changed.
        """
        self.inspect.planning.check(config)
        self.inspect.planning.apply_config(config)
        self.auto.apply_config(config.planner)
        self.operator.apply_config(config.control)
        self.coordinator.limit_chunks(config.control.chunk_rows, config.control.chunk_bytes)
        self.inspect.settings = config
        self.ingestor.snapshots.interval_seconds = config.state.snapshot_interval_seconds
        self._snapshots.keep = config.state.keep_snapshots

    def status(self, base: DaemonStatus) -> DaemonStatus:
        """Return ``base`` with the state of every part."""
        paused = self.operator.paused
        return self.inspect.status(base).model_copy(
            update={
                "paused": paused is not None,
                "pause_reason": None if paused is None else paused.reason,
                "paused_by": None if paused is None else paused.requested_by or None,
                "decisions": self.operator.decisions_status(),
            }
        )

    def not_ready(self) -> list[str]:
        """Return why counts or migrations stand still; empty if they do not."""
        reasons = [f"{part}: {problem}" for part, problem in self.ingestor.problems()]
        live = self.coordinator.live()
        if live is None or not live.ready:
            reasons.append(f"ranks: {self.coordinator.status().reason}")
        return reasons
