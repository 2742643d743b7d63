"""The handlers of the API's operations: queries over all components of a daemon, pause and throttle, and plans.

Commands of operators are recorded and outlive the daemon.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flexd import __version__
from flexd.api.migration import MigrationCounts, ReplanOutcome, ReplanResult, ThrottleStatus
from flexd.api.plan import (
    Explanation,
    PlanReport,
    UserNodePage,
    explanation,
    plan_report,
    proposal_report,
    user_node_page,
)
from flexd.api.planning import (
    ProposalList,
    drift_status,
    placement_status,
    planning_status,
    prices_status,
    proposal_list,
)
from flexd.api.rank import RankPage, rank_page, topology_status
from flexd.api.status import (
    ConfigReport,
    DaemonStatus,
    DecisionsStatus,
    PauseState,
    ReloadReport,
    snapshot_status,
    state_status,
)
from flexd.api.stream import HotRowPage, TableOrder, TablePage, hot_row_page, sketch_status, stream_status, table_page
from flexd.api.training import MAX_PLAN_MARKS, Timeline, ids_status, slow_memory_status, timeline, training_status
from flexd.config.model import Config
from flexd.config.sections import ControlConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.migration import FINAL_STATES, Migration, MigrationState
from flexd.control.daemon.pusher import Throttle, ThrottleLimits
from flexd.core.errors import ApiError, FlexdError
from flexd.core.keyspace import KeySpace
from flexd.core.model import with_zeros
from flexd.operations.autoplan import AutoPlanner, DriftMonitor
from flexd.operations.decisions import DecisionFile, Pause, ThrottleOverride
from flexd.operations.executions import DAEMON_ACTOR, Trigger, TriggerKind
from flexd.operations.history import ActionKind, MigrationHistory
from flexd.operations.planning import Planning, Proposal
from flexd.operations.training_monitor import TrainingMonitor
from flexd.sketch.ingestor import Ingestor


@dataclass
class Components:
    """The running components of a daemon, and the queries that read them.

    Methods may be called from any thread and block on nothing that ingest or a migration holds for long.

    Attributes:
        settings: the effective configuration; replaced by a reload.
    """

    settings: Config
    keyspace: KeySpace
    ingestor: Ingestor
    coordinator: Coordinator
    planning: Planning
    training: TrainingMonitor
    drift: DriftMonitor
    auto: AutoPlanner
    throttle: Throttle
    history: MigrationHistory

    def status(self, base: DaemonStatus) -> DaemonStatus:
        """Return ``base`` with the state of every component."""
        control, planning = self.coordinator.status(), self.planning
        last, migration = planning.last_plan, planning.executions.last
        placement, live = self.coordinator.placement(), self.coordinator.live()
        return base.model_copy(
            update={
                "stream": stream_status(self.settings, self.ingestor),
                "sketch": sketch_status(
                    self.ingestor.sketches.choices(), planning.last_profile, planning.profile_age_seconds()
                ),
                "drift": drift_status(self.drift, self.settings.planner.drift_threshold),
                "topology": topology_status(
                    live,
                    control,
                    self.coordinator.channel_counters(),
                    planning.maker.prices.cluster.name,
                ),
                "placement": placement_status(placement, self.keyspace, control.digest_mismatches),
                "training": training_status(
                    self.training.totals(),
                    self.training.ranks(),
                    self.training.phases(),
                    self.training.usage_warnings(),
                ),
                "slow_memory": slow_memory_status(self.training.slow_memory(), self.keyspace.tables),
                "unbounded_ids": ids_status(self.training.ids(), self.ingestor.ids_seen(), self.keyspace.tables),
                "prices": prices_status(planning.maker.prices),
                "last_plan": None
                if last is None
                else plan_report(
                    last, planning.last_live, None if planning.affinity is None else planning.affinity.outlook
                ),
                "migration": None if migration is None else migration.report(),
                "migrations": MigrationCounts(
                    ended=with_zeros(sorted(state.value for state in FINAL_STATES), planning.executions.migrations),
                    **planning.executions.migrated,
                    illegal_transitions=control.illegal_transitions,
                    lost_entries=self.history.lost,
                ),
                "planning": planning_status(planning, self.auto),
                "throttle": _throttle_status(self.throttle),
                "snapshot": snapshot_status(self.ingestor),
                "state": state_status(self.ingestor),
            }
        )

    def config(self) -> ConfigReport:
        return ConfigReport(version=__version__, config=self.settings.document())

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        drift = self.drift.newest
        return table_page(
            self.keyspace, self.ingestor, self.coordinator.placement(), self.planning.last_profile,
            {} if drift is None else drift.table_ratios, offset, limit, order,
        )  # fmt: skip

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        return hot_row_page(
            self.keyspace, self.ingestor, self.coordinator.placement(), self.coordinator.live(), table, offset, limit
        )

    def ranks(self, offset: int, limit: int) -> RankPage:
        return rank_page(
            self.coordinator.live(), self.training.ranks(), self.coordinator.placement().version,
            self.planning.maker.prices.cluster.name, offset, limit,
        )  # fmt: skip

    def timeline(self) -> Timeline:
        live = self.coordinator.live()
        return timeline(
            self.training.intervals(), self.history.newest_moves(MAX_PLAN_MARKS),
            None if live is None else live.layout,
            self._mean_row_bytes(),
        )  # fmt: skip

    def _mean_row_bytes(self) -> float:
        """Return the mean size of a looked-up row's values: tables weigh by the accesses counted."""
        accesses = self.ingestor.sketches.samples_by_table()
        sizes = [table.row_bytes for table in self.keyspace.tables]
        return float(np.average(sizes, weights=accesses if any(accesses) else None))


