"""Maintenance windows: when the daemon may start a migration by itself. Pure functions of the given time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from flexd.config.planner import WindowConfig

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
