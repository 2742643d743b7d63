"""Misses by frames that a rank learns from its own uses, beside those of frame tables of these sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexd.embedding.store.slow.frame_table import FrameTable
from flexd.embedding.store.slow.half_life import HalfLife

CPU = torch.device("cpu")


def drawn(rows: int, uses: int, exponent: float, steps: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    share = np.arange(1, rows + 1) ** -exponent
    order = rng.permutation(rows)
    return [
        torch.from_numpy(np.unique(order[rng.choice(rows, uses, p=share / share.sum())])) for _ in range(steps)
    ]  # fmt: skip


def replayed(batches: list[torch.Tensor], rows: int, frames: int, counted_from: int) -> float:
    """Return the misses of a step by a frame table."""
    table, half_life = FrameTable(frames, rows, CPU, half_life=1.0), HalfLife(frames, rows, CPU)
    kept = torch.full((rows,), -math.inf, dtype=torch.float64)
    missed = 0
    for step, slots in enumerate(batches):
        arrivals = table.bring(slots)
        kept[arrivals.evicted_slots] = arrivals.evicted_counts
        come = arrivals.missing
        table.remember(arrivals.frames[come], kept[slots[come]])
        table.use(arrivals.frames, half_life.use(slots, 0))
        table.changed(arrivals.frames)
        table.release(arrivals.frames)
        missed += len(come) * (step >= counted_from)
    return missed / (len(batches) - counted_from)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_the_curve_is_what_frame_tables_of_these_sizes_miss(exponent: float) -> None:
    rows, steps = 4_000, 400
    batches = drawn(rows, 200, exponent, steps)
    half_life = HalfLife(800, rows, CPU)
    for step, slots in enumerate(batches):
        if step == steps // 2:
            half_life.ranks.curve(step, 0.0, 100)
        half_life.use(slots, 0)
    curve = half_life.ranks.curve(steps // 2, 0.5, 100)
    assert (np.diff(curve.saved) <= 0).all()
    assert curve.frames.sum() == pytest.approx(rows)
    distinct = float(np.mean([len(slots) for slots in batches]))
    for frames in (400, 800, 1_600):
        measured = replayed(batches, rows, frames, steps // 2)
        assert curve.misses(frames) == pytest.approx(measured, rel=0.2, abs=0.03 * distinct), frames


def test_rows_that_appear_for_the_first_time_promise_nothing() -> None:
    half_life = HalfLife(100, 10_000, CPU)
    for step in range(50):
        half_life.use(torch.arange(100) + 100 * step, 0)
    curve = half_life.ranks.curve(50, 0.5, 100)
    # A frame for each row of a step is used again by the update alone.
    assert curve.misses(100) - curve.misses(5_000) < 0.02 * curve.misses(100)
    assert curve.cold == pytest.approx(100, rel=0.05)
