"""The follower: a ``Source`` around the real one that sends counts to the leader between two polls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from flexd.core.errors import ScaleOutError
from flexd.ingest import Ingestor
from flexd.ingest.message_counts import MessageCounts
from flexd.scaleout import count_delta
from flexd.scaleout.count_delta import CountDelta, OffsetRange
from flexd.scaleout.delta_sender import DeltaSender
from flexd.scaleout.push_answer import PushAnswer
from flexd.scaleout.unacknowledged import UnacknowledgedDeltas
from flexd.sketch.sketch_set import SketchSet
from flexd.stream.losses import Losses
from flexd.stream.types import Message, Positions, RefusedMessages, Source

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowerOptions:
    """Identity of a follower and limits of its pushes.

    Attributes:
        name: name of the follower, unique in the job.
        session: identifier of its process.
        job: name of the job; must equal the leader's.
        tables: digest of the key space; must equal the leader's.
        push_interval_seconds: time between two deltas.
        max_unacknowledged_messages: messages counted beside a delta in flight; beyond it nothing is read until the
            leader answers.
        max_unacknowledged_seconds: age of a delta in flight beyond which nothing is read.
        settle_seconds: deadline of a rebalance or a stop for the leader's answer.
    """

    name: str
    session: str
    job: str
    tables: str
    push_interval_seconds: float = 2.0
    max_unacknowledged_messages: int = 1_000_000
    max_unacknowledged_seconds: float = 60.0
    settle_seconds: float = 5.0


@dataclass(frozen=True)
class FollowerStats:
    """Counters since the start, and the present state.

    Attributes:
        accepted, repeated: deltas by outcome.
        restarts: times that counts were dropped and the source returned to the leader's positions.
        dropped_messages: messages read again because of restarts.
        failures: attempts without an answer, by reason.
        bytes: bytes sent.
        last_answer_seconds: time since the newest answer; NaN before the first.
        partitions: partitions read here.
        paused: True while nothing is read until the leader answers.
        problem: fault of the connection to the leader, or None.
    """

    accepted: int = 0
    repeated: int = 0
    restarts: int = 0
    dropped_messages: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    last_answer_seconds: float = float("nan")
    partitions: tuple[str, ...] = ()
    paused: bool = False
    problem: str | None = None


class Follower:
    """Source of a follower's ingest. The rules are in ``flexd.scaleout.unacknowledged``.

    All methods run in the ingest thread, between two polls, except ``stats`` and ``problem`` (any thread).
    ``position_of``, ``on_revoked`` and ``on_lost`` are the callbacks of a consumer-group source.

    Args:
        make_source: builds the real source; receives this follower for its callbacks.
        grouped: the source calls them; otherwise all its partitions are read here.
    """

    def __init__(
        self,
        options: FollowerOptions,
        make_source: Callable[[Follower], Source],
        sender: DeltaSender,
        *,
        grouped: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._sender = sender
        self._clock = clock
        self._source = make_source(self)
        self._owned: frozenset[str] | None = frozenset() if grouped else None
        self._partitions: tuple[str, ...] = ()
        self._ingestor: Ingestor | None = None
        self._unacknowledged = UnacknowledgedDeltas()
        self._leader: PushAnswer | None = None
        self._committed: Mapping[str, int] = {}
        self._sequence = 0
        self._sent: Mapping[str, OffsetRange] = {}
        self._next_push = 0.0
        self._filling = 0
        """Messages in the delta being filled."""
        self._sent_at = 0.0
        self._paused = False
        self._closed = False
        self._accepted = self._repeated = self._restarts = self._dropped = 0

    def attach(self, ingestor: Ingestor) -> None:
        """Set the ingest that reads from this source, before its thread starts."""
        self._ingestor = ingestor

    @property
    def problem(self) -> str | None:
        sender = self._sender.problem
        return f"leader: {sender}" if sender is not None else self._source.problem

    def losses(self) -> Losses:
        return self._source.losses()

    def stats(self) -> FollowerStats:
        """Return the counters. Callable from any thread."""
        sender = self._sender
        answered = sender.answered_at
        return FollowerStats(
            self._accepted,
            self._repeated,
            self._restarts,
            self._dropped,
            dict(sender.failures),
            sender.bytes_sent,
            float("nan") if answered is None else time.monotonic() - answered,
            self._partitions,
            self._paused,
            sender.problem,
        )

    def poll(self, timeout_seconds: float) -> Sequence[Message | RefusedMessages]:
        deadline = self._clock() + timeout_seconds
        self._advance()
        self._paused = self._must_wait()
        if self._paused:
            answer = self._sender.poll_answer(max(0.0, deadline - self._clock()))
            if answer is not None:
                self._settle(answer)
            return []
        messages = self._source.poll(max(0.0, deadline - self._clock()))
        self._filling += len(messages)
        return messages

    def restore(self, positions: Mapping[str, int]) -> None:
        """Do nothing: the leader keeps the positions."""

    def positions(self) -> Positions:
        return self._source.positions()

    def lag(self) -> int:
        return self._source.lag()

    def commit(self, positions: Mapping[str, int]) -> str | None:
        """Do nothing: the leader's durable positions are committed to the broker (``_advance``)."""
        return None

    def close(self) -> None:
        """Send what was counted. If the leader does not answer in time, the next owner counts it again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._flush(leaving=True)
        except ScaleOutError as error:
            _log.warning("the last counts are not sent: %s", error)
        self._source.close()

    def position_of(self, partitions: Sequence[str]) -> dict[str, int]:
        """Return the leader's positions. Raises ScaleOutError if it does not answer."""
        self._flush()
        leader = self._leader_answer()
        places = self._unacknowledged.assigned(partitions, leader.positions, self._source.positions())
        if self._owned is not None:
            self._owned |= set(partitions)
        return places

    def on_revoked(self, partitions: Sequence[str]) -> None:
        """Send the counts of these partitions, so that the next owner continues there."""
        try:
            if self._unacknowledged.begun and not self._closed:
                self._flush()
        finally:
            if self._owned is not None:
                self._owned -= set(partitions)

    def on_lost(self, partitions: Sequence[str]) -> None:
        """Release partitions that another member may read already. The leader accepts only one of two counts."""
        if self._owned is not None:
            self._owned -= set(partitions)

    def _advance(self) -> None:
        """Process an answer, restart if the positions diverged, and send what is due. Never waits."""
        answer = self._sender.poll_answer()
        if answer is not None:
            self._settle(answer)
        if self._unacknowledged.waiting:
            return
        if self._unacknowledged.broken:
            self._begin()
        if self._clock() >= self._next_push:
            self._send()
        if self._leader is not None and self._leader.durable != self._committed:
            # For the broker's lag displays. Not in _settle, which may run in the middle of a rebalance.
            self._committed = self._leader.durable
            self._source.commit(self._committed)

    def _must_wait(self) -> bool:
        """Return True while nothing may be read: the leader's positions are unknown, or too much is unacknowledged."""
        if not self._unacknowledged.begun or self._unacknowledged.broken:
            return True
        if not self._unacknowledged.waiting:
            return False
        options = self._options
        return (
            self._filling >= options.max_unacknowledged_messages
            or self._clock() - self._sent_at >= options.max_unacknowledged_seconds
        )

    def _send(self, *, leaving: bool = False) -> None:
        reached = self._source.positions()
        ranges = self._unacknowledged.filled(reached) if self._unacknowledged.begun else {}
        sketches, messages = None, MessageCounts()
        if ranges:
            sketches, messages = self._counters().drain(self._leader_answer().clock)
            self._filling = 0
        self._unacknowledged.send(ranges)
        self._sent, self._sent_at = ranges, self._clock()
        self._next_push = self._sent_at + self._options.push_interval_seconds
        self._sequence += 1
        self._partitions = tuple(sorted(reached if self._owned is None else self._owned))
        self._sender.send(
            partial(self._encoded, self._sequence, ranges, sketches, messages, self._source.lag(), leaving)
        )

    def _encoded(
        self,
        sequence: int,
        ranges: Mapping[str, OffsetRange],
        sketches: SketchSet | None,
        messages: MessageCounts,
        lag_messages: int,
        leaving: bool,
    ) -> bytes:
        meta, arrays = ({}, {}) if sketches is None else sketches.state()
        options = self._options
        return count_delta.encode(
            CountDelta(
                options.name, options.session, sequence, options.job, options.tables, ranges, messages, lag_messages,
                self._partitions, leaving, meta, arrays,
            )
        )  # fmt: skip

    def _settle(self, answer: PushAnswer) -> None:
        if answer.outcome == "refused":
            _log.warning("the leader refused the counts of %s: %s", ", ".join(self._sent)[:200], answer.message)
        elif self._sent:
            self._accepted += answer.outcome == "accepted"
            self._repeated += answer.outcome == "repeated"
        self._leader = answer
        self._counters().follow_clock(answer.clock)
        self._unacknowledged.settle(answer.positions, self._source.positions(), self._owned)

    def _begin(self) -> None:
        """Drop the delta being filled and return to the leader's positions."""
        leader = self._leader_answer()
        self._counters().drain(leader.clock)
        if self._unacknowledged.begun:
            _log.warning("restart at the leader's positions; %d messages are counted again", self._filling)
            self._restarts += 1
            self._dropped += self._filling
        self._filling = 0
        self._source.restore(leader.positions)
        self._unacknowledged.begin(leader.positions)

    def _flush(self, *, leaving: bool = False) -> None:
        """Send what is counted and wait for the answer. Raises ScaleOutError if none arrives in time."""
        deadline = self._clock() + self._options.settle_seconds
        self._sender.retry_now()
        for last in (False, True):
            if self._unacknowledged.waiting:
                answer = self._sender.poll_answer(max(0.0, deadline - self._clock()))
                if answer is None:
                    raise ScaleOutError(
                        self._sender.problem or "the leader does not answer", reason="unreachable",
                        remedy="it is retried",
                    )  # fmt: skip
                self._settle(answer)
            if self._unacknowledged.broken or not self._unacknowledged.begun:
                self._begin()
            if not last:
                self._send(leaving=leaving)

    def _counters(self) -> Ingestor:
        if self._ingestor is None:
            raise ScaleOutError("no ingest is attached", reason="internal_error")
        return self._ingestor

    def _leader_answer(self) -> PushAnswer:
        if self._leader is None:
            raise ScaleOutError("the leader has not answered yet", reason="unreachable", remedy="it is retried")
        return self._leader
