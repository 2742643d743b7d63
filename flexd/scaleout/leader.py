"""The leader: checks count deltas, adds them to its counters, and tracks its followers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flexd.core.errors import ScaleOutError, SketchError
from flexd.core.keyspace import KeySpace
from flexd.ingest import Ingestor
from flexd.scaleout import count_delta
from flexd.scaleout.count_delta import CountDelta
from flexd.scaleout.ledger import Ledger
from flexd.scaleout.push_answer import PushAnswer
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

_log = logging.getLogger(__name__)

MAX_FOLLOWERS = 1024
FORGET_SECONDS = 3600.0
"""A follower that left, or was silent for so long, is no longer listed."""
_UNPACKED_SLACK_BYTES = 64 * 2**20

REASONS = (
    "position", "other_job", "other_tables", "other_sketches", "malformed", "too_large", "starting", "busy", "unsigned",
    "bad_signature", "stale", "replayed", "too_many_followers", "internal_error",
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


class Leader:
    """Accept deltas from any thread; merge one at a time.

    Args:
        ledger: positions of the counted messages.
        settings: settings of the sketches; followers must have equal ones.
        follower_timeout_seconds: time without a push after which a follower is reported as silent.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        job: str,
        keyspace: KeySpace,
        settings: SketchSettings,
        ledger: Ledger,
        follower_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._keyspace = keyspace
        self._settings = settings
        self._ledger = ledger
        self._follower_timeout_seconds = follower_timeout_seconds
        self._clock = clock
        self._started_at = clock()
        self._merging = threading.Lock()
        self._lock = threading.Lock()
        self._followers: dict[str, _FollowerRecord] = {}
        self._refused: dict[str, int] = {}
        self._ingestor: Ingestor | None = None
        self.max_unpacked_bytes = 2 * settings.memory_bytes + _UNPACKED_SLACK_BYTES

    def serve(self, ingestor: Ingestor) -> None:
        """Accept deltas from now on, into the counters of this ingest."""
        self._ingestor = ingestor

    def offer(self, data: bytes) -> PushAnswer:
        """Check and merge one encoded delta; see ``PushAnswer``.

        Raises:
            ScaleOutError: ``malformed``, ``too_large``, ``starting``, ``too_many_followers``: nothing was counted and
                the answer has no positions.
        """
        try:
            delta = count_delta.decode(data, self.max_unpacked_bytes)
            answer = self._judge(delta)
            self._record(delta, len(data), answer)
        except ScaleOutError as error:
            self.count_refusal(error.reason)
            raise
        return answer

    def count_refusal(self, reason: str) -> None:
        """Count a request that was refused without an answer."""
        known = reason if reason in REASONS else "internal_error"
        with self._lock:
            self._refused[known] = self._refused.get(known, 0) + 1

    def refused(self) -> dict[str, int]:
        """Return requests and deltas refused since the start, by reason."""
        with self._lock:
            return dict(self._refused)

    def followers(self) -> tuple[FollowerReport, ...]:
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
        return sum(report.lag_messages for report in self.followers() if not report.silent)

    def problem(self) -> str | None:
        """Return why the stream is not counted, or None. One silent follower is no problem: the group assigns its
        partitions to the others."""
        reports = self.followers()
        if (
            any(not report.silent for report in reports)
            or self._clock() - self._started_at < self._follower_timeout_seconds
        ):
            return None
        if reports:
            return f"no follower has pushed for {min(report.last_push_seconds for report in reports):.0f} s"
        return "no follower has connected"

    def _judge(self, delta: CountDelta) -> PushAnswer:
        ingestor = self._ingestor
        if ingestor is None or not self._ledger.open:
            raise ScaleOutError("the leader is starting or stopping", reason="starting", remedy="it is retried")
        if delta.job != self._job:
            return self._refusal(ingestor, "other_job", f"job {delta.job!r}, the leader's is {self._job!r}")
        if delta.tables != self._keyspace.digest:
            return self._refusal(
                ingestor,
                "other_tables",
                "the tables are not the leader's: give both the same `tables` in the same order",
            )
        if not delta.ranges:
            return self._answer(ingestor, "accepted")
        with self._merging:
            fit = self._ledger.judge(delta.ranges)
            if fit == "repeated":
                return self._answer(ingestor, "repeated")
            if fit == "elsewhere":
                return self._refusal(ingestor, "position", "it does not begin at the leader's positions")
            try:
                sketches = SketchSet.from_state(self._keyspace.tables, self._settings, delta.sketch_meta, delta.arrays)
                ingestor.merge(sketches, delta.messages, lambda: self._ledger.advance(delta.ranges))
            except SketchError as error:
                text = f"{error.message}: give both daemons the same `sketch` section"
                return self._refusal(ingestor, "other_sketches", text)
        return self._answer(ingestor, "accepted")

    def _answer(self, ingestor: Ingestor, outcome: str) -> PushAnswer:
        return PushAnswer(
            "repeated" if outcome == "repeated" else "accepted",
            self._ledger.positions(), self._ledger.durable(), ingestor.clock(),
        )  # fmt: skip

    def _refusal(self, ingestor: Ingestor, reason: str, message: str) -> PushAnswer:
        return PushAnswer(
            "refused", self._ledger.positions(), self._ledger.durable(), ingestor.clock(), reason, message
        )

    def _record(self, delta: CountDelta, size: int, answer: PushAnswer) -> None:
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
