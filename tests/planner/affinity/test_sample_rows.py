"""Samples as rows that occur together."""

from __future__ import annotations

import numpy as np

from flexd.planner.affinity.sample_rows import SampleRows


def test_chosen_samples_in_that_order_with_only_their_keys():
    samples = SampleRows.of(np.array([0, 0, 1, 2]), np.array([3, 4, 5, 4]))
    chosen = samples.select(np.array([2, 0])).compact()
    assert chosen.keys.tolist() == [3, 4]
    assert chosen.matrix().toarray().tolist() == [[0, 1], [1, 1]]