logger = logging.getLogger("flexd")

RETRY_SECONDS = 5.0
ANONYMOUS = "anonymous"


def _throttle_status(throttle: Throttle) -> ThrottleStatus:
    return ThrottleStatus.from_object(throttle, **vars(throttle.limits))


class OperatorCommands:
    """Thread-safe. Starts with the decisions made before the daemon started.

    Args:
        control: the configuration; a throttle that was chosen under another ``control.throttle`` is dropped.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        control: ControlConfig,
        decisions: DecisionFile,
        history: MigrationHistory,
        coordinator: Coordinator,
        throttle: Throttle,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._control = control
        self._decisions = decisions
        self._history = history
        self._coordinator = coordinator
        self._throttle = throttle
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._retry_at = 0.0
        pause, chosen = decisions.current.pause, decisions.current.throttle
        if pause is not None:
            logger.info("paused since before the start, by %s: %s", pause.requested_by or ANONYMOUS, pause.reason)
            coordinator.pause()
        if chosen is not None and chosen.matches_config(control.throttle):
            logger.info("throttle as chosen before the start: %s", chosen.message)
            throttle.set_limits(chosen.limits)
        self._drop_superseded_throttle()

    @property
    def paused(self) -> Pause | None:
        """The pause in effect; None if nothing is held."""
        return self._decisions.current.pause

    def decisions_status(self) -> DecisionsStatus:
        """Return the state of the decisions' file."""
        return DecisionsStatus.from_object(self._decisions)

    def tick(self) -> None:
        """Retry failed writes, every few seconds; record a pause that the control channel has begun by itself."""
        divergence = self._coordinator.divergence
        if divergence and (self.paused is None or self.paused.requested_by != DAEMON_ACTOR):
            self.pause(divergence, DAEMON_ACTOR)
        if not self._decisions.problem or time.monotonic() < self._retry_at:
            return
        with self._lock:
            self._decisions.retry()
            self._retry_at = time.monotonic() + RETRY_SECONDS

    def pause(self, reason: str, requested_by: str = "") -> PauseState:
        """Hold planning and pushing at the next chunk boundary, also after a restart; ingest goes on."""
        with self._lock:
            first = self.paused is None
            self._coordinator.pause()
            pause = Pause(reason=reason, requested_by=requested_by, unix_seconds=self._wall_clock())
            self._decisions.update(pause=pause)
        self.record("pause", requested_by, reason)
        return PauseState(paused=True, reason=reason, changed=first, saved=not self._decisions.problem)

    def resume(self, reason: str = "", requested_by: str = "") -> PauseState:
        """End a pause."""
        with self._lock:
            pause = self.paused
            # First, so that ``tick`` does not record the pause again that ends here.
            self._coordinator.resume()
            if pause is not None:
                self._decisions.update(pause=None)
        if pause is not None:
            seconds = self._wall_clock() - pause.unix_seconds
            self.record("resume", requested_by, reason, f"after {max(0.0, seconds):.0f} s of: {pause.reason}")
        return PauseState(paused=False, changed=pause is not None, saved=not self._decisions.problem)

    def throttle(self) -> ThrottleStatus:
        """Return the limits on migrations and their state."""
        return _throttle_status(self._throttle)

    def set_throttle(
        self, bytes_per_step: int | None, bytes_per_second: int | None, reason: str = "", requested_by: str = ""
    ) -> ThrottleStatus:
        """Change limits from the next chunk on: None keeps one, 0 lifts it. The change survives a restart."""
        given = {"bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second}
        changed = {name: limit or None for name, limit in given.items() if limit is not None}
        if not changed:
            return self.throttle()
        with self._lock:
            limits = replace(self._throttle.limits, **changed)
            self._throttle.set_limits(limits)
            chosen = ThrottleOverride(**vars(limits), configured=self._control.throttle.model_dump_json())
            self._decisions.update(throttle=chosen)
        self.record("throttle", requested_by, reason, chosen.message)
        return self.throttle()

    def apply_config(self, control: ControlConfig) -> None:
        """Apply a new configuration. Its throttle, if it has changed, replaces the chosen one."""
        with self._lock:
            before, self._control = self._control.throttle, control
            if control.throttle != before:
                self._throttle.set_limits(ThrottleLimits(**control.throttle.model_dump()))
            self._drop_superseded_throttle()

    def record_reload(self, requested_by: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        """Record the result of a reload."""
        if isinstance(outcome, FlexdError):
            detail = f"rejected: {outcome.message}"
        else:
            detail = f"applied {', '.join(outcome.applied) or 'nothing'}"
            if outcome.pending:
                detail += f"; needs a restart: {', '.join(outcome.pending)}"
        self.record("reload", requested_by, reason, detail)

    def record_withheld(self, requested_by: str, reason: str) -> None:
        """Record that a plan was withheld because it saves too little."""
        self.record("withhold", requested_by, reason)

    def record(self, kind: ActionKind, requested_by: str, reason: str, detail: str = "") -> None:
        """Write a command to the log and the history."""
        requested_by = requested_by or ANONYMOUS
        message = "; ".join(each for each in (reason, detail) if each)
        logger.info("%s by %s: %s", kind, requested_by, message or "no reason given")
        self._history.record_action(kind, requested_by, reason, detail)

    def _drop_superseded_throttle(self) -> None:
        throttle = self._decisions.current.throttle
        if throttle is not None and not throttle.matches_config(self._control.throttle):
            logger.info("throttle: control.throttle has changed and replaces the chosen one: %s", throttle.message)
            self._decisions.update(throttle=None)


_OUTCOMES: Mapping[MigrationState, ReplanOutcome] = {
    MigrationState.COMMITTED: "committed",
    MigrationState.SUPERSEDED: "superseded",
    MigrationState.ABORTED: "aborted",
    MigrationState.FAILED: "failed",
}


class PlanCommands:
    """Each raises PlanError if no plan can be made: too few accesses, no ranks. Thread-safe.

    Args:
        stopping: set when the daemon ends: no wait outlives it.
        operator: the pause.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        planning: Planning,
        auto: AutoPlanner,
        coordinator: Coordinator,
        stopping: threading.Event,
        operator: OperatorCommands,
    ) -> None:
        self._keyspace = keyspace
        self._planning = planning
        self._auto = auto
        self._coordinator = coordinator
        self._stopping = stopping
        self._operator = operator

    def plan(self) -> PlanReport:
        """Make a dry run, which is kept for ``apply``."""
        # A GET does not name its user.
        trigger = Trigger(TriggerKind.MANUAL, "dry run", requested_by="")
        return proposal_report(self._planning.propose(trigger, dry_run=True))

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        """Explain the tier of a row, or of the ``hottest`` rows of a table, by a plan made now. Moves nothing.

        Raises:
            ApiError: no such table or row (404).
        """
        index = self._keyspace.index.get(table)
        if index is None:
            names = ", ".join(each.name for each in self._keyspace.tables)
            raise ApiError(f"no table {table!r}", status=404, remedy=f"one of {names}"[:500])
        rows = self._keyspace.tables[index].rows
        if row is not None and not 0 <= row < rows:
            raise ApiError(f"no row {row} in table {table!r}", status=404, remedy=f"0 to {rows - 1}")
        made, gates = self._planning.explain(table, row, hottest)
        affinity = self._planning.affinity
        return explanation(made, gates, None if affinity is None else affinity.home_of)

    def proposals(self) -> ProposalList:
        """Return the kept plans."""
        return proposal_list(self._planning)

    def proposal(self, plan_id: str) -> PlanReport:
        """Return a kept plan. Raises ApiError if there is none of that id (404)."""
        return proposal_report(self._planning.proposals.get(plan_id))

    def user_nodes(self, offset: int, limit: int) -> UserNodePage:
        """Return users and their nodes. Raises ApiError if none is known (409)."""
        affinity = self._planning.affinity
        found = None if affinity is None else affinity.newest
        if found is None or found.plan.users is None:
            raise ApiError(
                "the node of no user is known",
                status=409,
                remedy="send user_ids with the samples, set sketch.coaccess_memory_bytes, and make a plan: flexd plan",
            )
        return user_node_page(found, found.plan.users, offset, limit)

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, requested_by: str = "") -> ReplanResult:
        """Plan now and start the migration; wait at most ``wait_seconds`` for its end.

        Returns early when the daemon shuts down. A deadline that passes is no error: the outcome is ``timed_out`` and
        the migration goes on.

        Args:
            force: carry it out although a gate is closed; recorded.
            requested_by: the person or program that requests it; recorded.

        Raises:
            ApiError: paused (409), or shutting down (503).
        """
        self._check_running()
        proposal = self._planning.propose(_manual_trigger(reason, requested_by), force=force)
        migration = self._planning.execute(proposal, force=force)
        return self._report(proposal, migration, wait_seconds)

    def apply(
        self, plan_id: str, reason: str, wait_seconds: float, *, force: bool = False, requested_by: str = ""
    ) -> ReplanResult:
        """Carry a kept plan out; waits and returns like ``replan``.

        Raises:
            PlanError: ranks, placement or accesses have changed since it was made, or a gate was closed.
            ApiError: no plan of that id is kept (404), paused (409), or shutting down (503).
        """
        self._check_running()
        proposal, migration = self._planning.apply(plan_id, _manual_trigger(reason, requested_by), force=force)
        return self._report(proposal, migration, wait_seconds)

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        if self._operator.paused is not None:
            raise ApiError(f"paused: {self._operator.paused.reason}", status=409, remedy="flexd resume")

    def _report(self, proposal: Proposal, migration: Migration | None, wait_seconds: float) -> ReplanResult:
        self._auto.record_manual_plan(executed=True)
        if migration is not None and (record := migration.record).overridden_gates:
            detail = f"plan {proposal.plan.plan_id} in spite of {', '.join(record.overridden_gates)}"
            self._operator.record("override", record.requested_by, record.reason, detail)
        report = proposal_report(proposal)
        if migration is None and len(proposal.plan.delta):
            return self._result("withheld", report, f"{proposal.withheld}: nothing is moved")
        if migration is None:
            return self._result("unchanged", report, "the live placement is as good as the plan: nothing to move")
        deadline = time.monotonic() + wait_seconds
        while time.monotonic() < deadline and not migration.done and not self._stopping.is_set():
            migration.wait(min(0.5, deadline - time.monotonic()))
        state = migration.state
        outcome = _OUTCOMES.get(state, "timed_out" if wait_seconds > 0 else "accepted")
        result = self._result(outcome, report, f"{len(proposal.plan.delta)} rows: migration {state.value}")
        return result.model_copy(update={"migration": migration.report()})

    def _result(self, outcome: ReplanOutcome, plan: PlanReport, message: str) -> ReplanResult:
        version = self._coordinator.placement().version
        return ReplanResult(outcome=outcome, plan=plan, placement_version=version, message=message)


def _manual_trigger(reason: str, requested_by: str) -> Trigger:
    return Trigger(TriggerKind.MANUAL, reason, requested_by or ANONYMOUS)
