"""When this process began: for people by the calendar, for durations by a clock that nobody sets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessStart:
    """Made at the start."""

    unix_seconds: float = field(default_factory=time.time)
    monotonic_seconds: float = field(default_factory=time.monotonic)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self.monotonic_seconds

    @property
    def unix_seconds_since(self) -> float:
        """The present time by the calendar as it was at the start: setting the calendar does not move it."""
        return self.unix_seconds + self.uptime_seconds
