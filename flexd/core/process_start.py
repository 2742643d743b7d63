"""Start time of this process: wall clock for people, monotonic clock for durations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessStart:
    """Start time; construct it when the process starts."""

    unix_seconds: float = field(default_factory=time.time)
    monotonic_seconds: float = field(default_factory=time.monotonic)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self.monotonic_seconds
