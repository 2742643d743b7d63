"""Fast memory over misses: less memory never misses less, and all of it misses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.planner.memory.miss_curve import SHARES, MissCurve, memory_points


def test_less_memory_saves_bytes_and_costs_misses() -> None:
    rows = 2000
    touches = 1 / np.arange(1, rows + 1)
    curves = [MissCurve(touches, np.ones(rows), rows, 100), MissCurve(touches[:500], np.ones(500), 800, 300)]
    points = memory_points(curves, 1e-4)
    whole = 2000 * 100 + 800 * 300
    assert [point.share for point in points] == list(SHARES)
    assert all(point.fast_bytes <= point.share * whole for point in points)
    assert all(point.fast_bytes + point.saved_bytes == whole for point in points)
    missed = [point.missed_rows for point in points]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > 1
    assert missed[-1] == 0
    used = touches.sum() + touches[:500].sum()
    for point in points:
        assert point.stall_seconds == pytest.approx(1e-4 * point.missed_rows)
        assert point.missed_share == pytest.approx(point.missed_rows / used)
