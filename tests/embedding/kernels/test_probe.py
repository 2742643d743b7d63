"""A run of measurements: budget, the shortest turn, distinct rows, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexd.embedding.kernels import probe
from flexd.embedding.kernels.probe import KernelBudget, measure_kernels
from flexd.topology.kernel_design import KernelRange, designed_sets

LIMITS = KernelRange(memory_bytes=2**20, max_ids=2**10, max_numbers=2**14)
CPU = torch.device("cpu")


class Sleepless:
    """Kernels whose phases take given seconds, turn by turn."""

    name = "none"

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.calls = seconds, 0

    def phases(self, tables, ids):
        def phase() -> None:
            self.calls += 1

        return [phase] * 2


def test_sets_are_measured_in_their_order_with_their_distinct_rows() -> None:
    measured = measure_kernels(Sleepless([]), designed_sets(LIMITS), CPU, KernelBudget(60, 6))
    assert len(measured.sets) == 6
    assert measured.kernels == "none"
    for one in measured.sets:
        assert (one.distinct >= 1).all()
        assert (one.distinct <= np.minimum(one.ids, one.rows)).all()
    assert "6 sets" in measured.source


def test_the_shortest_turn_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of each pass the first turn is not counted; the least of all others is in the second pass.
    turns = iter([0.001, 0.05, 0.02, 0.03, 0.001, 0.04, 0.06, 0.01, 0.002, 0.05, 0.05, 0.05])

    class Clock:
        name = "given"

        def __init__(self, device: torch.device) -> None:
            self.values: list[float] = []

        def seconds(self, work) -> float:
            work()
            if not self.values:
                self.values = [next(turns) / 2] * 2
            return self.values.pop()

    monkeypatch.setattr(probe, "KernelClock", Clock)
    measured = measure_kernels(Sleepless([]), designed_sets(LIMITS), CPU, KernelBudget(60, 1))
    assert measured.update_seconds[0] == pytest.approx(0.01 / 2)
    assert "3 turns in each of 3 passes" in measured.source
