"""Triggers of automatic planning, and whether a plan may be executed without a user. Pure functions of the given time.

A trigger leads to a plan at once. With ``planner.auto: false``, or outside the maintenance windows, the plan is held:
it is kept as a proposal. A trigger that only a window held fires again when the window opens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from zoneinfo import ZoneInfo

from flexd.config.planner import PlannerConfig, WindowConfig

_LOOK_AHEAD_DAYS = 15
"""Two weeks show every window, even if a change of the clocks skips one of its occurrences."""
_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Window:
    """A daily period on some days of the week, in local time of a time zone.

    Where clocks are set back, both occurrences of the repeated hour are inside; a skipped hour is never inside.

    Attributes:
        days: days on which the window begins, 0 (Monday) to 6.
        start_minute: minute of the day, 0 to 1440.
        end_minute: minute of the day, excluded; before ``start_minute`` it is on the next day.
        zone: IANA time zone.
        forbids: whether automatic migrations are forbidden inside; else they are allowed.
    """

    days: frozenset[int]
    start_minute: int
    end_minute: int
    zone: ZoneInfo
    forbids: bool = False

    @staticmethod
    def of(config: WindowConfig) -> Window:
        start, end = (int(text[:2]) * 60 + int(text[3:]) for text in (config.start, config.end))
        days = frozenset(config.day_numbers())
        return Window(days, start, end, ZoneInfo(config.time_zone), config.kind == "forbid")

    def contains(self, unix_seconds: float) -> bool:
        """Return whether the time is inside; the end is not."""
        local = datetime.fromtimestamp(unix_seconds, self.zone)
        minute = local.hour * 60 + local.minute
        today, yesterday = local.weekday() in self.days, (local.weekday() - 1) % 7 in self.days
        if self.start_minute < self.end_minute:
            return today and self.start_minute <= minute < self.end_minute
        return (today and minute >= self.start_minute) or (yesterday and minute < self.end_minute)

    def edges(self, unix_seconds: float) -> Iterator[float]:
        """Yield the times of the next days at which ``contains`` may change, in no order."""
        for day in range(-1, _LOOK_AHEAD_DAYS):
            moment = unix_seconds + day * _DAY_SECONDS
            midnight = datetime.fromtimestamp(moment, self.zone).replace(hour=0, minute=0, second=0, microsecond=0)
            for minutes in (self.start_minute, self.end_minute):
                wall = (midnight.replace(tzinfo=None) + timedelta(minutes=minutes)).replace(tzinfo=self.zone)
                yield wall.timestamp()
                yield wall.replace(fold=1).timestamp()
            yield from self._clock_change(moment, moment + _DAY_SECONDS)

    def _clock_change(self, low: float, high: float) -> Iterator[float]:
        """Yield the time of a change of the clocks between ``low`` and ``high``, to the second."""

        def offset(moment: float) -> timedelta | None:
            return datetime.fromtimestamp(moment, self.zone).utcoffset()

        low, high = float(int(low)), float(int(high))
        before = offset(low)
        if before == offset(high):
            return
        while high - low > 1:
            middle = float(int((low + high) / 2))
            low, high = (middle, high) if offset(middle) == before else (low, middle)
        yield high


class Calendar:
    """All windows. Automatic migrations may start inside an allowing window (always, if there is none), and never
    inside a forbidding one."""

    def __init__(self, windows: Sequence[Window] = ()) -> None:
        self._allowing = [window for window in windows if not window.forbids]
        self._forbidding = [window for window in windows if window.forbids]

    @staticmethod
    def of(configs: Sequence[WindowConfig]) -> Calendar:
        return Calendar([Window.of(config) for config in configs])

    def is_open(self, unix_seconds: float) -> bool:
        allowed = not self._allowing or any(window.contains(unix_seconds) for window in self._allowing)
        return allowed and not any(window.contains(unix_seconds) for window in self._forbidding)

    def next_change(self, unix_seconds: float) -> float | None:
        """Return when ``is_open`` changes next, in Unix seconds; None if it does not within two weeks."""
        now = self.is_open(unix_seconds)
        edges = {edge for window in (*self._allowing, *self._forbidding) for edge in window.edges(unix_seconds)}
        later = sorted(edge for edge in edges if edge > unix_seconds)
        return next((edge for edge in later if self.is_open(edge) != now), None)


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
        requested_by: the user who requested it, or ``DAEMON_ACTOR``.
        held: why the plan is only proposed; empty if it is executed.
    """

    kind: TriggerKind
    reason: str
    requested_by: str = DAEMON_ACTOR
    held: str = ""


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
        self.calendar = Calendar.of(settings.maintenance)
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
        self.settings, self.calendar = settings, Calendar.of(settings.maintenance)
        self._next_plan_at = min(self._next_plan_at, now + settings.interval_seconds)
        if not settings.auto:
            self.waiting_for_window = None
