"""Reports of slow memory are summed over ranks, and the wait is a share of the recent steps."""

from __future__ import annotations

from dataclasses import replace

from flexd.control.protocol.report import (
    PlacementState,
    SlowMemoryReport,
    SlowTableReport,
    StepReport,
    merge_reports,
)
from flexd.operations.training_monitor import SlowMemoryMonitor

STEP = StepReport(1, 1, PlacementState(0, 0), 2.0, 0.0, (1, 0, 0))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def report(seconds: float = 0.5, *tables: SlowTableReport) -> StepReport:
    return replace(STEP, slow_memory=SlowMemoryReport(tables, 100, 40, seconds))


def test_reports_of_all_ranks_add_up() -> None:
    monitor = SlowMemoryMonitor(2, Clock())
    monitor.add(report(0.5, SlowTableReport(0, 10, 4, 3, 2), SlowTableReport(1, 5, 5, 0, 0)))
    monitor.add(report(0.25, SlowTableReport(0, 1, 1, 1, 1), SlowTableReport(SlowTableReport.OTHERS, 7, 0, 0, 0)))
    monitor.add(report(0.0, SlowTableReport(2**31, 1, 0, 0, 0)))
    totals = monitor.totals()
    assert totals is not None
    assert totals.by_table.tolist() == [[11, 5, 4, 3], [5, 5, 0, 0], [8, 0, 0, 0]], "a number without a table is none"
    assert (totals.bytes_read, totals.bytes_written, totals.wait_seconds) == (300, 120, 0.75)


def test_waiting_reports_are_merged_by_table() -> None:
    first = report(0.5, SlowTableReport(0, 10, 4, 3, 2))
    merged = merge_reports(merge_reports(None, first), STEP)
    assert merged.slow_memory == first.slow_memory
    merged = merge_reports(merged, report(0.25, SlowTableReport(1, 1, 1, 0, 0), SlowTableReport(0, 1, 0, 0, 1)))
    assert merged.slow_memory == SlowMemoryReport(
        (SlowTableReport(0, 11, 4, 3, 3), SlowTableReport(1, 1, 1, 0, 0)), 200, 80, 0.75
    )
    assert merged.steps == 3
