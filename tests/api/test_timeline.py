"""Traffic of the last half hour."""

from __future__ import annotations

import pytest

from flexd.api.training import row_wise_inter_node_bytes
from flexd.operations.training_monitor import INTERVAL_SECONDS, MAX_SAMPLES, TrafficTimeline, TrainingMonitor
from tests.support.components import components, report


def test_timeline_compares_with_row_wise_and_is_bounded():
    now = [100.0]
    training = TrainingMonitor()
    training.timeline = TrafficTimeline(clock=lambda: now[0])
    training.add(0, report(1))
    training.add(1, report(2, steps=2, inter=4000))
    now[0] += INTERVAL_SECONDS
    training.add(0, report(3))
    now[0] -= 60  # a clock set back
    training.add(0, report(4))
    timeline = components(training=training).timeline()
    first, second = timeline.samples
    assert (first.unix_seconds, first.steps, second.steps) == (100.0, 3, 2)
    assert first.inter_node_bytes == pytest.approx((1000 + 4000 + 4) / 3)
    assert (first.intra_node_bytes, first.migration_bytes) == (pytest.approx(22 / 3), pytest.approx(14 / 3))
    assert first.accesses == {"HOME": 20, "NODE": 13, "DEVICE": 7}
    # 4 of 5 accesses are to rows of 16 bytes, as is the fifth; half of the homes are in the other node.
    assert first.row_wise_inter_node_bytes == pytest.approx(row_wise_inter_node_bytes(40, 16.0, 0.5))
    assert row_wise_inter_node_bytes(40, 16.0, 0.5) == 40 * (2 * 16 + 8) / 2
    assert (len(timeline.plans), timeline.plans[-1].plan_id) == (100, "p199")
    assert components(training=training, ranks=False).timeline().samples[0].row_wise_inter_node_bytes is None
    for i in range(MAX_SAMPLES + 5):
        now[0] = 1000 + i * INTERVAL_SECONDS
        training.add(0, report(1))
    intervals = training.timeline.intervals()
    assert len(intervals) == MAX_SAMPLES
    assert intervals[-1].index * INTERVAL_SECONDS == now[0]
