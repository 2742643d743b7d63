"""The sums over all step reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.api.training import row_wise_inter_node_bytes, training_status
from flexd.control.protocol.report import ArmReport, PhaseReport, PhasesReport, UsedExchange
from flexd.operations.training_monitor import INTERVAL_SECONDS, MAX_SAMPLES, TrafficTimeline, TrainingMonitor
from tests.support.components import components, report


def test_sums_are_by_tier_kind_and_link() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(5, steps=2, inter=100))
    monitor.add(1, report(4, inter=10))
    shown = training_status(monitor.totals(), monitor.ranks(), monitor.phases())
    assert shown.accesses == {"HOME": 60, "NODE": 40, "DEVICE": 20}
    assert shown.sent_bytes["all_to_all"] == {"intra": 20, "inter": 110}
    assert shown.sent_bytes["migration"] == {"intra": 6, "inter": 8}
    assert (shown.steps, shown.step_seconds, shown.newest_step) == (3, 1.5, 5)
    sent = {
        tuple(sample.labels.values()): sample.value
        for family in shown.metrics()
        if family.name == "flexd_training_sent_bytes"
        for sample in family.samples
    }
    assert (sent["all_to_all", "inter"], sent["sync", "intra"], len(sent)) == (110, 2, 6)


MEASURED = (ArmReport("direct", 0.52), ArmReport("chain with prefetch", 0.44))


def test_phases_are_the_mean_over_the_ranks_and_unknown_before_any_report() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(1))
    assert training_status(monitor.totals(), monitor.ranks(), monitor.phases()).phases == ()
    for rank, seconds in ((0, 0.2), (1, 0.6)):
        rows = PhaseReport("rows", exposed_seconds=seconds, inter_bytes=1000, inter_collectives=4)
        monitor.add(
            rank,
            replace(
                report(3, steps=2),
                phases=PhasesReport((rows,), 2),
                exchange=UsedExchange(
                    "chain",
                    "" if rank else "measured",
                    "chain with prefetch",
                    () if rank else MEASURED,
                    0 if rank else 90,
                ),
            ),
        )
    shown = training_status(monitor.totals(), monitor.ranks(), monitor.phases())
    (rows_phase,) = (phase for phase in shown.phases if phase.phase == "rows")
    assert (rows_phase.exposed_seconds, rows_phase.inter_bytes, rows_phase.inter_collectives) == (0.2, 500, 2)
    tuning = shown.tuning
    assert (tuning.exchange, tuning.arm, tuning.reason, tuning.measured_at_step) == (
        "chain", "chain with prefetch", "measured", 90,
    )  # fmt: skip
    assert [(one.arm, one.step_seconds, one.in_use) for one in tuning.arms] == [
        ("chain with prefetch", 0.44, True), ("direct", 0.52, False),
    ]  # fmt: skip
    sample = {
        tuple(sample.labels.values()): sample.value
        for family in shown.metrics()
        if family.name == "flexd_training_phase_seconds"
        for sample in family.samples
    }
    assert (sample["rows", "exposed"], sample["push", "exposed"]) == (0.2, 0)


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
