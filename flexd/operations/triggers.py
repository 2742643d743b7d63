"""Triggers of automatic planning, and whether a plan may be executed without a user. Pure functions of the given time.

A trigger leads to a plan at once. With ``planner.auto: false``, or outside the maintenance windows, the plan is held:
it is kept as a proposal. A trigger that only a window held fires again when the window opens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from flexd.operations.maintenance_windows import Calendar

DAEMON_ACTOR = "flexd"
"""The requester of actions that the daemon takes by itself."""


class TriggerKind(Enum):
    INTERVAL = "interval"
    DRIFT = "drift"
    TOPOLOGY = "topology"
    MANUAL = "manual"
    VERIFY = "verify"


@dataclass(frozen=True)
class Trigger:
    """Why a plan is made.

    Attributes:
        kind: kind of the cause.
        reason: the cause in words, recorded with plan and migration.
        who: the user who requested it, or ``DAEMON_ACTOR``.
    """

    kind: TriggerKind
    reason: str
    who: str = DAEMON_ACTOR


@dataclass(frozen=True)
class FiredTrigger:
    """A trigger that has fired.

    Attributes:
        trigger: the trigger.
        held: why the plan is only proposed; empty if it is executed.
    """

    trigger: Trigger
    held: str = ""


@dataclass(frozen=True)
class TriggerSettings:
    """When to plan.

    Attributes:
        interval_seconds: time between plans.
        min_spacing_seconds: least time between two attempts of the daemon.
        auto: whether plans are executed; False only proposes them.
        calendar: maintenance windows.
    """

    interval_seconds: float
    min_spacing_seconds: float
    auto: bool = True
    calendar: Calendar = field(default_factory=Calendar)


class Triggers:
    """The causes of automatic planning. Only the daemon's loop calls methods; any thread may read attributes.

    Args:
        now: monotonic seconds.

    Attributes:
        fired: triggers that have fired, by kind.
    """

    def __init__(self, settings: TriggerSettings, now: float) -> None:
        self.settings = settings
        self.fired: Counter[TriggerKind] = Counter()
        self._planned_generation = 0
        self._next_plan_at = now + settings.interval_seconds
        self._next_try_at = -math.inf
        self._waiting: Trigger | None = None
        self._proposed_for_drift = False

    @property
    def waiting_for_window(self) -> Trigger | None:
        """The trigger that fires when a maintenance window opens; None if none waits."""
        return self._waiting

    def held(self, unix_seconds: float) -> str:
        """Return why the daemon starts no migration by itself now; empty if it may."""
        if not self.settings.auto:
            return "planner.auto is false"
        return "" if self.settings.calendar.is_open(unix_seconds) else "outside the maintenance windows"

    def due(
        self, now: float, unix_seconds: float, generation: int, drift: Callable[[], str | None]
    ) -> FiredTrigger | None:
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
        self._next_try_at = now + self.settings.min_spacing_seconds
        self.fired[trigger.kind] += 1
        return FiredTrigger(trigger, held)

    def _fired(self, now: float, generation: int, held: str, drift: Callable[[], str | None]) -> Trigger | None:
        if generation != self._planned_generation:
            return Trigger(TriggerKind.TOPOLOGY, "topology changed")
        if self._waiting is not None and not held:
            return replace(self._waiting, reason=f"{self._waiting.reason}, held until the maintenance window opened")
        reason = None if held and self._proposed_for_drift else drift()
        if reason:
            return Trigger(TriggerKind.DRIFT, reason)
        return Trigger(TriggerKind.INTERVAL, "interval") if now >= self._next_plan_at else None

    def plan_made(self, due: FiredTrigger, generation: int) -> None:
        """Record that the plan was made and, unless ``due.held``, executed.

        Drift proposes once until a plan is executed: while the placement stays, every evaluation would find the same.
        """
        self._planned_generation = generation
        if not due.held:
            self._waiting = None
            self._proposed_for_drift = False
        else:
            self._proposed_for_drift |= due.trigger.kind is TriggerKind.DRIFT
            if self.settings.auto:
                self._waiting = self._waiting or due.trigger

    def record_manual_plan(self, now: float, *, executed: bool) -> None:
        """Record a plan that a user requested. If it was executed, the interval starts over."""
        self.fired[TriggerKind.MANUAL] += 1
        if executed:
            self._next_plan_at = now + self.settings.interval_seconds
            self._waiting = None
            self._proposed_for_drift = False

    def migration_started(self, now: float, generation: int) -> None:
        """Record a migration that no trigger caused: the generation needs no plan any more, and the interval starts
        over."""
        self._planned_generation = generation
        self._next_plan_at = now + self.settings.interval_seconds

    def apply_settings(self, settings: TriggerSettings, now: float) -> None:
        """Use other settings from now on."""
        self.settings = settings
        self._next_plan_at = min(self._next_plan_at, now + settings.interval_seconds)
        if not settings.auto:
            self._waiting = None
