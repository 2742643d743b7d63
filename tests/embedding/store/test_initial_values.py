"""Initial rows are a function of seed, table, row and column."""

from __future__ import annotations

import numpy as np
import torch

from flexd.embedding.store.initial_values import initial_rows


def test_initial_rows_depend_on_the_row_alone() -> None:
    whole = initial_rows("item", np.arange(70_000), 3, torch.float32, scale=0.5, seed=7)
    some = np.random.default_rng(1).permutation(70_000)[:500]
    assert torch.equal(initial_rows("item", some, 3, torch.float32, scale=0.5, seed=7), whole[some])
    assert float(whole.min()) >= -0.5
    assert float(whole.max()) < 0.5
    assert abs(float(whole.mean())) < 0.01
    assert abs(float(whole.std()) - 0.5 / 3**0.5) < 0.01


def test_initial_rows_differ_between_seeds_and_tables() -> None:
    """No row occurs at another place either."""
    drawn = [
        initial_rows(table, np.arange(200), 2, torch.float64, scale=1.0, seed=seed)
        for table, seed in (("item", 0), ("item", 1), ("shop", 0))
    ]
    distinct = torch.unique(torch.cat(drawn), dim=0)
    assert len(distinct) == 600
    assert len(torch.unique(drawn[0])) == 400, "columns differ"
