"""Forward decay: the weight of an access by its event time, in whole units of a counter."""

import math

from flexd.core.errors import SketchError

# Of an exact counter: an access is counted with 2^16 to 2^18 units, so rounding to a whole unit changes its weight by
# at most 2^-17.
UNIT_BITS = 16


class ForwardDecay:
    """The event-time clock of a stream and the weights it gives (Cormode, Shkapenyuk, Srivastava and Xu, *Forward
    Decay*, ICDE 2009: exponential decay with a landmark).

    An access at event time t has the constant forward weight ``2^(t/H)``; its weight *now* is that divided by
    ``2^(now/H)``, where *now* is the newest event time. Nothing stored changes as time passes, so the order of arrival
    does not matter, late accesses are weighted like punctual ones, and idle tables decay by themselves. Counters hold
    the forward weight in whole units of ``2^unit_exponent``; an exponent is an integer, so a coarser unit is a
    shift.

    An event time is believed up to ``max_future_seconds`` after the arrival of its message, whatever the clock shows
    and however many messages agree. So the clock never runs ahead of arrival by more than that in total, and no set of
    messages can reduce the weight of accesses dated at their arrival by more than the decay over that time.

    Args:
        half_life_seconds: event time in which an access loses half its weight; None counts for ever (weight 1).
        max_future_seconds: accesses dated further ahead of their arrival are counted at their arrival.
        late_after_seconds: an access is late if it is older than the newest event by more than this. Ranks and
            partitions interleave, so small differences are normal.
    """

    def __init__(
        self, half_life_seconds: float | None, max_future_seconds: float, late_after_seconds: float = 0.0
    ) -> None:
        self.half_life_seconds = half_life_seconds
        self.max_future_seconds = max_future_seconds
        self.late_after_seconds = late_after_seconds
        # Newest event time, NaN before the first.
        self.newest_seconds = math.nan

    def admit(self, event_time_seconds: float, arrival_seconds: float = math.inf) -> tuple[float, bool, bool]:
        """Place one event time on the clock and move the clock.

        Args:
            arrival_seconds: when the message arrived, by a clock that no publisher sets. Infinite if the times are of
                no clock, such as step numbers: every time is then believed.

        Returns:
            (time at which accesses are counted, True if it is older than the newest event by more than the allowance,
            True if it is the arrival, because they are dated too far ahead of it).

        Raises:
            SketchError: the time is not finite.
        """
        time = event_time_seconds
        if not math.isfinite(time):
            raise SketchError(f"event time {time}", remedy="send Unix seconds")
        clamped = time > arrival_seconds + self.max_future_seconds
        if clamped:
            time = arrival_seconds
        late = time < self.newest_seconds - self.late_after_seconds
        if not time < self.newest_seconds:
            self.newest_seconds = time
        return time, late, clamped

    def limit(self, now_seconds: float) -> None:
        """Set the clock back if it is further ahead of ``now_seconds`` than events may be dated.

        It can be after a restart with a saved clock, and after the machine's clock was set back.
        """
        latest = now_seconds + self.max_future_seconds
        if self.newest_seconds > latest:
            self.newest_seconds = latest

    def advance(self, to_event_time_seconds: float) -> None:
        """Move the clock on without an event, so that an idle stream decays. Earlier times do nothing."""
        if not math.isnan(self.newest_seconds) and math.isfinite(to_event_time_seconds):
            self.newest_seconds = max(self.newest_seconds, to_event_time_seconds)

    def unit_exponent(self, event_time_seconds: float, unit_bits: int = UNIT_BITS) -> int:
        """Return the exponent at which an access of this time has ``2^unit_bits`` to twice as many units.

        Without decay it is 0.
        """
        if self.half_life_seconds is None:
            return 0
        return math.floor(event_time_seconds / self.half_life_seconds) - unit_bits

    def units(self, event_time_seconds: float, exponent: int, *, up: bool = False) -> int:
        """Return the weight of one access in units of ``2^exponent``, rounded to nearest or ``up``; 1 without decay."""
        if self.half_life_seconds is None:
            return 1
        power = event_time_seconds / self.half_life_seconds - exponent
        if up:
            return math.ceil(2.0**power) if power > -1000 else 1
        return round(2.0**power) if power > -2 else 0

    def unit_weight(self, exponent: int) -> float:
        """Return the present weight of one unit of ``2^exponent``, in present accesses; 0 if it has decayed away."""
        if self.half_life_seconds is None or math.isnan(self.newest_seconds):
            return 1.0
        power = exponent - self.newest_seconds / self.half_life_seconds
        # Positive where the clock was set back (``limit``), perhaps by years.
        return 2.0 ** min(power, 500.0) if power > -1000 else 0.0

    def log_weight(self, event_time_seconds: float) -> float:
        """Return the natural logarithm of the forward weight ``2^(t/H)``; 0 without decay."""
        return 0.0 if self.half_life_seconds is None else event_time_seconds / self.half_life_seconds * math.log(2.0)
