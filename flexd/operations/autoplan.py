"""Plans that nobody has asked for: from a trigger to a migration, or to a proposal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import FlexdError
from flexd.operations.drift import DriftMonitor
from flexd.operations.maintenance_windows import Calendar
from flexd.operations.planning import Planning
from flexd.operations.triggers import Triggers, TriggerSettings

logger = logging.getLogger(__name__)

LEAST_SPACING_SECONDS = 0.1
"""Between two tries, whatever is configured: the loop does not spin."""


def trigger_settings(planner: PlannerConfig) -> TriggerSettings:
    return TriggerSettings(
        interval_seconds=planner.interval_seconds,
        min_spacing_seconds=max(planner.min_spacing_seconds, LEAST_SPACING_SECONDS),
        auto=planner.auto,
        calendar=Calendar.of(planner.maintenance),
    )


class AutoPlanner:
    """``tick`` belongs to the daemon's loop; attributes may be read from any thread.

    Args:
        resume: asked once, when the ranks are all there for the first time: whether it has set something going that an
            earlier daemon has left undone. Then the interval counts from there.

    Attributes:
        refusal: why the newest try made no plan; empty if it did.
    """

    def __init__(
        self,
        planner: PlannerConfig,
        planning: Planning,
        drift: DriftMonitor,
        live: Callable[[], LiveTopology | None],
        resume: Callable[[], bool] = lambda: False,
    ) -> None:
        self.triggers = Triggers(trigger_settings(planner), time.monotonic())
        self._planning = planning
        self._drift = drift
        self._live = live
        self._go_on = resume
        self._looked_back = False
        self._logged = ""
        self.refusal = ""

    def tick(self) -> None:
        """Plans if a trigger fires, and carries the plan out if it may."""
        live = self._live()
        if live is None or not live.ready:
            return
        if not self._looked_back:
            self._looked_back = True
            if self._go_on():
                self.triggers.migration_started(time.monotonic(), live.generation)
                return
        due = self.triggers.due(time.monotonic(), time.time(), live.generation, self._drift.pop_reason)
        if due is None:
            return
        try:
            proposal = self._planning.propose(due.trigger)
            if due.held and len(proposal.plan.delta):
                logger.info("plan %s (%s) is proposed only: %s", proposal.plan.plan_id, due.trigger.reason, due.held)
            else:
                self._planning.execute(proposal)
        except FlexdError as error:
            # The remedy names the cause, whatever the figures in the message are now.
            if error.remedy != self._logged:
                logger.info("no plan: %s", error)
            self._logged, self.refusal = error.remedy, error.message
            return
        self._logged = self.refusal = ""
        self.triggers.plan_made(due, live.generation)

    def record_manual_plan(self, *, executed: bool) -> None:
        """Somebody has had a plan made, and carried out or not."""
        live = self._live() if executed else None
        self.triggers.record_manual_plan(time.monotonic(), executed=executed)
        if live is not None:
            self.triggers.migration_started(time.monotonic(), live.generation)

    def apply_config(self, planner: PlannerConfig) -> None:
        """Other settings, from the next tick on."""
        self.triggers.apply_settings(trigger_settings(planner), time.monotonic())
