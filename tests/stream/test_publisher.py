"""The publisher: no argument makes it block or raise, and every access is accounted for."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.stream.codec import decode
from flexd.stream.publisher import Publisher
from flexd.stream.types import AccessBatch, Sink
from tests.support.until import until

MAX = 1 << 24


class MemorySink:
    """A sink that keeps messages, and fails or hangs on demand."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False
        self.messages_failed = 0

    def send(self, payload: bytes) -> None:
        self.gate.wait(20.0)
        if self.error is not None:
            raise self.error
        self.payloads.append(payload)

    def flush(self, timeout_seconds: float) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True

    def batches(self) -> list[AccessBatch]:
        return [batch for payload in self.payloads for batch in decode(payload, MAX)]


class Unreadable:
    """Rows of a library whose arrays raise its own errors."""

    def __array__(self, *_: object) -> np.ndarray:
        raise KeyError("freed")


def total(publisher: Publisher) -> int:
    c = publisher.counters()
    return c.published + c.dropped_queue_full + c.dropped_sink + c.dropped_invalid + c.queued


def test_batches_arrive_unchanged():
    sink = MemorySink()
    assert isinstance(sink, Sink)
    publisher = Publisher(sink, source_rank=3)
    rows = np.arange(10, dtype=np.int32)
    assert publisher.publish("a", rows, lengths=[4, 6], event_time_seconds=5.0)
    rows[:] = -1  # the trainer reuses its arrays
    assert publisher.publish("b", torch.arange(5), lengths=torch.tensor([5]), event_time_seconds=6.0)
    before = time.time()
    assert publisher.publish("a", np.arange(3, dtype=np.uint16))
    assert publisher.close(10.0)
    assert sink.closed
    received = {(b.table, b.rows.dtype, len(b.rows)): b for b in sink.batches()}
    first = received["a", np.dtype(np.int32), 10]
    assert (first.rows.tolist(), first.sequence_lengths.tolist()) == (list(range(10)), [4, 6])
    assert (first.source_rank, first.event_time_seconds) == (3, 5.0)
    assert received["b", np.dtype(np.int64), 5].rows.tolist() == [0, 1, 2, 3, 4]
    assert before <= received["a", np.dtype(np.int64), 3].event_time_seconds <= time.time()
    assert publisher.counters().published == total(publisher) == 18


def test_a_full_queue_drops_and_counts_and_does_not_wait():
    sink = MemorySink()
    sink.gate.clear()
    publisher = Publisher(sink, source_rank=0, max_queue_batches=4, linger_seconds=0.0)
    sent = [publisher.publish("t", np.full(10, i)) for i in range(50)]
    assert sent.count(False) >= 40
    assert publisher.counters().dropped_queue_full == 10 * sent.count(False)
    assert total(publisher) == 500
    sink.gate.set()
    assert publisher.close(10.0)
    assert [int(b.rows[0]) for b in sink.batches()] == [i for i, ok in enumerate(sent) if ok]
    assert total(publisher) == 500


def test_a_dead_sink_drops_and_counts_and_recovers():
    sink = MemorySink()
    sink.error = StreamError("broker away")
    publisher = Publisher(sink, source_rank=0, linger_seconds=0.0)
    publisher.publish("t", np.zeros(7, dtype=np.int64))
    until(lambda: publisher.counters().dropped_sink == 7)
    assert publisher.problem == "broker away"
    sink.error = ZeroDivisionError("a bug in a sink")
    publisher.publish("t", np.zeros(2, dtype=np.int64))
    until(lambda: publisher.counters().dropped_sink == 9)
    sink.error = None
    publisher.publish("t", np.zeros(5, dtype=np.int64))
    assert publisher.close(10.0)
    assert (publisher.counters().published, publisher.problem) == (5, None)
    assert total(publisher) == 14


def test_closing_gives_up_at_its_deadline():
    sink = MemorySink()
    sink.gate.clear()
    publisher = Publisher(sink, source_rank=0, linger_seconds=0.0)
    publisher.publish("t", np.zeros(3, dtype=np.int64))
    until(lambda: publisher.counters().queued == 3 and not publisher._queue)
    publisher.publish("t", np.zeros(4, dtype=np.int64))
    assert not publisher.close(0.1)
    assert publisher.counters().dropped_sink == 4
    assert not publisher.publish("t", np.zeros(2, dtype=np.int64))
    sink.gate.set()
    until(lambda: sink.closed)
    assert total(publisher) == 9


