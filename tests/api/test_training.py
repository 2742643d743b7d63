"""The sums over all step reports."""

from __future__ import annotations

from flexd.api.training import training_status
from flexd.operations.training_monitor import TrainingMonitor
from tests.support.components import report


def test_sums_are_by_tier_kind_and_link() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(5, steps=2, inter=100))
    monitor.add(1, report(4, inter=10))
    shown = training_status(monitor.totals())
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
