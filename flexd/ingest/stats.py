"""Statistics of the ingest thread: counts, rates, and how far event times are from the arrival of their messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from flexd.core import tap_counts
from flexd.stream.codecs import codec
from flexd.stream.types import REFUSAL_REASONS

MESSAGE_REASONS = tuple(sorted({*codec.REASONS, *tap_counts.REASONS, *REFUSAL_REASONS, "internal_error"}))
"""Reasons for which a whole message is not counted."""
ROW_REASONS = ("unknown_table", "negative_row", "row_out_of_range")
"""Reasons for which single accesses are not counted."""
SKEW_SECONDS = 10.0
RATE_SECONDS = 60.0
"""Ranks with a tap send one message each and then nothing until the daemon's next snapshot, half a minute later."""
_STEP_SECONDS = 1.0


@dataclass(frozen=True)
class IngestStats:
    """Counters since the process started, and gauges as of the last poll.

    Attributes:
        messages, accesses, bytes, batches: read; accesses are those counted.
        rejected_messages: by reason of ``MESSAGE_REASONS``.
        rejected_accesses: by reason of ``ROW_REASONS``.
        adjusted_accesses: counted by a special rule, by rule (``future_clamped``: at their arrival instead of their
            own time; ``late``: at their own time).
        messages_per_second, accesses_per_second: over the last minute.
        lag_messages: messages in the stream not read yet, as far as the source knows.
        read_share: share of the stream that is read; counters of messages and accesses are of what is read.
        messages_lost: messages known to have existed that the source could not deliver, by reason of ``LOSS_REASONS``.
        positions_lost: positions that the log no longer had, by reason of ``POSITION_REASONS``.
        newest_event_seconds: NaN before the first access.
        least_skew_seconds, most_skew_seconds: event time minus arrival of the messages of the last ten seconds; NaN
            without any.
        idle_seconds: how far profiles decay beyond the newest event because the stream is idle.
        snapshots, snapshot_failures, commit_failures, source_failures: numbers of events.
        snapshot_age_seconds: since the newest durable snapshot of this process, NaN before the first.
        snapshot_pause_seconds: how long ingest stopped to copy the state of the newest snapshot.
        dead_letters, dead_letter_failures: samples kept, and samples that could not be written.
        problem: current problem of the source or the snapshots, or None.
        not_ready: the current problems, each prefixed with ``stream`` or ``snapshots``.
        connected: the source has no problem.
        restore_problems: of the saved state at start.
        running: the thread is alive.
    """

    messages: int = 0
    accesses: int = 0
    bytes: int = 0
    batches: int = 0
    rejected_messages: Mapping[str, int] = field(default_factory=dict)
    rejected_accesses: Mapping[str, int] = field(default_factory=dict)
    adjusted_accesses: Mapping[str, int] = field(default_factory=dict)
    messages_per_second: float = 0.0
    accesses_per_second: float = 0.0
    lag_messages: int = 0
    read_share: float = 1.0
    messages_lost: Mapping[str, int] = field(default_factory=dict)
    positions_lost: Mapping[str, int] = field(default_factory=dict)
    newest_event_seconds: float = math.nan
    least_skew_seconds: float = math.nan
    most_skew_seconds: float = math.nan
    idle_seconds: float = 0.0
    snapshots: int = 0
    snapshot_failures: int = 0
    commit_failures: int = 0
    source_failures: int = 0
    snapshot_age_seconds: float = math.nan
    snapshot_pause_seconds: float = math.nan
    dead_letters: int = 0
    dead_letter_failures: int = 0
    problem: str | None = None
    not_ready: tuple[str, ...] = ()
    connected: bool = True
    restore_problems: tuple[str, ...] = ()
    running: bool = False


class EventTimeSkew:
    """Event time minus arrival of the accesses of the last whole window of ``SKEW_SECONDS``.

    Attributes:
        least_seconds, most_seconds: NaN if the window had no access.
    """

    def __init__(self) -> None:
        self.least_seconds = self.most_seconds = math.nan
        self._least, self._most = math.inf, -math.inf
        self._until = -math.inf

    def add(self, skew_seconds: float) -> None:
        """Add the accesses of one event time."""
        if skew_seconds < self._least:
            self._least = skew_seconds
        if skew_seconds > self._most:
            self._most = skew_seconds

    def update(self, now: float) -> None:
        """End the window if it is over; ``now`` is monotonic."""
        if now < self._until:
            return
        known = self._least <= self._most
        self.least_seconds, self.most_seconds = (self._least, self._most) if known else (math.nan, math.nan)
        self._least, self._most = math.inf, -math.inf
        self._until = now + SKEW_SECONDS


class RateMeter:
    """Measures rates over the last ``RATE_SECONDS`` from totals that the caller passes in, with monotonic times."""

    def __init__(self, now: float) -> None:
        self.messages_per_second = self.accesses_per_second = 0.0
        self._seen: deque[tuple[float, int, int]] = deque([(now, 0, 0)])

    def update(self, now: float, messages: int, accesses: int) -> None:
        """Update both rates if a second has passed."""
        if now - self._seen[-1][0] < _STEP_SECONDS:
            return
        self._seen.append((now, messages, accesses))
        while self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        since, messages_then, accesses_then = self._seen[0]
        self.messages_per_second = (messages - messages_then) / (now - since)
        self.accesses_per_second = (accesses - accesses_then) / (now - since)
