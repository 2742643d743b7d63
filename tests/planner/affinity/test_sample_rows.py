"""Samples as rows that occur together."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.planner.affinity.sample_rows import SampleRows


def test_rows_of_a_sample_are_distinct_and_keep_their_keys():
    samples = SampleRows.of(np.array([0, 0, 2, 0, 2]), np.array([70, 5, 5, 70, 9]), 4)
    assert samples.keys.tolist() == [5, 9, 70]
    assert samples.lengths.tolist() == [2, 0, 2, 0]
    rows = np.split(samples.keys[samples.rows], samples.offsets[1:-1])
    assert [row.tolist() for row in rows] == [[5, 70], [], [5, 9], []]
    assert samples.samples.tolist() == [0, 0, 2, 2]
    assert samples.matrix().toarray().tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_chosen_samples_in_that_order_with_only_their_keys():
    samples = SampleRows.of(np.array([0, 0, 1, 2]), np.array([3, 4, 5, 4]))
    chosen = samples.select(np.array([2, 0])).compact()
    assert chosen.keys.tolist() == [3, 4]
    assert chosen.matrix().toarray().tolist() == [[0, 1], [1, 1]]


def test_samples_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="equal length"):
        SampleRows.of(np.zeros(2, dtype=np.int64), np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="of 2"):
        SampleRows.of(np.array([0, 2]), np.array([1, 1]), 2)
    with pytest.raises(ValueError, match="-1"):
        SampleRows.of(np.array([-1, 0]), np.array([1, 1]))
