"""What makes the daemon plan, and when it may act on it by itself. Pure: the caller tells the time.

A trigger leads to a plan at once. Whether the plan is carried out is another question: with ``planner.auto: false``,
or outside the maintenance windows, it is kept as a proposal. A trigger that only a window held back fires again when
the window opens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from flexd.operations.maintenance_windows import Calendar

ITSELF = "flexd"
"""Who acts when nobody has asked."""


class TriggerKind(Enum):
    INTERVAL = "interval"
    DRIFT = "drift"
    TOPOLOGY = "topology"
    MANUAL = "manual"


@dataclass(frozen=True)
class Trigger:
    """Why a plan is made.

    Attributes:
        reason: in words, recorded with plan and migration.
        who: asked for it.
    """

    kind: TriggerKind
    reason: str
    who: str = ITSELF


@dataclass(frozen=True)
class Due:
    """A trigger that has fired.

    Attributes:
        held: why the plan is kept as a proposal only; empty: it is carried out.
    """

    trigger: Trigger
    held: str = ""


@dataclass(frozen=True)
class TriggerSettings:
    """When to plan.

    Attributes:
        interval_seconds: between plans.
        min_spacing_seconds: between two tries of the daemon's own.
        auto: False proposes only.
        calendar: of the maintenance windows.
    """

    interval_seconds: float
    min_spacing_seconds: float
    auto: bool = True
    calendar: Calendar = field(default_factory=Calendar)


class Triggers:
    """The daemon's own reasons to plan. Every method belongs to the daemon's loop, except reading attributes.

    Args:
        now: monotonic seconds.

    Attributes:
        fired: plans asked for, by kind.
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
        """Fires when the maintenance window opens."""
        return self._waiting

    def held(self, unix_seconds: float) -> str:
        """Why the daemon starts no migration by itself now; empty if it does."""
        if not self.settings.auto:
            return "planner.auto is false"
        return "" if self.settings.calendar.is_open(unix_seconds) else "outside the maintenance windows"

    def due(self, now: float, unix_seconds: float, generation: int, drift: Callable[[], str | None]) -> Due | None:
        """What has fired, if anything; the caller plans, and says ``made`` if a plan could be made.

        Args:
            now: monotonic seconds. generation: of the live ranks.
            drift: takes the reason of the newest look at the drift, once; asked only when a plan could follow.
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
        return Due(trigger, held)

    def _fired(self, now: float, generation: int, held: str, drift: Callable[[], str | None]) -> Trigger | None:
        if generation != self._planned_generation:
            return Trigger(TriggerKind.TOPOLOGY, "topology changed")
        if self._waiting is not None and not held:
            return replace(self._waiting, reason=f"{self._waiting.reason}, held until the maintenance window opened")
        reason = None if held and self._proposed_for_drift else drift()
        if reason:
            return Trigger(TriggerKind.DRIFT, reason)
        return Trigger(TriggerKind.INTERVAL, "interval") if now >= self._next_plan_at else None

    def plan_made(self, due: Due, generation: int) -> None:
        """The plan is made and, unless ``due.held``, carried out. Drift proposes once until something is carried out:
        the placement stays, so it would say the same again after every look."""
        self._planned_generation = generation
        if not due.held:
            self._waiting = None
            self._proposed_for_drift = False
        else:
            self._proposed_for_drift |= due.trigger.kind is TriggerKind.DRIFT
            if self.settings.auto:
                self._waiting = self._waiting or due.trigger

    def record_manual_plan(self, now: float, *, executed: bool) -> None:
        """Somebody has had a plan made (and carried out): the interval counts from there."""
        self.fired[TriggerKind.MANUAL] += 1
        if executed:
            self._next_plan_at = now + self.settings.interval_seconds
            self._waiting = None
            self._proposed_for_drift = False

    def migration_started(self, now: float, generation: int) -> None:
        """Something was set going for these ranks that is no plan of these triggers: that they are new is no reason to
        plan any more, and the interval counts from there."""
        self._planned_generation = generation
        self._next_plan_at = now + self.settings.interval_seconds

    def apply_settings(self, settings: TriggerSettings, now: float) -> None:
        """Other settings, from now on."""
        self.settings = settings
        self._next_plan_at = min(self._next_plan_at, now + settings.interval_seconds)
        if not settings.auto:
            self._waiting = None
