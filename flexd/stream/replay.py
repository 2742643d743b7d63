"""Send a trace to a sink as messages of the stream, at a chosen pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flexd.core.errors import ConfigError, StreamError
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.trace import Trace
from flexd.stream.types import AccessBatch, Sink

RETRY_SECONDS = 0.2

Pace = Callable[[float, int], float]
"""(event time of the next message, accesses sent so far) -> seconds after the start at which the message is due."""


@dataclass(frozen=True)
class ReplayResult:
    """Totals of a replay.

    Attributes:
        messages: messages that the sink accepted.
        accesses: accesses in these messages.
        payload_bytes: encoded size of these messages.
        failed: accepted messages that the sink could not deliver.
        seconds: wall time.
    """

    messages: int
    accesses: int
    payload_bytes: int
    failed: int
    seconds: float


def rename_tables(trace: Trace, names: Mapping[str, str]) -> Trace:
    """Replace table names; tables not in ``names`` keep theirs.

    Raises:
        ConfigError: the trace has no table of an old name, or two tables would share a name.
    """
    unknown = [name for name in names if name not in trace.table_names]
    if unknown:
        raise ConfigError(
            f"the trace has no table {', '.join(map(repr, unknown))}",
            remedy=f"rename one of {', '.join(trace.table_names)}"[:500],
        )
    renamed = tuple(names.get(name, name) for name in trace.table_names)
    twice = sorted({name for name in renamed if renamed.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two tables of the trace would be named {', '.join(map(repr, twice))}", remedy="give each its own name"
        )
    return replace(trace, table_names=renamed)


def move_times(trace: Trace, anchor: Literal["start", "end"], anchor_seconds: float, speed: float = 1.0) -> Trace:
    """Shift the event times and divide the gaps between them by ``speed``.

    Args:
        anchor: the event, first or last, that gets the time ``anchor_seconds``.
    """
    fixed = trace.seconds[0] if anchor == "start" else trace.seconds[-1]
    # The division may round two equal gaps differently: times must not decrease.
    moved = np.maximum.accumulate(anchor_seconds + (trace.seconds - fixed) / speed)
    return replace(trace, seconds=np.maximum(moved, 0.0))


def constant_rate(accesses_per_second: float) -> Pace:
    """Send this many accesses a second in the mean."""
    return lambda _, accesses: accesses / accesses_per_second


def trace_times(trace: Trace, speed: float = 1.0) -> Pace:
    """Send each message as long after the start as its event time is after the first event's, divided by ``speed``."""
    first = float(trace.seconds[0])
    return lambda event_time, _: (event_time - first) / speed


def trace_batches(trace: Trace, accesses_per_message: int, ranks: int) -> Iterator[list[AccessBatch]]:
    """Split the events, in order, into messages of ``accesses_per_message`` accesses.

    A message has one batch a table and the time of its last event. The source ranks take turns.
    """
    for number, first in enumerate(range(0, len(trace), accesses_per_message)):
        part = slice(first, first + accesses_per_message)
        tables, rows = trace.table[part], trace.row[part]
        order = np.argsort(tables, kind="stable")
        present, begins = np.unique(tables[order], return_index=True)
        at = float(trace.seconds[part][-1])
        yield [
            AccessBatch(trace.table_names[table], rows[order[begin:end]], number % ranks, at)
            for table, begin, end in zip(present, begins, [*begins[1:], len(rows)], strict=True)
        ]


def replay(
    batches: Iterator[list[AccessBatch]],
    sink: Sink,
    *,
    pace: Pace | None = None,
    timeout_seconds: float = 30.0,
    progress: Callable[[int], None] = lambda accesses: None,
    stopped: Callable[[], bool] = lambda: False,
) -> ReplayResult:
    """Send the messages one by one and wait until they are delivered.

    Args:
        pace: None sends as fast as the sink accepts.
        timeout_seconds: limit for one message, and for the delivery of the last ones.
        progress: called after each message with the accesses sent so far.
        stopped: checked before each message; true ends the replay early.

    Raises:
        StreamError: the sink did not accept a message within ``timeout_seconds``.
    """
    begun = time.monotonic()
    messages = accesses = size = 0
    for message in batches:
        if stopped():
            break
        due = begun if pace is None else begun + pace(message[0].event_time_seconds, accesses)
        while (left := due - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, RETRY_SECONDS))
        payload = encode_arrow(message)
        _send(sink, payload, timeout_seconds)
        messages, size = messages + 1, size + len(payload)
        accesses += sum(len(batch.rows) for batch in message)
        progress(accesses)
    sink.flush(timeout_seconds)
    return ReplayResult(messages, accesses, size, sink.messages_failed, time.monotonic() - begun)


def _send(sink: Sink, payload: bytes, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            sink.send(payload)
            return
        except StreamError:
            # A sink refuses while it connects or while the broker is behind: retry until the deadline.
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
