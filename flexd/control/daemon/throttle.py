"""How much of a migration may be on its way to the ranks: which rows of the next chunk are released now.

The ranks apply every chunk that all of them hold at their next step boundary, so the daemon paces by what it releases.
Chunks that are released and not yet applied by all ranks are *outstanding*; any of them, and nothing else, can be
applied at the next step. So

- ``bytes_per_step``: outstanding chunks together copy no more than that. Whatever a step applies on any rank is a
  part of them: the cap holds on every rank at every step, and nothing new has to be agreed on;
- ``bytes_per_second``: a token bucket of ``BURST_SECONDS``, paid when a chunk is released.

A single row is always allowed to go by itself, however large.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ControlError

BURST_SECONDS = 1.0
"""What the bucket of ``bytes_per_second`` holds at most, in seconds of the rate."""
_LONGEST_WAIT_COUNTED = 1.0
"""Seconds between two looks: a longer silence (no epoch) is nothing that the throttle held up."""


class ThrottleReason(Enum):
    """What a chunk waits for."""

    STEP = "bytes_per_step"
    SECOND = "bytes_per_second"
    PAUSE = "adaptive_pause"


@dataclass(frozen=True)
class ThrottleLimits:
    """Of row values and optimizer state copied; None is no limit.

    Attributes:
        bytes_per_step: by one rank at one step boundary.
        bytes_per_second: in the long run.

    Raises:
        ControlError: a limit below 1.
    """

    bytes_per_step: int | None = None
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_step", "bytes_per_second"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ControlError(f"{name} of {limit}", remedy="at least 1, or none; flexd pause stops a migration")


@dataclass(frozen=True)
class PaceLimit:
    """What the adaptive controller allows; it can only lower what the limits allow.

    Attributes:
        bytes_per_step: None leaves it to the limits.
        paused: nothing is released.
    """

    bytes_per_step: int | None = None
    paused: bool = False


@dataclass(frozen=True)
class ThrottleSnapshot:
    """Since the start.

    Attributes:
        released_bytes, released_chunks: let go.
        waiting_seconds: in which a chunk was ready and held, by what it waited for.
        waits_for: what the next chunk waits for at this moment, None if for nothing.
    """

    released_bytes: int
    released_chunks: int
    waiting_seconds: dict[ThrottleReason, float]
    waits_for: ThrottleReason | None


class Throttle:
    """Thread-safe. The pusher asks ``release`` for every chunk; limits and pace may change at any time.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, limits: ThrottleLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._limits = limits or ThrottleLimits()
        self._pace = PaceLimit()
        self._filled_at = clock()
        self._tokens = self._burst
        self._released_bytes = 0
        self._released_chunks = 0
        self._seconds: dict[ThrottleReason, float] = dict.fromkeys(ThrottleReason, 0.0)
        self._waits_for: ThrottleReason | None = None
        self._looked_at = self._filled_at

    @property
    def limits(self) -> ThrottleLimits:
        return self._limits

    @property
    def pace(self) -> PaceLimit:
        return self._pace

    @property
    def bytes_per_step(self) -> int | None:
        """In effect now: the lower of limit and pace."""
        known = [limit for limit in (self._limits.bytes_per_step, self._pace.bytes_per_step) if limit is not None]
        return min(known, default=None)

    def set_limits(self, limits: ThrottleLimits) -> None:
        """Holds from the next chunk on. Tokens are kept, up to what the new bucket holds."""
        with self._lock:
            self._refill()
            before = self._limits.bytes_per_second
            self._limits = limits
            self._tokens = self._burst if before is None else min(self._tokens, self._burst)

    def set_pace(self, pace: PaceLimit) -> None:
        """Holds from the next chunk on."""
        self._pace = pace

    def release(self, row_bytes: npt.NDArray[np.int64], outstanding_bytes: int, *, settled: bool = True) -> int:
        """How many of the first rows of a chunk go out now; 0: none, ask again later.

        Args:
            row_bytes: int64 [n], n >= 1, what each row copies (0: it only drops copies).
            outstanding_bytes: of the chunks released and not yet applied by all ranks.
            settled: False while ranks may hold chunks that are not counted there (an earlier daemon's).
        """
        with self._lock:
            self._refill()
            rows, copied, wait = self._fitting(row_bytes, outstanding_bytes, settled)
            self._account(wait)
            if wait is not None:
                return 0
            self._tokens -= copied
            self._released_bytes += copied
            self._released_chunks += 1
            return rows

    def idle(self) -> None:
        """Nothing is there to release."""
        with self._lock:
            self._account(None)

    def snapshot(self) -> ThrottleSnapshot:
        with self._lock:
            return ThrottleSnapshot(self._released_bytes, self._released_chunks, dict(self._seconds), self._waits_for)

    def _fitting(
        self, row_bytes: npt.NDArray[np.int64], outstanding_bytes: int, settled: bool
    ) -> tuple[int, int, ThrottleReason | None]:
        """(rows, their bytes, what they wait for)."""
        if self._pace.paused:
            return 0, 0, ThrottleReason.PAUSE
        step, second = self.bytes_per_step, self._limits.bytes_per_second
        ends = np.cumsum(row_bytes)
        rows = len(row_bytes)
        caps = [cap for cap in (step, None if second is None else int(self._burst)) if cap is not None]
        if caps:
            rows = max(1, int(np.searchsorted(ends, min(caps), side="right")))
        copied = int(ends[rows - 1])
        if copied == 0:
            return rows, 0, None
        if step is not None and (not settled or (outstanding_bytes > 0 and outstanding_bytes + copied > step)):
            return 0, 0, ThrottleReason.STEP
        if second is not None and self._tokens < min(copied, self._burst):
            return 0, 0, ThrottleReason.SECOND
        return rows, copied, None

    @property
    def _burst(self) -> float:
        rate = self._limits.bytes_per_second
        return 0.0 if rate is None else max(1.0, rate * BURST_SECONDS)

    def _refill(self) -> None:
        now = self._clock()
        rate = self._limits.bytes_per_second
        if rate is None:
            self._tokens = 0.0
        else:
            self._tokens = min(self._burst, self._tokens + rate * max(0.0, now - self._filled_at))
        self._filled_at = now

    def _account(self, wait: ThrottleReason | None) -> None:
        now = self._clock()
        if self._waits_for is not None:
            self._seconds[self._waits_for] += min(max(0.0, now - self._looked_at), _LONGEST_WAIT_COUNTED)
        self._waits_for, self._looked_at = wait, now
