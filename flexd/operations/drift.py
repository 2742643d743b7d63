"""Measure, in a thread of its own, how much better than the live placement a plan made now would be."""

from __future__ import annotations

import logging
import math
import threading
import time

from flexd.control.daemon.coordinator import Coordinator
from flexd.core.errors import FlexdError
from flexd.core.supervision import Supervisor, fault_point
from flexd.operations.executions import Executions
from flexd.operations.live_plan import PlanMaker
from flexd.operations.planning import saving_gate
from flexd.planner.drift import Drift

_log = logging.getLogger(__name__)

MAX_DUTY_CYCLE = 0.003
"""Largest share of time spent evaluating: after a slow evaluation the next one starts later."""


class DriftMonitor:
    """Compares, every ``planner.drift_interval_seconds``, the live placement with the plan that would be made now.

    Thread-safe. Nothing is evaluated during a migration. A reason to plan is given when the ratio exceeds the threshold
    and the plan would save at least ``planner.min_saving``: a plan that would be withheld is no reason.

    Args:
        supervisor: of the process; records the faults of the thread.
    """

    def __init__(
        self,
        maker: PlanMaker,
        coordinator: Coordinator,
        executions: Executions,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._maker = maker
        self._coordinator = coordinator
        self._executions = executions
        self._guard = threading.Lock()
        self._stop = threading.Event()
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-drift")
        self._thread = supervisor.thread("flexd-drift", self._run, self._stop)
        self._plans = 0
        """Plans made by others since the start."""
        self._reason: str | None = None
        self._newest: Drift | None = None
        self._version = -1
        """Version of the placement that the newest evaluation is about."""
        self._problem: str | None = None
        self._evaluated_at = math.nan
        self.seconds = 0.0
        """Wall time of all evaluations."""
        self.evaluations = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the thread. Returns whether it ended within the deadline."""
        self._stop.set()
        return self._thread.join(timeout_seconds)

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

    def _run(self) -> None:
        wait = self._maker.settings.drift_interval_seconds
        while not self._stop.wait(wait):
            started = time.monotonic()
            try:
                fault_point("thread.drift")
                self.evaluate()
                self._problem = None
            except FlexdError as error:
                # A table without accesses, for one; each problem is logged once.
                if str(error) != self._problem:
                    _log.warning("drift: %s", error)
                self._problem = str(error)
            finally:
                took = time.monotonic() - started
                self.seconds += took
                self.evaluations += 1
            self._watch.progress()
            wait = max(self._maker.settings.drift_interval_seconds, took / MAX_DUTY_CYCLE)
