"""A source of generated accesses: Zipf with drift, paced, and reproducible from any position."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flexd.core.errors import StreamError
from flexd.stream.codec import encode_arrow
from flexd.stream.trace import ZipfSampler, scatter, scatter_multiplier
from flexd.stream.types import AccessBatch, Positions, Source, StreamMessage

if TYPE_CHECKING:
    from flexd.config.sections import SyntheticSourceConfig

PARTITION = "synthetic"
_MAX_POLL_MESSAGES = 256


class SyntheticSource(Source):
    """Message n is a pure function of n and the arguments, so a restored source repeats the stream exactly.

    Message n holds the accesses of one table (the tables take turns) in stream time n * m / rate, where m is
    ``accesses_per_message``. The row of popularity rank r is ``scatter(r - floor(drift * t))``: each second
    ``drift_rows_per_second`` new rows enter at the top and every row falls as many ranks. ``scatter`` is a bijection
    that spreads neighbouring ranks over the table.

    Messages come due at ``accesses_per_second`` as the clock runs; due messages that were not polled are the ``lag``.

    Args:
        tables: (name, rows) of each table.
        config: skew, rate and drift.
        clock: monotonic seconds.
        sleep: wait for a number of seconds.
    """

    def __init__(
        self,
        tables: Sequence[tuple[str, int]],
        config: SyntheticSourceConfig,
        *,
        accesses_per_message: int = 8192,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tables = list(tables)
        self._samplers = [ZipfSampler(rows, config.zipf_exponent) for _, rows in tables]
        self._multipliers = [scatter_multiplier(rows) for _, rows in tables]
        self._seconds_per_message = accesses_per_message / config.accesses_per_second
        self._drift = config.drift_rows_per_second
        self._accesses_per_message = accesses_per_message
        self._clock = clock
        self._sleep = sleep
        self._next = self._first = 0
        self._started_at = clock()
        self._closed = False

    def poll(self, timeout_seconds: float) -> list[StreamMessage]:
        if self._closed:
            raise StreamError("synthetic source: closed")
        due = self.lag()
        if due == 0:
            next_due = self._started_at + (self._next - self._first + 1) * self._seconds_per_message
            self._sleep(max(0.0, min(timeout_seconds, next_due - self._clock())))
            due = self.lag()
        count = min(due, _MAX_POLL_MESSAGES)
        numbers = range(self._next, self._next + count)
        self._next += count
        return [StreamMessage(PARTITION, number, encode_arrow([self.batch(number)])) for number in numbers]

    def restore(self, positions: Mapping[str, int]) -> None:
        self._next = self._first = positions.get(PARTITION, 0)
        self._started_at = self._clock()

    def positions(self) -> Positions:
        return {PARTITION: self._next}

    def lag(self) -> int:
        # A billionth of a message early, so that rounding never makes a sleep until the due time too short.
        due = int((self._clock() - self._started_at) / self._seconds_per_message + 1e-9)
        return max(0, due - (self._next - self._first))

    def close(self) -> None:
        self._closed = True

    def batch(self, number: int) -> AccessBatch:
        """Generate message ``number``."""
        which = number % len(self._tables)
        name, rows = self._tables[which]
        # A counter-based generator: each message is generated without those before it.
        random = np.random.Generator(np.random.Philox(key=0, counter=[0, number, which, 0]))
        seconds = number * self._seconds_per_message
        ranks = self._samplers[which].sample(self._accesses_per_message, random)
        ranks -= math.floor(self._drift * seconds)
        ids = scatter(ranks, rows, self._multipliers[which])
        narrow = ids.astype(np.int32) if rows <= 2**31 else ids
        return AccessBatch(name, narrow, 0, seconds)
