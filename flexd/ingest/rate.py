"""Message and access rates of a stream, whether its messages arrive continuously or in bursts."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 2.0


@dataclass(frozen=True)
class Totals:
    """Messages and accesses since the start."""

    messages: int = 0
    accesses: int = 0


@dataclass(frozen=True)
class _Burst:
    """Arrivals without a pause of ``WINDOW_SECONDS``.

    Attributes:
        first: time of the first arrival.
        since: time of the last arrival before this burst.
        before: totals before the first arrival.
    """

    first: float
    since: float
    before: Totals


class RateMeter:
    """Measures rates from totals that the caller passes in, with monotonic times.

    A continuous stream is measured over windows of ``WINDOW_SECONDS``. Ranks with a tap send one message each and then
    nothing until the daemon's next snapshot, up to a minute later: such a burst stands for the time since the burst
    before it, and its rate holds until the next burst, at most for twice that time.
    """

    def __init__(self, now: float) -> None:
        self.messages_per_second = self.accesses_per_second = 0.0
        self._totals = Totals()
        self._last_arrival = now
        self._burst: _Burst | None = None
        self._window = (now, Totals())

    def update(self, now: float, totals: Totals) -> None:
        """Update both rates; called several times in each window."""
        if totals != self._totals:
            if self._burst is None or now - self._last_arrival >= WINDOW_SECONDS:
                self._burst = _Burst(now, self._last_arrival, self._totals)
                self._window = (now, totals)
            self._totals, self._last_arrival = totals, now
        burst = self._burst
        if burst is None:
            return
        if self._last_arrival - burst.first >= WINDOW_SECONDS:
            since, before = self._window
            if now - since >= WINDOW_SECONDS:
                self._set(before, now - since)
                self._window = (now, totals)
        elif now - self._last_arrival >= WINDOW_SECONDS:
            period = max(WINDOW_SECONDS, self._last_arrival - burst.since)
            held = now - self._last_arrival <= 2 * period
            self._set(burst.before if held else totals, period)

    def _set(self, before: Totals, seconds: float) -> None:
        self.messages_per_second = (self._totals.messages - before.messages) / seconds
        self.accesses_per_second = (self._totals.accesses - before.accesses) / seconds
