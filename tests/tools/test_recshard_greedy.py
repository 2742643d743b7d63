"""RecShard's split: near the best of all placements and splits, within the memory of every rank."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tools.bench.peers.recshard import place_and_split

ROWS = np.array([0.0, 1.0, 4.0, 16.0])
"""Fast bytes by split: convex, as the inverse of a CDF is."""


def problem(tables: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.5, 2.0, tables)
    fast = size[:, None] * ROWS
    seconds = rng.pareto(1.0, tables)[:, None] * np.linspace(1.0, 0.02, len(ROWS))
    return seconds, fast


@pytest.mark.parametrize("room", [2.0, 8.0, 30.0])
def test_greedy_is_near_the_best_of_all(room: float) -> None:
    over = []
    for seed in range(8):
        seconds, fast = problem(4, seed)
        best = np.inf
        for rank in product(range(2), repeat=4):
            for split in product(range(len(ROWS)), repeat=4):
                at = (np.arange(4), np.array(split))
                load, used = (np.bincount(rank, weights=values[at], minlength=2) for values in (seconds, fast))
                if used.max() <= room:
                    best = min(best, load.max())
        found = place_and_split(seconds, fast, 2, room)
        at = (np.arange(4), found[1])
        assert np.bincount(found[0], weights=fast[at], minlength=2).max() <= room
        over.append(np.bincount(found[0], weights=seconds[at], minlength=2).max() / best)
    assert min(over) >= 1 - 1e-9
    assert np.mean(over) < 1.1
