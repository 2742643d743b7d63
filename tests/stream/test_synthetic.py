"""The synthetic source: drift, pace, and the same stream from any position."""

import numpy as np
import pytest

from flexd.config.sections import SyntheticSourceConfig
from flexd.stream import synthetic
from flexd.stream.codec import decode
from flexd.stream.synthetic import SyntheticSource
from flexd.stream.trace import scatter_multiplier
from tests.support.until import Clock


def test_drift_moves_the_head_by_the_stated_rate():
    config = SyntheticSourceConfig(
        kind="synthetic", zipf_exponent=1.5, accesses_per_second=1000, drift_rows_per_second=3
    )
    source = SyntheticSource([("t", 1000)], config, accesses_per_message=1000)
    multiplier = scatter_multiplier(1000)
    for second in (0, 1, 10, 400):
        batch = source.batch(second)
        assert batch.event_time_seconds == second
        assert int(np.bincount(batch.rows, minlength=1000).argmax()) == (-3 * second) % 1000 * multiplier % 1000


def test_it_keeps_the_pace_of_the_clock(monkeypatch):
    monkeypatch.setattr(synthetic, "_MAX_POLL_MESSAGES", 4)
    clock = Clock()
    config = SyntheticSourceConfig(kind="synthetic", accesses_per_second=80)
    source = SyntheticSource([("t", 10)], config, accesses_per_message=8, clock=clock, sleep=clock.sleep)
    assert source.poll(0.05) == []
    assert clock.now == pytest.approx(100.05)
    assert len(source.poll(1.0)) == 1
    assert clock.now == pytest.approx(100.1)
    clock.now = 101.05
    assert (source.lag(), len(source.poll(0.0)), source.lag()) == (9, 4, 5)
    source.restore({"synthetic": 7})
    assert source.lag() == 0
    clock.now += 0.2001
    assert [m.offset for m in source.poll(0.0)] == [7, 8]


def test_tables_take_turns_with_ids_as_wide_as_their_rows_need():
    clock = Clock()
    tables = [("a", 100), ("b", 2**33)]
    source = SyntheticSource(tables, SyntheticSourceConfig(kind="synthetic"), clock=clock, sleep=clock.sleep)
    source.restore({"synthetic": 0})
    clock.now += 1.0
    batches = [decode(bytes(message.payload), 1 << 24)[0] for message in source.poll(0.0)]
    assert [batch.table for batch in batches[:4]] == ["a", "b", "a", "b"]
    assert {batch.table: batch.rows.dtype for batch in batches} == {"a": np.int32, "b": np.int64}
