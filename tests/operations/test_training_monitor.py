"""Sums and averages over the reports of the ranks."""

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.api.training import ids_status
from flexd.control.protocol.report import (
    IdsReport,
    PlacementState,
    SentBytes,
    SlowMemoryReport,
    SlowTableReport,
    StepReport,
    merge_reports,
    most_used,
)
from flexd.core.keyspace import TableSpec
from flexd.core.step_phases import StepPhase
from flexd.operations.live_plan import MIN_STEPS
from flexd.operations.training_monitor import StepBlocks, TrainingMonitor, trimmed_mean
from flexd.topology.cluster import Collective, Link
from tests.operations.test_live_plan import prices_of, step_report
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.report_values import reports


def report(step: int, steps: int = 1, accesses: tuple[int, int, int] = (60, 30, 10), version: int = 0) -> StepReport:
    return StepReport(
        step=step, steps=steps, placement=PlacementState(version, 7), step_seconds=0.5 * steps,
        apply_seconds=0.1, accesses_by_tier=accesses, sent=SentBytes(1, 2, 3, 4, 5, 6),
    )  # fmt: skip


def test_the_average_follows_a_change_within_some_tens_of_steps() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(1))
    for step in range(2, 302):
        monitor.add(0, report(step, accesses=(0, 0, 200)))
    assert monitor.accesses_per_step(1) == pytest.approx(200, rel=0.01)
    monitor.add(0, report(302, accesses=(0, 0, 10_200)))
    assert monitor.accesses_per_step(1) == pytest.approx(400, rel=0.01), "one odd step is a fiftieth of the average"
    monitor.add(0, report(402, steps=100, accesses=(0, 0, 5_000)))
    assert monitor.accesses_per_step(1) == 50, "a report of many steps stands for itself"


def test_a_new_generation_resets_averages_and_versions_but_not_totals() -> None:
    monitor = TrainingMonitor()
    monitor.add(3, report(5, version=2))
    assert monitor.ranks()[3].version == 2
    monitor.new_generation()
    assert monitor.accesses_per_step(2) is None
    assert (monitor.ranks(), monitor.totals().step) == ({}, 5)


SPECS = [TableSpec("items", 9, 4), TableSpec("users", 100, 4)]
STEP = StepReport(1, 1, PlacementState(0, 0), 2.0, 0.0, (1, 0, 0))


def slow_report(seconds: float = 0.5, *tables: SlowTableReport) -> StepReport:
    return replace(STEP, slow_memory=SlowMemoryReport(tables, 100, 40, seconds))


def test_reports_of_all_ranks_add_up() -> None:
    monitor = TrainingMonitor(2)
    monitor.add(0, slow_report(0.5, SlowTableReport(0, 10, 4, 3, 2), SlowTableReport(1, 5, 5, 0, 0)))
    monitor.add(
        0, slow_report(0.25, SlowTableReport(0, 1, 1, 1, 1), SlowTableReport(SlowTableReport.OTHERS, 7, 0, 0, 0))
    )
    monitor.add(0, slow_report(0.0, SlowTableReport(2**31, 1, 0, 0, 0)))
    totals = monitor.slow_memory()
    assert totals.by_table.tolist() == [[11, 5, 4, 3], [5, 5, 0, 0], [8, 0, 0, 0]], "a number without a table is none"
    assert (totals.bytes_read, totals.bytes_written, totals.wait_seconds) == (300, 120, 0.75)


def test_waiting_reports_are_merged_by_table() -> None:
    first = slow_report(0.5, SlowTableReport(0, 10, 4, 3, 2))
    merged = merge_reports(merge_reports(None, first), STEP)
    assert merged.slow_memory == first.slow_memory
    merged = merge_reports(merged, slow_report(0.25, SlowTableReport(1, 1, 1, 0, 0), SlowTableReport(0, 1, 0, 0, 1)))
    assert merged.slow_memory == SlowMemoryReport(
        (SlowTableReport(0, 11, 4, 3, 3), SlowTableReport(1, 1, 1, 0, 0)), 200, 80, 0.75
    )
    assert merged.steps == 3


def ids_report(table: int, used: int, **counts: int) -> StepReport:
    return replace(STEP, ids=(IdsReport(table, used, **counts),))


def test_unbounded_ids_of_all_ranks_add_up_and_tell_what_other_numbers_of_rows_would_do() -> None:
    monitor = TrainingMonitor(2)
    assert ids_status(monitor.ids(), {}, SPECS) is None
    first = ids_report(1, 70, look_ups=600, own=500, admitted=100, evicted=40, sampled=100, in_half=80, in_quarter=40)
    merged = merge_reports(first, ids_report(1, 75, look_ups=200, own=140, admitted=60, evicted=60))
    assert merged.ids == (replace(first.ids[0], used_slots=75, look_ups=800, own=640, admitted=160, evicted=100),)
    monitor.add(0, merged)
    monitor.add(3, ids_report(1, 5, look_ups=200, own=160, pinned=2, refused=7))
    monitor.add(3, ids_report(2, 5, look_ups=9))
    status = ids_status(monitor.ids(), {}, SPECS)
    assert [of_table.table for of_table in status.tables] == ["users"], "the daemon has no third table"
    of_users = status.tables[0]
    assert (of_users.rows, of_users.rows_used, of_users.look_ups, of_users.own) == (100, 80, 1000, 800)
    assert (of_users.admitted, of_users.evicted, of_users.refused, of_users.pinned) == (160, 100, 7, 2)
    assert of_users.own_share == pytest.approx(0.8, abs=1e-3)
    assert of_users.evictions_per_1000 == pytest.approx(100, abs=0.1)
    # Of the own look-ups four fifths would be so in half of the rows, two fifths in a quarter: the last doubling
    # brought half of what the one before did.
    assert of_users.own_share_of_half_the_rows == pytest.approx(0.64, abs=1e-3)
    assert of_users.own_share_of_twice_the_rows == pytest.approx(0.8 + 0.16 / 2, abs=1e-3)
    monitor.new_generation()
    assert ids_status(monitor.ids(), {}, SPECS).tables[0].rows_used == 0
    for _ in range(5):
        monitor.add(0, ids_report(0, 2**62, look_ups=2**62))
    assert monitor.ids()[0].counts[0] == 2**62