@pytest.mark.parametrize(
    ("table", "rows", "lengths", "more"),
    [
        ("t", np.zeros(3), None, ()),
        ("t", np.zeros((2, 3), dtype=np.int64), None, ()),
        ("t", np.zeros(3, dtype=np.uint64), None, ()),
        ("t", np.zeros(3, dtype=bool), None, ()),
        ("t", np.zeros(3, dtype=np.int64), [1, 1], ()),
        ("t", np.zeros(3, dtype=np.int64), [4, -1], ()),
        ("t", np.zeros(3, dtype=np.int64), [1.5, 1.5], ()),
        ("t", np.zeros(3, dtype=np.int64), None, (float("nan"),)),
        ("t", np.zeros(3, dtype=np.int64), None, (-1.0,)),
        ("", np.zeros(3, dtype=np.int64), None, ()),
        (None, np.zeros(3, dtype=np.int64), None, ()),
        ("\udc80", np.zeros(3, dtype=np.int64), None, ()),
        ("t", torch.zeros(3, dtype=torch.int64, device="meta"), None, ()),
        ("t", np.arange(3), np.array([1, 2]), (1.0, None, np.arange(3))),
        ("t", np.arange(3), None, (1.0, None, np.arange(3))),
        ("t", np.arange(3), None, (1.0, 1.5)),
        ("t", "abc", None, ()),
        ("t", None, None, ()),
        ("t", Unreadable(), None, ()),
    ],
)
def test_invalid_input_is_counted_and_not_raised(table, rows, lengths, more):
    sink = MemorySink()
    publisher = Publisher(sink, source_rank=0)
    assert publisher.publish(table, rows, lengths, *more) is False
    assert publisher.counters().dropped_invalid == (int(np.prod(rows.shape)) if hasattr(rows, "shape") else 0)
    publisher.close(5.0)
    assert sink.payloads == []


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 400), max_size=20), st.integers(0, 3000), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_messages_stay_within_their_size_and_lose_nothing(calls):
    """A call has sequences, some empty ones that cost lengths without rows, an id type, and lengths and ids or none."""
    sink = MemorySink()
    publisher = Publisher(sink, source_rank=0, max_message_bytes=6000, linger_seconds=0.02)
    sent: dict[np.dtype, list[int]] = {}
    sequences: dict[np.dtype, list[tuple[int, ...]]] = {}
    for number, (lengths, empty, wide, with_lengths) in enumerate(calls):
        rows = (np.arange(sum(lengths)) + number * 10_000).astype(np.int64 if wide else np.int32)
        lengths = lengths + [0] * empty
        ids = number * 10_000 + np.arange(len(lengths))
        of_sequences = (lengths, ids, -ids) if with_lengths else (None, None, None)
        assert publisher.publish("t", rows, of_sequences[0], 1.0, None, *of_sequences[1:])
        sent.setdefault(rows.dtype, []).extend(rows.tolist())
        if with_lengths:
            sequences.setdefault(rows.dtype, []).extend(zip(lengths, ids.tolist(), (-ids).tolist(), strict=True))
    assert publisher.close(20.0)
    assert sink.payloads
    assert max(map(len, sink.payloads)) <= 6000
    received = sink.batches()
    for dtype in sent:
        batches = [batch for batch in received if batch.rows.dtype == dtype]
        assert [row for batch in batches for row in batch.rows.tolist()] == sent[dtype], "in order, by id type"
        of_sequences = [
            (b.sequence_lengths, b.sample_ids, b.user_ids) for b in batches if b.sequence_lengths is not None
        ]
        got = [one for arrays in of_sequences for one in zip(*(array.tolist() for array in arrays), strict=True)]
        assert got == sequences.get(dtype, [])
    assert {batch.rows.dtype for batch in received} <= sent.keys()


def test_parts_of_a_batch_keep_their_step():
    sink = MemorySink()
    publisher = Publisher(sink, source_rank=0, max_message_bytes=8192)
    for step in range(3):
        publisher.publish("t", np.arange(2000), step=step)
    assert publisher.close(5.0)
    lengths = {step: sum(len(batch.rows) for batch in sink.batches() if batch.step == step) for step in range(3)}
    assert lengths == dict.fromkeys(range(3), 2000)
