"""Automatic planning: the drift that is measured now and then, triggers, and the migration or the proposal
that one leads to.

A trigger leads to a plan at once. With ``planner.auto: false``, or outside the maintenance windows, the plan is held:
it is kept as a proposal. A trigger that only a window held fires again when the window opens.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from flexd.config.sections import PlannerConfig, WindowConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import Migration, MigrationRecord, MigrationState
from flexd.core.errors import FlexdError
from flexd.core.placement import Tier
from flexd.core.supervision import Backoff, fault_point
from flexd.operations.executions import Executions, Trigger, TriggerKind
from flexd.operations.live_plan import PlanMaker
from flexd.operations.planning import Planning, saving_gate
from flexd.operations.verification import Verifier, plan_kind
from flexd.planner.drift import Drift
from flexd.planner.plan import Plan

logger = logging.getLogger(__name__)

MAX_DUTY_CYCLE = 0.003
"""Largest share of time spent evaluating: after a slow evaluation the next one starts later."""


class DriftMonitor:
    """Compares, every ``planner.drift_interval_seconds``, the live placement with the plan that would be made now.

    Thread-safe. Nothing is evaluated during a migration. A reason to plan is given when the ratio exceeds the threshold
    and the plan would save at least ``planner.min_saving``: a plan that would be withheld is no reason.

    The daemon's loop calls ``tick``.
    """

    def __init__(self, maker: PlanMaker, coordinator: Coordinator, executions: Executions) -> None:
        self._maker = maker
        self._coordinator = coordinator
        self._executions = executions
        self._guard = threading.Lock()
        self._next_at = time.monotonic() + maker.settings.drift_interval_seconds
        # Plans made by others since the start.
        self._plans = 0
        self._reason: str | None = None
        self._newest: Drift | None = None
        # Version of the placement that the newest evaluation is about.
        self._version = -1
        self._problem: str | None = None
        self._evaluated_at = math.nan
        self.seconds = 0.0
        """Wall time of all evaluations."""
        self.evaluations = 0

    @property
    def newest(self) -> Drift | None:
        """The newest evaluation; None once the placement is another."""
        version = self._coordinator.placement().version
        with self._guard:
            return self._newest if self._version == version else None

    def age_seconds(self) -> float:
        """Seconds since the newest evaluation; NaN before the first."""
        return time.monotonic() - self._evaluated_at

    def planned(self) -> None:
        """Forget the reason to plan: a plan has been executed, withheld, or found to change nothing."""
        with self._guard:
            self._plans += 1
            self._reason = None

    def pop_reason(self) -> str | None:
        """Return why to plan again, once for each evaluation beyond the threshold; None if there is no reason."""
        version = self._coordinator.placement().version
        with self._guard:
            reason, self._reason = self._reason, None
            return reason if self._version == version else None

    def evaluate(self) -> Drift | None:
        """Evaluate now. Returns None if nothing can be compared: no ranks, too few samples, accesses of a step not
        known, a migration, or a plan that was made meanwhile.

        Raises:
            PlanError: no plan can be made from the profile.
        """
        live, settings = self._coordinator.live(), self._maker.settings
        if live is None or not live.ready or self._executions.migrating:
            return None
        if not self._maker.accesses_per_step(live.layout.world_size):
            return None
        with self._guard:
            plans = self._plans
        basis = self._maker.basis()
        if basis.profile.samples < max(1, settings.min_samples):
            return None
        plan = basis.plan("drift")
        drift = basis.drift(plan.target, basis.live)
        with self._guard:
            if self._plans != plans or self._executions.migrating:
                return None
            if self._coordinator.placement().version != basis.live.version:
                return None
            self._newest = drift
            self._evaluated_at = time.monotonic()
            threshold = settings.drift_threshold
            worth_it = len(plan.delta) > 0 and saving_gate(plan, settings.min_saving).open
            self._reason = drift.reason_to_plan(threshold) if threshold is not None and worth_it else None
            self._version = basis.live.version
            return drift

    def tick(self) -> None:
        """Evaluate if it is time. An evaluation that is not possible is logged, once for each problem."""
        began = time.monotonic()
        if began < self._next_at:
            return
        try:
            fault_point("thread.drift")
            self.evaluate()
            self._problem = None
        except FlexdError as error:  # a table without accesses, for one
            if str(error) != self._problem:
                logger.warning("drift: %s", error)
            self._problem = str(error)
        finally:
            took = time.monotonic() - began
            self.seconds += took
            self.evaluations += 1
            self._next_at = began + took + max(self._maker.settings.drift_interval_seconds, took / MAX_DUTY_CYCLE)


# Two weeks show every window, even if a change of the clocks skips one of its occurrences.
_LOOK_AHEAD_MINUTES = 15 * 24 * 60
_DAY_SECONDS = 86_400


class Calendar:
    """All windows. Automatic migrations may start inside an allowing window (always, if there is none), and never
    inside a forbidding one."""

    def __init__(self, windows: Sequence[WindowConfig] = ()) -> None:
        self._allowing = [window for window in windows if window.kind == "allow"]
        self._forbidding = [window for window in windows if window.kind == "forbid"]
        # From when to when the newest answer of ``next_change`` holds, and the answer.
        self._found: tuple[float, float, float | None] | None = None

    def is_open(self, unix_seconds: float) -> bool:
        allowed = not self._allowing or any(window.contains(unix_seconds) for window in self._allowing)
        return allowed and not any(window.contains(unix_seconds) for window in self._forbidding)

    def next_change(self, unix_seconds: float) -> float | None:
        """Return when ``is_open`` changes next, in Unix seconds; None if it does not within two weeks.

        Windows begin and end with a minute of every time zone. The answer is searched for again once it has passed.
        """
        if not self._allowing and not self._forbidding:
            return None
        found = self._found
        if found is None or not found[0] <= unix_seconds < found[1]:
            now, minute = self.is_open(unix_seconds), int(unix_seconds // 60)
            minutes = range(minute + 1, minute + _LOOK_AHEAD_MINUTES)
            change = next((float(60 * each) for each in minutes if self.is_open(60.0 * each) != now), None)
            found = self._found = unix_seconds, change or unix_seconds + _DAY_SECONDS, change
        return found[2]


MIN_SPACING_SECONDS = 0.1
"""Lower bound of ``planner.min_spacing_seconds``, so that the loop does not spin."""


class Triggers:
    """The causes of automatic planning. Only the daemon's loop calls methods; any thread may read attributes.

    Args:
        now: monotonic seconds.

    Attributes:
        fired: triggers that have fired, by kind.
        waiting_for_window: the trigger that fires when a maintenance window opens; None if none waits.
    """

    def __init__(self, settings: PlannerConfig, now: float) -> None:
        self.settings = settings
        self.calendar = Calendar(settings.maintenance)
        self.fired: Counter[TriggerKind] = Counter()
        self._planned_generation = 0
        self._next_plan_at = now + settings.interval_seconds
        self._next_try_at = -math.inf
        self.waiting_for_window: Trigger | None = None
        self._proposed_for_drift = False

    def held(self, unix_seconds: float) -> str:
        """Return why the daemon starts no migration by itself now; empty if it may."""
        if not self.settings.auto:
            return "planner.auto is false"
        return "" if self.calendar.is_open(unix_seconds) else "outside the maintenance windows"

    def due(self, now: float, unix_seconds: float, generation: int, drift: Callable[[], str | None]) -> Trigger | None:
        """Return the trigger that has fired; None if none has. The caller plans and then calls ``plan_made``.

        Args:
            now: monotonic seconds.
            unix_seconds: wall time, for the maintenance windows.
            generation: topology generation of the live ranks.
            drift: pops the reason of the newest drift evaluation; called only when a plan could follow.
        """
        if now < self._next_try_at and now < self._next_plan_at:
            return None
        held = self.held(unix_seconds)
        trigger = self._fired(now, generation, held, drift)
        if trigger is None:
            return None
        self._next_plan_at = now + self.settings.interval_seconds
        self._next_try_at = now + max(self.settings.min_spacing_seconds, MIN_SPACING_SECONDS)
        self.fired[trigger.kind] += 1
        return replace(trigger, held=held)

    def _fired(self, now: float, generation: int, held: str, drift: Callable[[], str | None]) -> Trigger | None:
        if generation != self._planned_generation:
            return Trigger(TriggerKind.TOPOLOGY, "topology changed")
        if self.waiting_for_window is not None and not held:
            return replace(
                self.waiting_for_window,
                held="",
                reason=f"{self.waiting_for_window.reason}, held until the maintenance window opened",
            )
        reason = None if held and self._proposed_for_drift else drift()
        if reason:
            return Trigger(TriggerKind.DRIFT, reason)
        return Trigger(TriggerKind.INTERVAL, "interval") if now >= self._next_plan_at else None

    def plan_made(self, due: Trigger, generation: int) -> None:
        """Record that the plan was made and, unless ``due.held``, executed.

        Drift proposes once until a plan is executed: while the placement stays, every evaluation would find the same.
        """
        self._planned_generation = generation
        if not due.held:
            self.waiting_for_window = None
            self._proposed_for_drift = False
        else:
            self._proposed_for_drift |= due.kind is TriggerKind.DRIFT
            if self.settings.auto:
                self.waiting_for_window = self.waiting_for_window or due

    def record_manual_plan(self, now: float, *, executed: bool) -> None:
        """Record a plan that a user requested. If it was executed, the interval starts over."""
        self.fired[TriggerKind.MANUAL] += 1
        if executed:
            self._next_plan_at = now + self.settings.interval_seconds
            self.waiting_for_window = None
            self._proposed_for_drift = False

    def migration_started(self, now: float, generation: int) -> None:
        """Record a migration that no trigger caused: the generation needs no plan any more, and the interval starts
        over."""
        self._planned_generation = generation
        self._next_plan_at = now + self.settings.interval_seconds

    def apply_settings(self, settings: PlannerConfig, now: float) -> None:
        """Use other settings from now on."""
        self.settings, self.calendar = settings, Calendar(settings.maintenance)
        self._next_plan_at = min(self._next_plan_at, now + settings.interval_seconds)
        if not settings.auto:
            self.waiting_for_window = None


FIRST_SECONDS = 5.0
LONGEST_SECONDS = 300.0


class FailureBackoff:
    """Only the daemon's loop calls ``observe``; any thread may call the rest.

    The wait begins at ``FIRST_SECONDS`` and doubles up to ``LONGEST_SECONDS`` with every migration that fails without
    an applied chunk. A committed migration, and ranks of another topology generation, end it.
    """

    def __init__(self) -> None:
        self._newest: Migration | None = None
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
        self._failed: MigrationRecord | None = None
        self._until = 0.0

    def observe(self, migration: Migration | None, now: float) -> None:
        """Record the newest migration once it has ended.

        Args:
            now: monotonic seconds.
        """
        if migration is None or not migration.done or migration is self._newest:
            return
        self._newest = migration
        if migration.state is MigrationState.COMMITTED:
            self._backoff.reset()
            self._failed = None
        elif migration.state is MigrationState.FAILED:
            if migration.record.chunks_applied:
                self._backoff.reset()
            self._failed, self._until = migration.record, now + self._backoff.seconds()

    def seconds(self, now: float, generation: int) -> float:
        """Return the rest of the wait, for ranks of this topology generation; 0 if there is none."""
        of_these_ranks = self._failed is not None and self._failed.generation in (None, generation)
        return max(0.0, self._until - now) if of_these_ranks else 0.0

    def reason(self, now: float, generation: int) -> str:
        """Return why no plan is made now; empty if there is no reason."""
        failed, seconds = self._failed, self.seconds(now, generation)
        if failed is None or not seconds:
            return ""
        return f"migration {failed.migration_id} failed: {failed.problem} (tried again by itself in {seconds:.0f} s)"


class AutoPlanner:
    """Plans when a trigger fires. Only the daemon's loop calls ``tick``; any thread may read attributes.

    Args:
        resume_rollback: called once, when all ranks are ready for the first time. Resumes a rollback that an earlier
            daemon left unfinished and returns whether there was one; the planning interval then starts over.
        verifier: measures executed plans; the daemon makes no plan by itself meanwhile.

    Attributes:
        refusal: why the newest attempt made no plan; empty if it made one.
        failure_backoff: waits after a failed migration; a user's plan does not.
    """

    def __init__(
        self,
        planner: PlannerConfig,
        planning: Planning,
        drift: DriftMonitor,
        live: Callable[[], LiveTopology | None],
        resume_rollback: Callable[[], bool] = lambda: False,
        verifier: Verifier | None = None,
    ) -> None:
        self.triggers = Triggers(planner, time.monotonic())
        self.failure_backoff = FailureBackoff()
        self._planning = planning
        self._drift = drift
        self._live = live
        self._resume_rollback = resume_rollback
        self._rollback_checked = False
        self.verifier = verifier
        self._logged = ""
        self.refusal = ""

    def tick(self) -> None:
        """Make a plan if a trigger has fired, and execute it unless it is held."""
        fault_point("thread.planning")
        live = self._live()
        if live is None or not live.ready:
            return
        if not self._rollback_checked:
            resumed = self._resume_rollback()
            self._rollback_checked = True
            if resumed:
                self.triggers.migration_started(time.monotonic(), live.generation)
                return
        if self.verifier is not None and self.verifier.tick(live):
            return
        self.failure_backoff.observe(self._planning.executions.last, time.monotonic())
        if self.failure_backoff.seconds(time.monotonic(), live.generation):
            return
        due = self.triggers.due(time.monotonic(), time.time(), live.generation, self._drift.pop_reason)
        if due is None:
            return
        try:
            proposal = self._planning.propose(due)
            moves = len(proposal.plan.delta) > 0 and not proposal.withheld
            held_back = self._held_back(proposal.plan) if moves else ""
            held = held_back or (due.held if moves else "")
            if not held:
                self._planning.execute(proposal)
            elif held != self._logged:
                logger.info("plan %s (%s) is proposed only: %s", proposal.plan.plan_id, due.reason, held)
        except FlexdError as error:
            # The remedy identifies the cause: figures in the message change with every attempt.
            if error.remedy != self._logged:
                logger.info("no plan: %s", error)
            self._logged, self.refusal = error.remedy, error.message
            return
        self._logged, self.refusal = held_back, ""
        self.triggers.plan_made(due, live.generation)

    def _held_back(self, plan: Plan) -> str:
        """Return why a plan of this kind is not executed by itself: one like it was rolled back; empty if it is.

        What takes rows back because the live placement exceeds its limits is not held.
        """
        kind = plan_kind(plan.delta)
        if self.verifier is None or not kind or (kind == Tier.HOME.name and not plan.live_fits):
            return ""
        return self.verifier.decisions.held_reason(kind)

    def held_off(self) -> str:
        """Return why and for how long a failed migration holds the daemon's next plan back; empty if none does."""
        live = self._live()
        return self.failure_backoff.reason(time.monotonic(), 0 if live is None else live.generation)

    def record_manual_plan(self, *, executed: bool) -> None:
        """Record a plan that a user requested, and whether it was executed."""
        live = self._live() if executed else None
        self.triggers.record_manual_plan(time.monotonic(), executed=executed)
        if live is not None:
            self.triggers.migration_started(time.monotonic(), live.generation)

    def apply_config(self, planner: PlannerConfig) -> None:
        """Use other settings from the next tick on."""
        self.triggers.apply_settings(planner, time.monotonic())
