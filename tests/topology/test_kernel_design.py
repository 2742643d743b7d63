"""Which sets of tables are measured: limits, spread of every prefix, and ids by Zipf's law."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from flexd.topology.kernel_design import MAX_TABLES, KernelRange, designed_sets, drawn_ids
from flexd.topology.kernel_file import TableSet

LIMITS = KernelRange(memory_bytes=2**22, max_ids=2**12, max_numbers=2**16)


def test_sets_keep_the_limits() -> None:
    for one in islice(designed_sets(LIMITS), 300):
        assert 1 <= len(one.rows) <= MAX_TABLES
        assert (one.rows * (one.row_bytes + 4)).sum() <= LIMITS.memory_bytes
        # A set of many tables keeps a few bags.
        if one.bags[0] > 8:
            assert one.ids.sum() <= LIMITS.max_ids * 1.01
            assert (one.ids * one.dim).sum() <= LIMITS.max_numbers * 1.01
        assert (one.rows >= 1).all()
        assert (one.skew <= LIMITS.max_skew).all()


def test_a_prefix_is_spread_over_everything() -> None:
    sets = list(islice(designed_sets(KernelRange()), 60))
    tables = np.array([len(one.rows) for one in sets])
    assert 0.3 < (tables == 1).mean() < 0.5
    assert tables.max() > 20
    singles = [one for one in sets if len(one.rows) == 1]
    for name in ("rows", "bags", "skew"):
        values = np.array([getattr(one, name)[0] for one in singles])
        halves = values > (np.median(values) if name == "skew" else np.sqrt(values.min() * values.max()))
        assert 0.2 < halves.mean() < 0.8, name
    assert {one.dtype for one in sets} == {"float32", "float16"}


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.2])
def test_ids_follow_zipfs_law(skew: float) -> None:
    columns = (np.array([value], float) for value in (1000, 8, 200_000, 100, skew, 0))
    (ids,) = drawn_ids(TableSet("float32", *columns), np.random.default_rng(0))
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    assert ids.min() >= 0
    assert len(counts) == 1000
    law = np.arange(1, 1001.0) ** -skew
    wanted = law / law.sum() * 200_000
    # The most frequent row alone is off: the integral from 1 to 2 is not the term at 1.
    np.testing.assert_allclose(counts[10:400].sum(), wanted[10:400].sum(), rtol=0.15)
    assert counts[0] > (2 if skew else 0.5) * counts[40]
