"""When a snapshot is due. What it holds, and the order of its steps, is in ``test_ingestor_snapshots.py``."""

from __future__ import annotations

import time

import pytest

from flexd.ingest.snapshot_cycle import SnapshotCycle


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def cycle() -> SnapshotCycle:
    return SnapshotCycle(None, 30.0, dict, background=False)


def test_a_second_start_does_not_put_a_snapshot_off(now: list[float]) -> None:
    """The thread starts again after a fault: a fault every few seconds would leave the job without a snapshot."""
    made = cycle()
    made.start()
    for _ in range(3):
        now[0] += 10.0
        made.start()
    assert made.is_due()
