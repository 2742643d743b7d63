"""Limits of the bytes that migrations copy: decides how many rows of the next chunk are released now.

The ranks apply every chunk that all of them hold at their next step boundary, so releasing chunks sets the pace.
Chunks that are released and not yet applied by all ranks are *outstanding*; any of them, and nothing else, can be
applied at the next step. So

- ``bytes_per_step``: outstanding chunks together copy no more than that. Any step of any rank applies a part of them,
  so the cap holds on every rank at every step without further agreement;
- ``bytes_per_second``: a token bucket of ``BURST_SECONDS``, charged when a chunk is released.

A single row may always be released by itself, however large.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

BURST_SECONDS = 1.0
"""Capacity of the bucket of ``bytes_per_second``, in seconds of the rate."""
_LONGEST_WAIT_COUNTED = 1.0
"""Largest time between two calls that counts as waiting: without an epoch there are no calls, and nothing is held."""


class ThrottleReason(StrEnum):
    """The limit that a chunk waits for."""

    STEP = "bytes_per_step"
    SECOND = "bytes_per_second"


@dataclass(frozen=True)
class ThrottleLimits:
    """Limits of the row values and optimizer state copied; None is no limit.

    Attributes:
        bytes_per_step: by one rank at one step boundary.
        bytes_per_second: in the long run.
    """

    bytes_per_step: int | None = None
    bytes_per_second: int | None = None


class Throttle:
    """Thread-safe. The pusher calls ``release`` for every chunk; limits may change at any time.

    Args:
        clock: monotonic seconds.

    Attributes:
        limits: change them by ``set_limits``.
        released_bytes, released_chunks: bytes and chunks released since the start.
        waiting_seconds: time in which a ready chunk was held, by the limit.
        waits_for: the limit that the next chunk waits for now; None if it waits for none.
    """

    def __init__(self, limits: ThrottleLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.limits = limits or ThrottleLimits()
        self._filled_at = clock()
        self._tokens = self._burst
        self.released_bytes = 0
        self.released_chunks = 0
        self.waiting_seconds: dict[ThrottleReason, float] = dict.fromkeys(ThrottleReason, 0.0)
        self.waits_for: ThrottleReason | None = None
        self._looked_at = self._filled_at

    def set_limits(self, limits: ThrottleLimits) -> None:
        """Apply from the next chunk on. Tokens are kept, up to the capacity of the new bucket."""
        with self._lock:
            self._refill()
            before = self.limits.bytes_per_second
            self.limits = limits
            self._tokens = self._burst if before is None else min(self._tokens, self._burst)

    def release(self, row_bytes: npt.NDArray[np.int64], outstanding_bytes: int, *, settled: bool = True) -> int:
        """Return how many of a chunk's first rows are released now; 0: none yet.

        Args:
            row_bytes: int64 [n], n >= 1, bytes that each row copies (0: it only drops copies).
            outstanding_bytes: bytes of the chunks released and not yet applied by all ranks.
            settled: False while ranks may hold chunks that are not counted there (an earlier daemon's).
        """
        with self._lock:
            self._refill()
            rows, copied, wait = self._fitting(row_bytes, outstanding_bytes, settled)
            self._account(wait)
            if wait is not None:
                return 0
            self._tokens -= copied
            self.released_bytes += copied
            self.released_chunks += 1
            return rows

    def idle(self) -> None:
        """Record that there is no chunk to release."""
        with self._lock:
            self._account(None)

    def _fitting(
        self, row_bytes: npt.NDArray[np.int64], outstanding_bytes: int, settled: bool
    ) -> tuple[int, int, ThrottleReason | None]:
        """Return (rows to release, their bytes, the limit that they wait for)."""
        step, second = self.limits.bytes_per_step, self.limits.bytes_per_second
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
        rate = self.limits.bytes_per_second
        return 0.0 if rate is None else max(1.0, rate * BURST_SECONDS)

    def _refill(self) -> None:
        now = self._clock()
        rate = self.limits.bytes_per_second
        if rate is None:
            self._tokens = 0.0
        else:
            self._tokens = min(self._burst, self._tokens + rate * max(0.0, now - self._filled_at))
        self._filled_at = now

    def _account(self, wait: ThrottleReason | None) -> None:
        now = self._clock()
        if self.waits_for is not None:
            self.waiting_seconds[self.waits_for] += min(max(0.0, now - self._looked_at), _LONGEST_WAIT_COUNTED)
        self.waits_for, self._looked_at = wait, now