def test_reports_name_the_tables_of_unbounded_ids_with_the_most_look_ups() -> None:
    named = most_used(IdsReport(table, 1, look_ups=table) for table in range(40))
    assert [of_table.table for of_table in named] == list(range(39, 7, -1))


def with_known_phases(report: StepReport) -> StepReport:
    by_phase = tuple(
        replace(phase, phase=name.value) for phase, name in zip(report.phases.by_phase, StepPhase, strict=False)
    )
    return replace(report, phases=replace(report.phases, by_phase=by_phase))


ANY_REPORT = reports().map(with_known_phases)
NAN_WITHOUT_LOOK_UPS = {"spread_seconds", "replica_share", "wait_share", "missed_per_step", "miss_seconds"}


def numbers(value: Any, where: str = "") -> dict[str, float]:
    """Return all numbers in a value, by where they are."""
    if is_dataclass(value):
        parts = {item.name: getattr(value, item.name) for item in fields(value)}
    elif isinstance(value, dict):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, tuple | list | np.ndarray):
        parts = {str(at): part for at, part in enumerate(value)}
    else:
        number = isinstance(value, int | float | np.number)
        return {where: float(value)} if number else {}
    found: dict[str, float] = {}
    for name, part in parts.items():
        if name not in NAN_WITHOUT_LOOK_UPS:
            found |= numbers(part, f"{where}.{name}")
    return found


@given(st.lists(st.tuples(st.integers(0, 3), ANY_REPORT), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_averages_sums_and_prices_stay_finite(received: list[tuple[int, StepReport]]) -> None:
    training = TrainingMonitor(3)
    prices = prices_of(FakeCoordinator(), training)
    received += [(rank, step_report(2.0, steps=MIN_STEPS)) for rank in range(4)]
    for rank, report in received:
        training.add(rank, report)
        prices.add(rank, report)
    cluster = prices.cluster
    seconds = [cluster.curve(link, collective).seconds(1e6) for link in Link for collective in Collective]
    kept = (
        training.totals(), training.ranks(), training.phases(), prices.exposed(), training.accesses_per_step(4),
        training.step_seconds(), training.intervals(),
        training.slow_memory(), seconds,
    )  # fmt: skip
    assert not {where: value for where, value in numbers(kept).items() if not math.isfinite(value) or value < 0}


def test_sums_of_slow_memory_stop_before_they_overflow() -> None:
    monitor = TrainingMonitor(1)
    most = SlowMemoryReport(tuple(SlowTableReport(0, *[2**53] * 4) for _ in range(256)))
    for _ in range(5):
        monitor.add(0, replace(step_report(1.0), slow_memory=most))
    assert (monitor.slow_memory().by_table[0] == 2**62).all()


def block_report(version: int, seconds: float, steps: int = 2, apply_seconds: float = 0.0) -> StepReport:
    return StepReport(1, steps, PlacementState(version, 0), seconds * steps, apply_seconds, (1, 0, 0))


def test_a_block_has_clean_steps_of_every_rank_and_counts_the_busiest() -> None:
    blocks = StepBlocks()
    blocks.begin(7, 8)
    for rank in (0, 1):
        blocks.add(rank, block_report(6, 9.0))
        blocks.add(rank, block_report(7, 9.0, apply_seconds=0.5))
        blocks.add(rank, block_report(7, 9.0))
    for number in range(4):
        assert blocks.seconds(2) is None, number
        blocks.add(0, block_report(7, 1.0))
        blocks.add(1, block_report(7, 1.5))
    assert blocks.seconds(2) == pytest.approx(1.5)
    assert blocks.seconds(3) is None, "a rank has not reported"
    assert blocks.steps() == 14
    blocks.begin(7, 8)
    assert blocks.seconds(2) is None
    for _ in range(4):
        blocks.add(0, block_report(7, 2.0))
        blocks.add(1, block_report(7, 1.0))
    assert blocks.seconds(2) == pytest.approx(2.0), "a further block at the same version needs no wait"
    blocks.begin(8, 2)
    blocks.add(0, block_report(7, 1.0, steps=100))
    assert blocks.seconds(1) is None, "of another version"


def test_the_trimmed_mean_leaves_pauses_out() -> None:
    even = [(2, 2.0)] * 8
    assert trimmed_mean(even) == pytest.approx(1.0)
    assert trimmed_mean([*even, (2, 500.0), (1, 0.01)]) == pytest.approx(1.0)
    assert trimmed_mean([(1, 1.0), (3, 6.0)]) == pytest.approx((0.05 * 1.0 + 0.55 * 2.0) / 0.6)
