"""Merging of step reports."""

from __future__ import annotations

from dataclasses import replace

from flexd.control.protocol.report import PendingReports
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import step_report


def test_reports_merge_into_one() -> None:
    one = step_report(1, Placement.empty(3))
    two = replace(step_report(2, Placement.empty(4)), step_seconds=float("nan"), accesses_by_tier=(1, 1, 1))
    pending = PendingReports()
    assert [pending.add(one), pending.add(two)] == [True, False]
    both = pending.drain()
    assert both is not None
    assert (both.step, both.steps, both.placement_version) == (2, 2, 4)
    assert both.step_seconds == one.step_seconds
    assert both.accesses_by_tier == (4, 3, 2)
    assert both.all_to_all_inter_bytes == 40
