"""The follower's side: a ``Source`` around the real one that hands the counts on between two polls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from flexd.core.errors import ScaleOutError
from flexd.ingest import Ingestor
from flexd.ingest.message_counts import MessageCounts
from flexd.scaleout import count_delta as deltas
from flexd.scaleout.count_delta import Delta, Stretch
from flexd.scaleout.delta_sender import Courier
from flexd.scaleout.push_answer import Answer
from flexd.scaleout.unacknowledged import Chain
from flexd.sketch.sketch_set import SketchSet
from flexd.stream.types import Message, Positions, Source

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowerOptions:
    """Who the follower is and when it pushes.

    Attributes:
        name: unique in the job. session: new for every start.
        job, tables: must be the leader's (``tables`` is the digest of the key space).
        push_interval_seconds: between two deltas.
        max_unacknowledged_messages, max_unacknowledged_seconds: counted beside a delta that has no answer; beyond
            either nothing is read until the leader answers.
        settle_seconds: how long a rebalance or a stop waits for the leader.
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
    """Since the start.

    Attributes:
        accepted, repeated: deltas. restarts: times that counts were dropped and the source put back.
        dropped_messages: read again because of that.
        failures: attempts without an answer, by reason. bytes: sent.
        last_answer_seconds: since the newest answer; NaN before the first.
        partitions: read here. paused: nothing is read until the leader answers.
        problem: what is wrong with the way to the leader, or None.
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
    """What the ingest of a follower reads from. The rules are in ``flexd.scaleout.unacknowledged``.

    Its methods run in the ingest thread, between two polls, except ``stats`` and ``problem`` (any). ``position_of``,
    ``on_revoked`` and ``on_lost`` are the callbacks of a consumer-group source.

    Args:
        make_source: builds the real source, given this follower for its callbacks.
        grouped: the source calls them; else all its partitions are read here.
    """

    def __init__(
        self,
        options: FollowerOptions,
        make_source: Callable[[Follower], Source],
        courier: Courier,
        *,
        grouped: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._courier = courier
        self._clock = clock
        self._source = make_source(self)
        self._mine: frozenset[str] | None = frozenset() if grouped else None
        self._partitions: tuple[str, ...] = ()
        self._ingestor: Ingestor | None = None
        self._chain = Chain()
        self._leader: Answer | None = None
        self._committed: Mapping[str, int] = {}
        self._sequence = 0
        self._sent: Mapping[str, Stretch] = {}
        self._next_push = 0.0
        self._filling = 0
        """Messages read since the last cut."""
        self._sent_at = 0.0
        self._paused = False
        self._closed = False
        self._accepted = self._repeated = self._restarts = self._dropped = 0

    def attach(self, ingestor: Ingestor) -> None:
        """The ingest that reads from this and counts. Before its thread starts."""
        self._ingestor = ingestor

    @property
    def problem(self) -> str | None:
        courier = self._courier.problem
        return f"leader: {courier}" if courier is not None else self._source.problem

    @property
    def messages_lost(self) -> int:
        return self._source.messages_lost

    def stats(self) -> FollowerStats:
        """Any thread."""
        courier = self._courier
        answered = courier.answered_at
        return FollowerStats(
            self._accepted,
            self._repeated,
            self._restarts,
            self._dropped,
            dict(courier.failures),
            courier.bytes_sent,
            float("nan") if answered is None else time.monotonic() - answered,
            self._partitions,
            self._paused,
            courier.problem,
        )

    def poll(self, timeout_seconds: float) -> list[Message]:
        deadline = self._clock() + timeout_seconds
        self._advance()
        self._paused = self._must_wait()
        if self._paused:
            answer = self._courier.take(max(0.0, deadline - self._clock()))
            if answer is not None:
                self._settle(answer)
            return []
        messages = self._source.poll(max(0.0, deadline - self._clock()))
        self._filling += len(messages)
        return messages

    def restore(self, positions: Mapping[str, int]) -> None:
        """Nothing: positions are the leader's."""

    def positions(self) -> Positions:
        return self._source.positions()

    def lag(self) -> int:
        return self._source.lag()

    def commit(self, positions: Mapping[str, int]) -> str | None:
        """Nothing: the broker is told what the leader has made durable (``_settle``)."""
        return None

    def close(self) -> None:
        """Hands over what was counted, if the leader answers in time; else it is counted again by whoever comes."""
        if self._closed:
            return
        self._closed = True
        try:
            self._flush(leaving=True)
        except ScaleOutError as error:
            _log.warning("what was counted last is not handed over: %s", error)
        self._source.close()

    def position_of(self, partitions: Sequence[str]) -> dict[str, int]:
        """Where the leader stands. Raises ScaleOutError if it does not answer."""
        self._flush()
        leader = self._known()
        places = self._chain.assigned(partitions, leader.positions, self._source.positions())
        if self._mine is not None:
            self._mine |= set(partitions)
        return places

    def on_revoked(self, partitions: Sequence[str]) -> None:
        """Hands over what was counted of them, so that the next owner goes on there."""
        try:
            if self._chain.begun and not self._closed:
                self._flush()
        finally:
            if self._mine is not None:
                self._mine -= set(partitions)

    def on_lost(self, partitions: Sequence[str]) -> None:
        """Somebody else may read them already. What is counted here may still be offered: the leader takes one."""
        if self._mine is not None:
            self._mine -= set(partitions)

    def _advance(self) -> None:
        """Takes an answer, begins again if the chain is broken, sends what is due. Never waits."""
        answer = self._courier.take()
        if answer is not None:
            self._settle(answer)
        if self._chain.waiting:
            return
        if self._chain.broken:
            self._begin()
        if self._clock() >= self._next_push:
            self._send()
        if self._leader is not None and self._leader.durable != self._committed:
            # For the broker's displays. Not where an answer is taken: that may be in the middle of a rebalance.
            self._committed = self._leader.durable
            self._source.commit(self._committed)

    def _must_wait(self) -> bool:
        """Nothing may be read: the leader's positions are not known, or too much has no answer."""
        if not self._chain.begun or self._chain.broken:
            return True
        if not self._chain.waiting:
            return False
        options = self._options
        return (
            self._filling >= options.max_unacknowledged_messages
            or self._clock() - self._sent_at >= options.max_unacknowledged_seconds
        )

    def _send(self, *, leaving: bool = False) -> None:
        reached = self._source.positions()
        stretches = self._chain.filled(reached) if self._chain.begun else {}
        sketches, messages = None, MessageCounts()
        if stretches:
            sketches, messages = self._counters().drain(self._known().clock)
            self._filling = 0
        self._chain.send(stretches)
        self._sent, self._sent_at = stretches, self._clock()
        self._next_push = self._sent_at + self._options.push_interval_seconds
        self._sequence += 1
        self._partitions = tuple(sorted(reached if self._mine is None else self._mine))
        self._courier.send(
            partial(self._encoded, self._sequence, stretches, sketches, messages, self._source.lag(), leaving)
        )

    def _encoded(
        self,
        sequence: int,
        stretches: Mapping[str, Stretch],
        sketches: SketchSet | None,
        messages: MessageCounts,
        lag_messages: int,
        leaving: bool,
    ) -> bytes:
        meta, arrays = ({}, {}) if sketches is None else sketches.state()
        options = self._options
        return deltas.encode(
            Delta(
                options.name, options.session, sequence, options.job, options.tables, stretches, messages, lag_messages,
                self._partitions, leaving, meta, arrays,
            )
        )  # fmt: skip

    def _settle(self, answer: Answer) -> None:
        if answer.outcome == "refused":
            _log.warning("the leader refused the counts of %s: %s", ", ".join(self._sent)[:200], answer.message)
        elif self._sent:
            self._accepted += answer.outcome == "accepted"
            self._repeated += answer.outcome == "repeated"
        self._leader = answer
        self._chain.settle(answer.positions, self._source.positions(), self._mine)

    def _begin(self) -> None:
        """Drops what was counted and goes to the leader's positions."""
        leader = self._known()
        self._counters().drain(leader.clock)
        if self._chain.begun:
            _log.warning("begins again at the leader's positions; %d messages are dropped", self._filling)
            self._restarts += 1
            self._dropped += self._filling
        self._filling = 0
        self._source.restore(leader.positions)
        self._chain.begin(leader.positions)

    def _flush(self, *, leaving: bool = False) -> None:
        """Sends what is counted and waits for the answer. Raises ScaleOutError if none comes in time."""
        deadline = self._clock() + self._options.settle_seconds
        self._courier.hurry()
        for last in (False, True):
            if self._chain.waiting:
                answer = self._courier.take(max(0.0, deadline - self._clock()))
                if answer is None:
                    raise ScaleOutError(
                        self._courier.problem or "the leader does not answer", reason="unreachable",
                        remedy="it is tried again",
                    )  # fmt: skip
                self._settle(answer)
            if self._chain.broken or not self._chain.begun:
                self._begin()
            if not last:
                self._send(leaving=leaving)

    def _counters(self) -> Ingestor:
        if self._ingestor is None:
            raise ScaleOutError("no ingest is attached", reason="internal_error")
        return self._ingestor

    def _known(self) -> Answer:
        if self._leader is None:
            raise ScaleOutError("the leader has not answered yet", reason="unreachable", remedy="it is tried again")
        return self._leader
