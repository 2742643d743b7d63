"""Whatever a rank reports within the bounds of its fields: what the daemon makes of it stays finite."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.protocol.report import SlowMemoryReport, SlowTableReport, StepPhase, StepReport
from flexd.operations.live_prices import MIN_STEPS
from flexd.operations.training_monitor import SlowMemoryMonitor, TrainingMonitor
from flexd.topology.cluster import Collective, Link
from tests.operations.test_live_prices import prices_of, step_report
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.report_values import reports


def with_known_phases(report: StepReport) -> StepReport:
    known = zip(report.phases.by_phase, StepPhase, strict=False)
    by_phase = tuple(replace(phase, phase=name.value) for phase, name in known)
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
    training, slow, prices = TrainingMonitor(), SlowMemoryMonitor(3), prices_of(FakeCoordinator())
    received += [(rank, step_report(2.0, steps=MIN_STEPS)) for rank in range(4)]
    for rank, report in received:
        training.add(rank, report)
        slow.add(report)
        prices.add(rank, report)
    cluster = prices.cluster
    seconds = [cluster.curve(link, collective).seconds(1e6) for link in Link for collective in Collective]
    kept = (
        training.totals(), training.ranks(), training.phases(), training.exposed(), training.accesses_per_step(4),
        training.step_seconds(), (training.step_times.at_version(0) or (0.0,))[0], training.timeline.intervals(),
        slow.totals(), seconds,
    )  # fmt: skip
    wrong = {where: value for where, value in numbers(kept).items() if not math.isfinite(value) or value < 0}
    assert wrong == {}


def test_sums_of_slow_memory_stop_before_they_overflow() -> None:
    monitor = SlowMemoryMonitor(1)
    most = SlowMemoryReport(tuple(SlowTableReport(0, *[2**53] * 4) for _ in range(256)))
    for _ in range(5):
        monitor.add(replace(step_report(1.0), slow_memory=most))
    totals = monitor.totals()
    assert totals is not None
    assert (totals.by_table[0] == 2**62).all()
