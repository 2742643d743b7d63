"""What affinity sends, counted, and where it says "not here"."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import WireBytes, choose_affinity, crossing_rows, rule_nodes, traffic
from flexd.planner.affinity.users import assign_users

LAYOUT, WIRE = RankLayout(2, 2), WireBytes(row=520.0)


def drawn(groups: int, rows: int, samples: int = 2560, length: int = 8) -> tuple[SampleRows, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    group = rng.integers(0, groups, samples)
    keys = rng.permutation(groups * rows)[group[:, None] * rows + rng.integers(0, rows, (samples, length))]
    return SampleRows.of(np.repeat(np.arange(samples), length), keys.reshape(-1)), np.arange(samples) // 64, group


def test_rows_that_cross_are_counted_once_a_node_and_batch():
    samples = SampleRows.of(np.array([0, 0, 1, 1, 2, 3]), np.array([0, 2, 0, 2, 0, 0]))
    batch, to = np.array([0, 0, 0, 1]), np.array([1, 0, 1, 1])
    # Key 0 is at home in node 0, key 2 in node 1: batch 0 sends 0 to node 1 and 2 to node 0, batch 1 sends 0 to node 1.
    assert crossing_rows(samples, batch, to, np.array([0, 1]), 2) == 3
    assert rule_nodes(np.array([0, 1, 2, 3, 4]), LAYOUT).tolist() == [0, 0, 1, 1, 0]


def test_groups_pay_and_the_expectation_is_what_later_batches_send():
    window, batch, _ = drawn(16, 60)
    first = np.flatnonzero(batch < 30)
    after = np.flatnonzero(batch >= 30)
    known = window.select(first).compact()
    choice = choose_affinity(known, batch[first], LAYOUT, WIRE)
    sent = traffic(window.select(after).compact(), batch[after] - 30, choice.homes, LAYOUT, WIRE)
    assert choice.pays()
    assert choice.pays(loader_deals=True)
    assert choice.expected is not None
    assert sent.bytes_ratio < 0.5
    assert sent.bytes_ratio == pytest.approx(choice.expected.bytes_ratio, abs=0.07)
    assert sent.loader_ratio < sent.rows_ratio < sent.bytes_ratio
    assert sent.shipped_bytes == pytest.approx(sent.shipped_samples * 64 + 4 * 8 * sent.shipped_samples, rel=0.1)


def test_large_batches_of_a_small_catalogue_do_not_pay():
    window, batch, _ = drawn(1, 8)
    choice = choose_affinity(window, batch, LAYOUT, WIRE)
    assert choice.expected is not None
    assert choice.expected.bytes_ratio > 0.98
    assert not choice.pays()
    assert not choice.pays(loader_deals=True)


def test_few_batches_do_not_pay():
    window, _, _ = drawn(16, 60, 64)
    choice = choose_affinity(window, np.zeros(64, dtype=np.int64), LAYOUT, WIRE)
    assert choice.expected is None
    assert not choice.pays()


def test_samples_without_rows_that_win_are_trained_where_they_are_read_as_far_as_numbers_are_equal():
    window, batch, _ = drawn(16, 60, 256)
    none = NodeHomes(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2), np.float32), 0.0, 0)
    dear = WireBytes(row=1e-6)
    sent = traffic(window, batch, none, LAYOUT, dear)
    # Each of 16 ranks and batches reads 16 samples, 8 of which every node trains.
    assert sent.shipped_samples == 256 // 2


def test_users_go_to_the_node_of_their_rows_in_equal_numbers_of_samples():
    window, batch, group = drawn(16, 60)
    homes = choose_affinity(window, batch, LAYOUT, WIRE).homes
    rule = rule_nodes(window.keys, LAYOUT)
    ids, node = assign_users(window, group * 10, homes, rule, slack=0.1)
    assert ids.tolist() == (np.arange(16) * 10).tolist()
    at = node[group]
    assert np.bincount(at, minlength=2).max() <= 1.1 * len(window) / 2
    by_user = crossing_rows(window, batch, at, homes.home_of(window.keys, rule), 2)
    assert by_user < 0.2 * crossing_rows(window, batch, np.arange(len(window)) % 2, rule, 2)
