"""A trace as messages of the stream, sent at a chosen pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flexd.core.errors import StreamError
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.trace import Trace
from flexd.stream.types import AccessBatch, Sink

RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Replayed:
    """What was sent.

    Attributes:
        messages, accesses, payload_bytes: taken by the sink. failed: messages of these that it could not deliver.
        seconds: wall time.
    """

    messages: int
    accesses: int
    payload_bytes: int
    failed: int
    seconds: float


def trace_batches(
    trace: Trace, accesses_per_message: int, ranks: int, shift_seconds: float = 0.0
) -> Iterator[list[AccessBatch]]:
    """The events in order, so many a message: one batch a table, the messages dealt to the source ranks in turn.

    Args:
        shift_seconds: added to every event time. A message has the time of its last event.
    """
    for number, first in enumerate(range(0, len(trace), accesses_per_message)):
        part = slice(first, first + accesses_per_message)
        tables, rows = trace.table[part], trace.row[part]
        order = np.argsort(tables, kind="stable")
        present, begins = np.unique(tables[order], return_index=True)
        at = float(trace.seconds[part][-1]) + shift_seconds
        yield [
            AccessBatch(trace.table_names[table], rows[order[begin:end]], number % ranks, at)
            for table, begin, end in zip(present, begins, [*begins[1:], len(rows)], strict=True)
        ]


def replay(
    batches: Iterator[list[AccessBatch]],
    sink: Sink,
    *,
    accesses_per_second: float | None = None,
    patience_seconds: float = 30.0,
    progress: Callable[[int], None] = lambda accesses: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Replayed:
    """Sends the messages one by one and waits until they are delivered.

    Args:
        accesses_per_second: in the mean; None sends as fast as the sink takes it.
        patience_seconds: how long one message, and the delivery of the last ones, may take.
        progress: told the accesses sent so far, after each message.
        stopped: asked before each message: true ends it early.

    Raises:
        StreamError: the sink did not take a message within ``patience_seconds``.
    """
    begun = time.monotonic()
    messages = accesses = size = 0
    for message in batches:
        if stopped():
            break
        due = 0.0 if accesses_per_second is None else begun + accesses / accesses_per_second
        while (left := due - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, RETRY_SECONDS))
        payload = encode_arrow(message)
        _send(sink, payload, patience_seconds)
        messages, size = messages + 1, size + len(payload)
        accesses += sum(len(batch.rows) for batch in message)
        progress(accesses)
    sink.flush(patience_seconds)
    return Replayed(messages, accesses, size, sink.messages_failed, time.monotonic() - begun)


def _send(sink: Sink, payload: bytes, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            sink.send(payload)
            return
        except StreamError:
            # A broker that is being connected, or is behind: it refuses and wants to be asked again.
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
