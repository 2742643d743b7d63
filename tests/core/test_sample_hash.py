"""Hashes of samples are the same in numpy, in Python and in the kernels, and spread evenly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.tap_counts import mixed, mixed_one
from flexd.sketch.coaccess import _mix


@given(st.integers(-(2**63), 2**63 - 1))
def test_all_forms_agree(value: int) -> None:
    expected = mixed_one(value)
    assert int(mixed(np.array([value]))[0]) == expected
    with np.errstate(over="ignore"):
        assert int(_mix.py_func(np.uint64(value % 2**64))) == expected


def test_draws_are_uniform() -> None:
    draws = mixed(np.arange(100_000)) / 2.0**64
    counts = np.bincount((draws * 20).astype(int), minlength=20)
    assert np.abs(counts - 5_000).max() < 5 * np.sqrt(5_000)
