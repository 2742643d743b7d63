"""Replaying a trace: times, pace, refusals of the sink."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import ConfigError, StreamError
from flexd.stream.replay import constant_rate, move_times, rename_tables, replay, trace_batches
from flexd.stream.trace import Trace

EVENTS = 1000


@pytest.fixture
def trace() -> Trace:
    random = np.random.default_rng(1)
    return Trace(
        random.integers(0, 2, EVENTS), random.integers(0, 50, EVENTS), np.arange(EVENTS) / 10 + 5e8, None,
        np.array([50, 60]), ("items", "users"),
    )  # fmt: skip


class Sink:
    """A sink that refuses the first ``refusals`` messages and fails to deliver ``failed`` of the others."""

    def __init__(self, refusals: int, failed: int = 0) -> None:
        self.refusals, self.messages_failed = refusals, failed
        self.sent: list[bytes] = []
        self.flushed = 0

    def send(self, payload: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StreamError("not yet")
        self.sent.append(payload)

    def flush(self, timeout_seconds: float) -> None:
        self.flushed += 1

    def close(self) -> None:
        pass


def test_a_refusing_sink_is_retried_until_the_deadline(trace):
    sink = Sink(refusals=1, failed=2)
    sent = replay(trace_batches(trace, 500, 1), sink, timeout_seconds=5.0)
    assert (sent.messages, sent.failed, len(sink.sent), sink.flushed) == (2, 2, 2, 1)
    with pytest.raises(StreamError, match="not yet"):
        replay(trace_batches(trace, 500, 1), Sink(refusals=10**6), timeout_seconds=0.01)


def test_a_constant_rate_is_kept_and_a_stop_obeyed(trace):
    sink, seen = Sink(0), []
    sent = replay(trace_batches(trace, 100, 1), sink, pace=constant_rate(2000), progress=seen.append)
    assert sent.seconds >= 0.9 * 900 / 2000
    assert seen == list(range(100, EVENTS + 1, 100))
    stopped = replay(trace_batches(trace, 100, 1), Sink(0), pace=constant_rate(0.001), stopped=lambda: True)
    assert stopped.messages == 0


def test_moved_times_keep_their_order_and_proportions(trace):
    for speed in (1.0, 3.0, 1e9):
        for anchor in ("start", "end"):
            moved = move_times(trace, anchor, 1.7e9 + 0.123, speed).seconds
            assert (np.diff(moved) >= 0).all()
            assert moved[0 if anchor == "start" else -1] == 1.7e9 + 0.123
            assert moved - moved[0] == pytest.approx((trace.seconds - trace.seconds[0]) / speed, abs=1e-6)
    assert move_times(trace, "end", 10.0).seconds.min() == 0.0, "a time before 1970 is no event time"


def test_renamed_tables_keep_their_events(trace):
    renamed = rename_tables(trace, {"items": "users", "users": "items"})
    assert renamed.table_names == ("users", "items")
    assert renamed.row is trace.row
    assert rename_tables(trace, {}).table_names == trace.table_names
    with pytest.raises(ConfigError, match="no table 'shops'"):
        rename_tables(trace, {"shops": "items"})
    with pytest.raises(ConfigError, match="named 'users'"):
        rename_tables(trace, {"items": "users"})
