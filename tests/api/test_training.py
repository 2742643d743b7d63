"""The sums over all step reports."""

from __future__ import annotations

from dataclasses import replace

from flexd.api.training import training_status
from flexd.control.protocol.report import ArmReport, PhaseReport, PhasesReport, UsedExchange
from flexd.operations.training_monitor import TrainingMonitor
from tests.support.components import report


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
