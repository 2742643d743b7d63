"""Publish the accesses of a trainer's steps from a background thread, without blocking a step."""

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import StreamError
from flexd.stream.codec import MAX_ENTRIES, check, encode_arrow
from flexd.stream.types import AccessBatch, Sink

_log = logging.getLogger(__name__)

# Upper estimate of the size of schema and framing.
_MESSAGE_BYTES = 2048
_IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class PublisherCounters:
    """Accesses given to ``publish`` by outcome; the message counts are in messages.

    Attributes:
        published: accepted by the sink.
        dropped_queue_full: dropped because the background thread was behind.
        dropped_sink: refused by the sink, or still queued at the deadline of ``close``.
        dropped_invalid: dropped for an invalid array, table name or time (the first is logged).
        queued: in the queue or on their way to the sink.
        messages: messages accepted by the sink.
        messages_failed: accepted messages that the sink could not deliver.
    """

    published: int
    dropped_queue_full: int
    dropped_sink: int
    dropped_invalid: int
    queued: int
    messages: int
    messages_failed: int


class Publisher:
    """Send the accesses of one rank to a sink.

    ``publish`` copies the arrays into a bounded queue and returns; a daemon thread groups queued batches into
    messages and sends them. With a full queue or a dead sink accesses are dropped and counted; ``publish`` never waits
    and never raises.

    Args:
        sink: owned and closed by the publisher; used by its background thread only.
        source_rank: this rank.
        max_queue_batches, max_queue_bytes: bounds of the queue; as much again may be on its way to the sink.
        max_message_bytes: maximum size of a message; the default is below the usual broker limit of 1 MiB.
        linger_seconds: how long the first queued batch waits for further ones.

    Raises:
        StreamError: an argument is out of range.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        source_rank: int,
        max_queue_batches: int = 256,
        max_queue_bytes: int = 64 * 2**20,
        max_message_bytes: int = 900_000,
        linger_seconds: float = 0.05,
    ) -> None:
        if not 0 <= source_rank < 2**31 or max_queue_batches < 1 or max_message_bytes < 2 * _MESSAGE_BYTES:
            raise StreamError("publisher: a bound or the source rank is out of range", remedy="check the arguments")
        self._sink = sink
        self._source_rank = source_rank
        self._max_queue_batches = max_queue_batches
        self._max_queue_bytes = max_queue_bytes
        self._max_message_bytes = max_message_bytes
        self._linger_seconds = linger_seconds
        self._changed = threading.Condition()
        self._queue: deque[AccessBatch] = deque()
        self._queue_bytes = 0
        self._in_flight = 0
        self._close_deadline: float | None = None
        self._counts = dict.fromkeys(
            ("published", "dropped_queue_full", "dropped_sink", "dropped_invalid", "messages"), 0
        )
        self._warned = False
        # The last failure of the sink, None once it works again.
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="flexd-publisher", daemon=True)
        self._thread.start()

    def publish(
        self,
        table: str,
        rows: Any,
        lengths: Any = None,
        event_time_seconds: float | None = None,
        step: int | None = None,
        sample_ids: Any = None,
        user_ids: Any = None,
    ) -> bool:
        """Queue the accesses of one look-up. Never raises, whatever the arguments are, and never waits for the sink.

        Args:
            table: name of the table.
            rows: integer[n], numpy array or CPU tensor (a device tensor is refused: it would have to be waited for).
            lengths: integer[s] or None, lengths of the sequences that ``rows`` consists of.
            event_time_seconds: Unix seconds; now by default.
            step: number of the forward pass, equal on all ranks; publish every table in every pass, without rows where
                nothing is looked up. The daemon then measures which ranks need a row at the same time.
            sample_ids: integer[s] or None: sequences of several tables with the same id are one training sample. An id
                must not come back for another sample while the daemon remembers (``sketch.half_life_seconds``).
            user_ids: integer[s] or None: whose samples they are.

        Returns:
            True if accesses were queued.
        """
        try:
            batch = AccessBatch(
                table,
                _host_array(rows),
                self._source_rank,
                time.time() if event_time_seconds is None else float(event_time_seconds),
                None if lengths is None else _host_array(lengths).astype(np.int32),
                None if step is None else operator.index(step),
                None if sample_ids is None else _host_array(sample_ids).astype(np.int64),
                None if user_ids is None else _host_array(user_ids).astype(np.int64),
            )
            check(batch)
            # A name with lone surrogates would fail a whole message, with the accesses of other tables.
            table.encode()
        except Exception as error:
            with self._changed:
                self._counts["dropped_invalid"] += _access_count(rows)
            if not self._warned:
                self._warned = True
                _log.warning("accesses of table %r cannot be published: %s (reported once)", table, error)
            return False
        with self._changed:
            dropped = self._reason_to_drop(batch)
            if dropped is not None:
                self._counts[dropped] += len(batch.rows)
                return False
            # The caller may fill its array again.
            self._queue.append(replace(batch, rows=batch.rows.copy()))
            self._queue_bytes += _encoded_bytes(batch)
            self._changed.notify()
        return True

    def counters(self) -> PublisherCounters:
        with self._changed:
            queued = sum(len(batch.rows) for batch in self._queue) + self._in_flight
            return PublisherCounters(queued=queued, messages_failed=self._sink.messages_failed, **self._counts)

    def close(self, timeout_seconds: float) -> bool:
        """Send the queued batches and close the sink. Return whether all were sent within the deadline."""
        with self._changed:
            if self._close_deadline is None:
                self._close_deadline = time.monotonic() + timeout_seconds
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        with self._changed:
            left = sum(len(batch.rows) for batch in self._queue)
            self._counts["dropped_sink"] += left
            self._queue.clear()
            self._queue_bytes = 0
            return left == 0 and self._in_flight == 0 and self.problem is None

    def _reason_to_drop(self, batch: AccessBatch) -> str | None:
        if self._close_deadline is not None:
            return "dropped_sink"
        fits = self._queue_bytes + _encoded_bytes(batch) <= self._max_queue_bytes
        return None if fits and len(self._queue) < self._max_queue_batches else "dropped_queue_full"

    # ---- the background thread ----

    def _run(self) -> None:
        while True:
            batches = self._drain_queue()
            if not batches:
                break
            for message in _group(batches, self._max_message_bytes):
                self._send(message)
            with self._changed:
                idle = not self._queue
            if idle:
                self._flush(_IDLE_SECONDS)
        self._flush(0.0 if self._close_deadline is None else max(0.0, self._close_deadline - time.monotonic()))
        try:
            self._sink.close()
        except Exception as error:
            self.problem = str(error)

    def _drain_queue(self) -> list[AccessBatch]:
        # Remove and return the queued batches after lingering; empty if closing and either drained or out of time.
        with self._changed:
            while not self._queue and self._close_deadline is None:
                self._changed.wait(_IDLE_SECONDS)
            linger_until = time.monotonic() + self._linger_seconds
            while self._close_deadline is None and self._queue_bytes < self._max_message_bytes:
                left = linger_until - time.monotonic()
                if left <= 0 or len(self._queue) >= self._max_queue_batches // 2:
                    break
                self._changed.wait(left)
            if self._close_deadline is not None and time.monotonic() >= self._close_deadline:
                return []
            batches = list(self._queue)
            self._queue.clear()
            self._queue_bytes = 0
            self._in_flight = sum(len(batch.rows) for batch in batches)
            return batches

    def _send(self, batches: list[AccessBatch]) -> None:
        accesses = sum(len(batch.rows) for batch in batches)
        sent = False
        if self._close_deadline is None or time.monotonic() < self._close_deadline:
            # A sink is foreign code: no exception of it may end this thread, or all later accesses would be lost.
            try:
                self._sink.send(encode_arrow(batches))
                self.problem = None
                sent = True
            except Exception as error:
                if self.problem is None:
                    _log.warning("accesses are dropped: %s", error)
                self.problem = str(error)
        with self._changed:
            self._in_flight -= accesses
            self._counts["published" if sent else "dropped_sink"] += accesses
            self._counts["messages"] += sent

    def _flush(self, timeout_seconds: float) -> None:
        try:
            self._sink.flush(timeout_seconds)
        except Exception as error:
            self.problem = str(error)


def _host_array(values: Any) -> npt.NDArray[Any]:
    """Convert to int32[n] or int64[n], without a copy if possible.

    Raises:
        TypeError, StreamError: the values are no integer array in host memory.
    """
    if hasattr(values, "detach"):
        values = values.detach().numpy()
    # numpy makes an empty list a float array.
    array = np.asarray(values, dtype=np.int64 if isinstance(values, list | tuple) and not values else None)
    if array.dtype in (np.int32, np.int64):
        return array
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise StreamError(f"{array.dtype} is no integer type of row ids", remedy="give int32 or int64")
    return array.astype(np.int64)


def _access_count(rows: Any) -> int:
    try:
        return int(np.prod(rows.shape, dtype=np.int64))
    except Exception:
        return 0


def _encoded_bytes(batch: AccessBatch) -> int:
    sequence_bytes = sum(each.nbytes for each in _of_sequences(batch).values())
    # Upper estimate of the size of an entry in a message, without its arrays and its name.
    return batch.rows.nbytes + sequence_bytes + 4 * len(batch.table) + 64


def _of_sequences(batch: AccessBatch) -> dict[str, npt.NDArray[Any]]:
    found = {name: getattr(batch, name) for name in ("sequence_lengths", "sample_ids", "user_ids")}
    return {name: array for name, array in found.items() if array is not None}


def _group(batches: list[AccessBatch], max_message_bytes: int) -> Iterator[list[AccessBatch]]:
    # Group batches into messages, in order for each id type: in a mixed message int32 ids would be sent as int64.
    limit = max_message_bytes - _MESSAGE_BYTES
    groups: dict[np.dtype[Any], list[AccessBatch]] = {}
    sizes: dict[np.dtype[Any], int] = {}
    for batch in batches:
        for piece in _split(batch, limit):
            kind, size = piece.rows.dtype, _encoded_bytes(piece)
            group = groups.setdefault(kind, [])
            if group and (sizes[kind] + size > limit or len(group) >= MAX_ENTRIES):
                yield group
                group = groups[kind] = []
            sizes[kind] = size + (sizes[kind] if group else 0)
            group.append(piece)
    yield from (group for group in groups.values() if group)


def _split(batch: AccessBatch, max_bytes: int) -> Iterator[AccessBatch]:
    # Split a batch into parts of at most ``max_bytes``, between sequences; a longer sequence stays whole.
    size = _encoded_bytes(batch)
    if size <= max_bytes:
        yield batch
        return
    if batch.sequence_lengths is None:
        ends = np.arange(1, len(batch.rows) + 1)
    else:
        ends = np.cumsum(batch.sequence_lengths, dtype=np.int64)
    of_sequences = _of_sequences(batch)
    sequence_bytes = sum(each.nbytes for each in of_sequences.values())
    room = max_bytes - (size - batch.rows.nbytes - sequence_bytes)
    cost = ends * batch.rows.itemsize + np.arange(1, len(ends) + 1) * (sequence_bytes // max(1, len(ends)))
    first = start = spent = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(cost, spent + room, side="right")))
        parts: dict[str, Any] = {name: given[first:last] for name, given in of_sequences.items()}
        yield replace(batch, rows=batch.rows[start : int(ends[last - 1])], **parts)
        first, start, spent = last, int(ends[last - 1]), int(cost[last - 1])
