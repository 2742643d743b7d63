"""Homes learnt from samples: groups are found, limits kept, moves paid for, equal inputs give equal homes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from flexd.planner.affinity.partition import (
    AffinityLimits,
    NodeHomes,
    choose_homes,
    learn_homes,
)
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import crossing_rows

NODES = 4


def grouped(samples: int, groups: int = 16, rows: int = 50, seed: int = 0) -> tuple[SampleRows, np.ndarray]:
    """Samples of 12 rows of one group each, the keys of the groups mixed."""
    rng = np.random.default_rng(seed)
    group = np.resize(np.arange(groups), samples)
    mixed = np.random.default_rng(99).permutation(groups * rows)
    row = mixed[group[:, None] * rows + rng.integers(0, rows, (samples, 12))]
    return SampleRows.of(np.repeat(np.arange(samples), 12), row.reshape(-1)), group


def test_planted_groups_are_found():
    window, _ = grouped(1280)
    batch = np.arange(1280) // 64
    rule = window.keys % NODES
    homes = learn_homes(window, batch, rule, NODES)
    # 12 rows of a sample by rule: three quarters are in other nodes.
    apart = crossing_rows(window, batch, np.arange(1280) % NODES, rule, NODES)
    # A division of the groups would have none.
    assert homes.crossing * 20 < 0.05 * apart
    assert np.bincount(homes.home, minlength=NODES).max() <= 1.05 * len(window.keys) / NODES + 1


def test_a_small_window_is_divided_as_well_as_an_exhaustive_search_divides_it():
    rng = np.random.default_rng(6)
    found = best = 0.0
    for _ in range(10):
        keys = rng.integers(0, 12, (10, 3))
        window = SampleRows.of(np.repeat(np.arange(10), 3), keys.reshape(-1))
        zero, rule = np.zeros(10, dtype=np.int64), np.zeros(len(window.keys), dtype=np.int64)
        limits = AffinityLimits(row_slack=9, load_slack=9, min_gain=0)

        def crossing(left: tuple[int, ...], window: SampleRows = window) -> float:
            to = np.isin(np.arange(10), left).astype(np.int64)
            used = np.zeros((len(window.keys), 2), dtype=np.bool_)
            used[window.rows, to[window.samples]] = True
            return float((used.sum(axis=1) - 1).sum())

        best += min(crossing(left) for left in itertools.combinations(range(10), 5))
        found += min(learn_homes(window, zero, rule, 2, replace(limits, seed=seed)).crossing for seed in range(8))
    assert found <= 1.15 * best + 1e-3


def test_learning_goes_on_from_homes_and_moves_only_what_pays():
    window, _ = grouped(1280)
    batch = np.arange(1280) // 64
    first = learn_homes(window, batch, window.keys % NODES, NODES)
    later, _ = grouped(1280, seed=1)
    held = first.home_of(later.keys, later.keys % NODES)
    kept = learn_homes(later, batch, held, NODES, AffinityLimits(min_gain=0.1), start=first)
    anew = learn_homes(later, batch, held, NODES, AffinityLimits(min_gain=0.1, seed=5))
    assert kept.moved <= 0.01 * len(later.keys) < anew.moved
    assert kept.crossing <= 0.2 + 1.05 * anew.crossing
    dear = learn_homes(later, batch, later.keys % NODES, NODES, AffinityLimits(min_gain=1e9))
    assert dear.moved == 0


def test_homes_keep_to_rows_and_load():
    rng = np.random.default_rng(7)
    touches = rng.random((4000, NODES), dtype=np.float32)
    touches[:, 0] += 0.5
    home = choose_homes(touches, np.arange(4000) % NODES, min_gain=0, row_slack=0.05, load_slack=0.1)
    assert np.bincount(home, minlength=NODES).max() <= 1.05 * 1000
    load = np.bincount(home, weights=touches.sum(axis=1), minlength=NODES)
    assert load.max() <= 1.1 * load.mean() + touches.sum(axis=1).max()
    free = choose_homes(touches, np.arange(4000) % NODES, min_gain=0, row_slack=9, load_slack=9)
    assert (free == touches.argmax(axis=1)).all()
    # Those that node 0 gave up are those that lose least.
    lost = touches[:, 0] - touches[:, 1:].max(axis=1)
    gave, kept = lost[(free == 0) & (home != 0)], lost[(free == 0) & (home == 0)]
    assert gave.mean() < 0.5 * kept.mean()


def test_keys_that_are_not_known_are_at_home_by_rule():
    homes = NodeHomes(np.array([4, 8]), np.array([1, 0]), np.full((2, 2), 0.25, dtype=np.float32), 0.0, 0)
    keys, rule = np.array([3, 4, 8, 9]), np.array([1, 0, 0, 0])
    assert homes.home_of(keys, rule).tolist() == [1, 1, 0, 0]
    assert homes.row_costs(keys, rule).tolist() == [[1, 0], [0.25, 0], [0, 0.25], [0, 1]]
    none = NodeHomes(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2), np.float32), 0.0, 0)
    assert none.home_of(keys, rule).tolist() == rule.tolist()
    assert none.row_costs(keys, rule).tolist() == [[1, 0], [0, 1], [0, 1], [0, 1]]
