"""The time of a step by phase."""

from __future__ import annotations

import pytest

from flexd.control.protocol.report import PhaseReport, StepPhase
from flexd.embedding.exchange import calls
from flexd.embedding.exchange.calls import PhaseMeter
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls.time, "perf_counter", clock)
    return clock


def taken(meter: PhaseMeter) -> tuple[dict[str, PhaseReport], float]:
    phases, cover = meter.drain()
    return {phase.phase: phase for phase in phases}, cover


def test_each_second_counts_once_in_the_innermost_phase(clock: Clock) -> None:
    meter = PhaseMeter()
    clock.now += 1
    with meter.phase(StepPhase.PUSH):
        clock.now += 2
        with meter.phase(StepPhase.SYNC):
            clock.now += 4
            meter.begin_collective()
            clock.now += 8
            meter.end_collective(leaves_node=True)
            meter.sent(5, 7)
        clock.now += 16
    clock.now += 32
    meter.begin_collective()
    found, cover = taken(meter)
    assert {name: phase.computed_seconds for name, phase in found.items() if phase.computed_seconds} == {
        "dense": 33, "push": 18, "sync": 4,
    }  # fmt: skip
    assert found["sync"] == PhaseReport(
        "sync", 4, exposed_seconds=8, inter_seconds=8, intra_bytes=5, inter_bytes=7, inter_collectives=1
    )
    assert cover == 0
    assert all(phase.computed_seconds == phase.exposed_seconds == 0 for phase in meter.drain()[0])


def test_collectives_beside_the_thread_are_exposed_as_far_as_it_waits(clock: Clock) -> None:
    meter = PhaseMeter()
    job = meter.beside = PhaseMeter(overlaps=True)
    meter.begin_job()
    clock.now += 6  # of both threads
    with job.phase(StepPhase.IDS):
        job.begin_collective()
        clock.now += 3
        job.end_collective(leaves_node=False)
    meter.begin_wait()
    with job.phase(StepPhase.ROWS):
        job.begin_collective()
        clock.now += 1
        job.end_collective(leaves_node=True)
    meter.end_wait()
    found, cover = taken(meter)
    assert found["dense"].computed_seconds == 9
    assert cover == 3, "nine seconds beside the job, of which it computed six itself"
    assert (found["ids"].overlapped_seconds, found["rows"].overlapped_seconds) == (3, 1)
    assert (found["ids"].exposed_seconds, found["rows"].exposed_seconds) == (0.75, 0.25)
