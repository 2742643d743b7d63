"""The leader's record of its followers and of the deltas that it refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flexd.ingest import Ingestor
from flexd.scaleout.count_delta import CountDelta
from flexd.scaleout.push_answer import PushAnswer

_log = logging.getLogger(__name__)

MAX_FOLLOWERS = 1024
FORGET_SECONDS = 3600.0
"""A follower that left, or was silent for so long, is no longer listed."""

REASONS = (
    "position", "other_job", "other_tables", "other_sketches", "malformed", "format", "too_large", "starting", "busy",
    "unsigned", "bad_signature", "stale", "replayed", "too_many_followers", "internal_error", "unknown_sender",
)  # fmt: skip
"""All labels of a refusal."""


@dataclass(frozen=True)
class FollowerReport:
    """One follower as seen by the leader.

    Attributes:
        name: name of the follower.
        session: identifier of its process.
        partitions: partitions that it reads.
        lag_messages: messages not read in them, as of its last push.
        last_push_seconds: time since its last valid push.
        silent: True if that is longer than ``follower_timeout_seconds`` and it did not announce that it leaves.
        accepted, repeated: deltas by outcome.
        refused: refused deltas by reason.
        bytes: bytes of all its deltas.
        accesses: accesses of the accepted deltas.
    """

    name: str
    session: str
    partitions: tuple[str, ...] = ()
    lag_messages: int = 0
    last_push_seconds: float = 0.0
    silent: bool = False
    accepted: int = 0
    repeated: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    accesses: int = 0


@dataclass
class _FollowerRecord:
    report: FollowerReport
    seen_at: float
    left: bool = False


class FollowerRegistry:
    """Record pushes and refusals; report followers, their lag and their fault. All methods are called from any thread.

    Args:
        follower_timeout_seconds: time without a push after which a follower is reported as silent.
        clock: monotonic seconds.
    """

    def __init__(self, follower_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._follower_timeout_seconds = follower_timeout_seconds
        self._clock = clock
        self._started_at = clock()
        self._lock = threading.Lock()
        self._followers: dict[str, _FollowerRecord] = {}
        self._refused: dict[str, int] = {}
        self._local_reader: Ingestor | None = None

    def set_local_reader(self, reader: Ingestor) -> None:
        """Set the ingest of the group member inside the leader: its problem is reported before one of the others."""
        self._local_reader = reader

    def count_refusal(self, reason: str) -> None:
        """Count a request that was refused without an answer."""
        known = reason if reason in REASONS else "internal_error"
        with self._lock:
            self._refused[known] = self._refused.get(known, 0) + 1

    def refused(self) -> dict[str, int]:
        """Return requests and deltas refused since the start, by reason."""
        with self._lock:
            return dict(self._refused)

    def reports(self) -> tuple[FollowerReport, ...]:
        """Return the followers by name; those that left or were silent for an hour are not listed."""
        now = self._clock()
        with self._lock:
            for name in [name for name, known in self._followers.items() if now - known.seen_at > FORGET_SECONDS]:
                del self._followers[name]
            return tuple(
                replace(
                    known.report,
                    last_push_seconds=now - known.seen_at,
                    silent=now - known.seen_at > self._follower_timeout_seconds,
                )
                for _, known in sorted(self._followers.items())
                if not known.left
            )

    def lag_messages(self) -> int:
        """Return the messages not read yet by the followers that push."""
        return sum(report.lag_messages for report in self.reports() if not report.silent)

    def problem(self) -> str | None:
        """Return why the stream is not counted, or None. One silent follower is no problem: the group assigns its
        partitions to the others."""
        local = None if self._local_reader is None else self._local_reader.stats().problem
        if local is not None:
            return local
        reports = self.reports()
        if (
            any(not report.silent for report in reports)
            or self._clock() - self._started_at < self._follower_timeout_seconds
        ):
            return None
        if reports:
            return f"no follower has pushed for {min(report.last_push_seconds for report in reports):.0f} s"
        return "no follower has connected"

    def record(self, delta: CountDelta, size: int, answer: PushAnswer) -> None:
        """Record a delta of ``size`` encoded bytes and the answer to it."""
        now = self._clock()
        counted = answer.outcome == "accepted" and bool(delta.ranges)
        with self._lock:
            known = self._followers.get(delta.follower)
            if known is None:
                if len(self._followers) >= MAX_FOLLOWERS:
                    # Its counts stay counted; it is only not listed.
                    _log.warning("follower %s is not listed: %d are already", delta.follower, MAX_FOLLOWERS)
                    return
                known = self._followers[delta.follower] = _FollowerRecord(
                    FollowerReport(delta.follower, delta.session), now
                )
                _log.info("follower %s connected", delta.follower)
            before, refused = known.report, dict(known.report.refused)
            if answer.outcome == "refused":
                refused[answer.reason] = refused.get(answer.reason, 0) + 1
                self._refused[answer.reason] = self._refused.get(answer.reason, 0) + 1
            known.seen_at, known.left = now, delta.leaving
            known.report = replace(
                before,
                session=delta.session,
                partitions=delta.partitions,
                lag_messages=delta.lag_messages,
                accepted=before.accepted + counted,
                repeated=before.repeated + (answer.outcome == "repeated"),
                refused=refused,
                bytes=before.bytes + size,
                accesses=before.accesses + (delta.messages.accesses.accepted if counted else 0),
            )
