"""Decodes and counts the messages of some partitions; one thread writes to it, any may read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from flexd.core.errors import CodecError
from flexd.core.tap_counts import TapCounts
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.ingest.message_counts import MAX_REASONS, Tally
from flexd.ingest.stats import ROW_REASONS
from flexd.sketch.counters.weighted import ingest_counts
from flexd.sketch.set_types import IngestCounts
from flexd.sketch.table_set import SketchSet
from flexd.stream.types import AccessBatch, Message

_log = logging.getLogger(__name__)

Decode = Callable[[bytes | memoryview, int], Sequence[AccessBatch | TapCounts]]


class Shard:
    """Counters of the partitions dealt to one thread.

    Args:
        sketches: its own.
        dead_letters: shared by all shards; None keeps none.
        max_message_bytes: larger messages are rejected undecoded.
        decode: message -> batches; raises CodecError.
    """

    def __init__(
        self, sketches: SketchSet, dead_letters: DeadLetterFile | None, max_message_bytes: int, decode: Decode
    ) -> None:
        self.sketches = sketches
        self.guard = threading.Lock()
        """Held while ``sketches`` change, one message at a time, and by readers."""
        self._dead_letters = dead_letters
        self._max_message_bytes = max_message_bytes
        self._decode = decode
        self._messages = self._bytes = self._batches = 0
        self._counts = IngestCounts()
        self._rejected: dict[str, int] = {}

    def take(self, message: Message) -> None:
        """Counts one message. Never raises: the source has moved past it."""
        self._messages += 1
        self._bytes += len(message.payload)
        try:
            batches = self._decode(message.payload, self._max_message_bytes)
            with self.guard:
                counts = sum((self._count(batch) for batch in batches), IngestCounts())
        except CodecError as error:
            self._reject(error.reason, str(error), message)
            return
        except Exception as error:
            _log.exception("ingest: message %s/%d", message.partition, message.offset)
            self._reject("internal_error", repr(error), message)
            return
        self._batches += len(batches)
        self._counts += counts
        if self._dead_letters is not None:
            for reason in ROW_REASONS:
                if rejected := getattr(counts, reason):
                    self._dead_letters.record(reason, f"{rejected} accesses of the message", message)

    def tally(self) -> Tally:
        """What became of the messages so far (any thread; exact between two messages)."""
        return Tally(self._messages, self._bytes, self._batches, self._counts, dict(self._rejected))

    def _count(self, batch: AccessBatch | TapCounts) -> IngestCounts:
        if isinstance(batch, TapCounts):
            return ingest_counts(self.sketches, batch)
        return self.sketches.ingest(
            batch.table, batch.rows, batch.source_rank, batch.event_time_seconds, batch.sequence_lengths
        )

    def _reject(self, reason: str, detail: str, message: Message) -> None:
        if reason not in self._rejected and len(self._rejected) >= MAX_REASONS:
            reason = "other"
        self._rejected[reason] = self._rejected.get(reason, 0) + 1
        if self._dead_letters is not None:
            self._dead_letters.record(reason, detail, message)
