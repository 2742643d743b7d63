"""Decodes stream messages and counts their accesses."""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable, Sequence

from flexd.core import tap_counts
from flexd.core.errors import CodecError
from flexd.core.fault_points import fault_point
from flexd.core.tap_counts import TapCounts
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.ingest.stats import ROW_REASONS, EventTimeSkew
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import AccessCounts
from flexd.stream.codecs import codec
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import AccessBatch, Message, RefusedMessages

_log = logging.getLogger(__name__)

_MAX_PARTITIONS = 65_536
Decode = Callable[[bytes | memoryview, int], Sequence[AccessBatch | TapCounts]]


def decode_message(payload: bytes | memoryview, max_message_bytes: int) -> Sequence[AccessBatch | TapCounts]:
    """Decode a message of accesses or the counts of a tap; its first bytes tell the kind.

    Counts of a tap have a size limit of their own (``tap_counts.MAX_PAYLOAD_BYTES``), because one message holds a whole
    interval of a rank.

    Raises:
        CodecError: ``reason`` is one of ``codec.REASONS`` or ``tap_counts.REASONS``.
    """
    if tap_counts.is_tap_counts(payload):
        return [tap_counts.decode(payload)]
    return codec.decode(payload, max_message_bytes)


class ArrivalClock:
    """The arrival of messages: the broker's time of append where there is one, else the daemon's time.

    A broker's time is used up to the daemon's own: what was appended was appended before now, so a broker that is ahead
    lets nobody date accesses further ahead. Within a partition it never goes back: after a change to a broker that is
    behind, accesses that are dated right are not taken for future ones.

    Belongs to the ingest thread.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._newest: dict[str, float] = {}

    def now(self) -> float:
        """Return the time, Unix seconds."""
        return self._clock()

    def arrival(self, message: Message) -> float:
        """Return when a message arrived, Unix seconds."""
        now = self.now()
        appended = message.appended_seconds
        if appended is None:
            return now
        newest = self._newest.get(message.partition)
        if newest is None or appended > newest:
            if newest is None and len(self._newest) >= _MAX_PARTITIONS:
                self._newest.clear()
            self._newest[message.partition] = newest = appended
        return min(now, newest)


class MessageCounter:
    """Counts messages into sketches. ``count`` belongs to one thread; the counts are exact between two messages.

    Attributes:
        messages, bytes: read, including the rejected ones.
        batches: of the accepted messages.
        accesses: of the accepted messages, by outcome.
        rejected: messages not counted, by reason.
        skew: of the event times against the arrivals.

    Args:
        dead_letters: None keeps none.
        max_message_bytes: larger messages are rejected undecoded.
        decode: message -> batches; raises CodecError.
        arrivals: tells when messages arrived.
        work: records the message that is being counted; the caller ends it after the last message of a poll.
    """

    def __init__(
        self,
        sketches: SketchSet,
        dead_letters: DeadLetterFile | None,
        max_message_bytes: int,
        decode: Decode,
        work: OffsetsInWork | None = None,
        arrivals: ArrivalClock | None = None,
    ) -> None:
        self._sketches = sketches
        self._dead_letters = dead_letters
        self._max_message_bytes = max_message_bytes
        self._decode = decode
        self._work = work or OffsetsInWork()
        self._arrivals = arrivals or ArrivalClock()
        self.skew = EventTimeSkew()
        self.messages = self.bytes = self.batches = 0
        self.accesses = AccessCounts()
        self.rejected: dict[str, int] = {}

    def count(self, message: Message | RefusedMessages) -> None:
        """Count one message. Never raises, because the source has already moved past it.

        A message that cannot be decoded is rejected as a whole. What was decoded can be counted (``AccessBatch`` and
        ``tap_counts.decode`` have checked it). If counting fails nevertheless, a part of the message may be in the
        counters: they are marked as damaged (``SketchSet.damage``), and the caller must not go on. The next start
        continues from the newest snapshot, which holds nothing of it.
        """
        try:
            self._count(message)
        except Exception as error:
            # The counts of messages by outcome are short of this one.
            _log.exception("ingest: message %s/%d", message.partition, message.offset)
            self._sketches.damage = error

    def _count(self, message: Message | RefusedMessages) -> None:
        if isinstance(message, RefusedMessages):
            self.messages += message.messages
            self._reject(message.reason, message.detail, message, message.messages)
            return
        if not self._work.begin(message.partition, message.offset, message.offset, counting=True):
            self.messages += 1
            self._reject("poison_offset", "the daemon ended twice while it counted this message", message)
            return
        self.messages += 1
        self.bytes += len(message.payload)
        try:
            batches = self._decode(message.payload, self._max_message_bytes)
        except CodecError as error:
            self._reject(error.reason, str(error), message)
            return
        except Exception as error:
            _log.exception("ingest: message %s/%d", message.partition, message.offset)
            self._reject("internal_error", repr(error), message)
            return
        arrival = self._arrivals.arrival(message)
        for batch in batches:
            self.skew.add(batch.event_time_seconds - arrival)
        sketches = self._sketches
        with sketches.lock:
            try:
                fault_point("thread.counting")
                counted = [_ingest(sketches, batch, arrival, message.partition) for batch in batches]
            except Exception as error:
                # Before the lock is released: nobody may save these counters.
                sketches.damage = error
                raise
        # Without a start value: a message with one batch, the usual one, needs no addition.
        accesses = functools.reduce(operator.add, counted)
        self.batches += len(batches)
        self.accesses += accesses
        if self._dead_letters is not None:
            for reason in ROW_REASONS:
                if rejected := getattr(accesses, reason):
                    self._dead_letters.record(reason, f"{rejected} accesses of the message", message)

    def _reject(self, reason: str, detail: str, message: Message | RefusedMessages, messages: int = 1) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + messages
        if self._dead_letters is not None:
            self._dead_letters.record(reason, detail, message)


def _ingest(sketches: SketchSet, batch: AccessBatch | TapCounts, arrival: float, partition: str) -> AccessCounts:
    rank, time = batch.source_rank, batch.event_time_seconds
    if isinstance(batch, TapCounts):
        counted = [sketches.ingest_counted(counts, rank, time, arrival) for counts in batch.tables]
        sketches.ingest_passes(batch, arrival)
        return sum(counted, AccessCounts())
    return sketches.ingest(
        batch.table, batch.rows, rank, time, batch.sequence_lengths, arrival, batch.step, batch.sample_ids,
        batch.user_ids, partition,
    )  # fmt: skip
