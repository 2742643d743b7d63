"""Prices of samples by node against counting what crosses, one sample moved at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.dealing import deal_batch
from flexd.core.shared_rows import BatchPrices, BatchRows
from tests.core.test_dealing import batch_of, counted


@given(
    seed=st.integers(0, 10_000), nodes=st.integers(1, 5), samples=st.integers(0, 40), rows=st.integers(1, 60),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_loss_is_what_moving_one_sample_adds_to_what_crosses(seed: int, nodes: int, samples: int, rows: int) -> None:
    batch = batch_of(seed, nodes, 1, samples, rows)
    to = np.random.default_rng(seed).integers(0, nodes, samples)
    prices = BatchPrices.of(batch, nodes)
    now = counted(batch, to)
    assert prices.bytes_of(to) == now
    losses = prices.with_share(to, 0.0).losses(to)
    for sample in range(samples):
        for node in np.flatnonzero(np.arange(nodes) != to[sample]):
            moved = to.copy()
            moved[sample] = node
            assert losses[node, sample] == 64 * (counted(batch, moved) - now)


def test_with_a_share_more_samples_of_a_node_make_a_row_cheaper() -> None:
    """Three samples of a row at home in node 0 are in nodes 1, 1 and 2; what one more costs falls by half each time."""
    batch = BatchRows(
        offsets=np.arange(4), rows=np.zeros(3, dtype=np.int64), row_bytes=np.full(3, 100),
        homes=np.zeros(3, dtype=np.int64), node=np.array([1, 1, 2]), group=np.zeros(3, dtype=np.int64),
    )  # fmt: skip
    losses = BatchPrices.of(batch, 3).with_share(batch.node, 0.5).losses(batch.node)
    np.testing.assert_array_equal(losses[0, :3], [-3200, -3200, -6400])
    assert losses[2, 0] == 3200 - 3200  # the second of node 1, and there
    assert losses[1, 2] == 1600 - 6400


def test_rows_that_many_samples_of_every_node_use_are_left_out() -> None:
    """Forty rows have a sample in each node, one row has all of them; all are at home in node 0."""
    rng = np.random.default_rng(0)
    rare = np.stack([rng.permutation(40), rng.permutation(40)], axis=1).reshape(-1)
    batch = BatchRows(
        offsets=np.arange(81) * 2, rows=np.stack([rare, np.full(80, 50)], axis=1).reshape(-1),
        row_bytes=np.full(160, 100), homes=np.zeros(160, dtype=np.int64), node=np.arange(80) % 2,
        group=np.zeros(80, dtype=np.int64),
    )  # fmt: skip
    prices = BatchPrices.of(batch, 2)
    priced = prices.with_share(batch.node, 0.0)
    assert (len(prices.shared.away_bytes), len(priced.shared.away_bytes)) == (41, 40)
    assert (len(prices.shared.first_codes), len(priced.shared.first_codes)) == (160, 80)
    kept = prices.with_share((np.arange(80) < 3).astype(np.int64), 0.0)
    assert len(kept.shared.away_bytes) == 41, "three samples of a node may leave it"
    dealt = deal_batch(batch, 2)
    assert dealt.bytes_after < 0.75 * dealt.bytes_before


@pytest.mark.parametrize("row_bytes", [100, 1 << 24, 1 << 30])
@pytest.mark.parametrize("step", [1, 1 << 40, 1 << 58])
def test_dealing_does_not_depend_on_how_large_rows_and_their_numbers_are(row_bytes: int, step: int) -> None:
    group = np.random.default_rng(1).permutation(np.arange(32) % 2)
    batch = BatchRows(
        offsets=np.arange(33) * 5, rows=step * (group[:, None] * 10 + np.arange(5)).reshape(-1),
        row_bytes=np.full(160, row_bytes), homes=np.repeat(group, 5), node=np.arange(32) % 2,
        group=np.zeros(32, dtype=np.int64),
    )  # fmt: skip
    dealt = deal_batch(batch, 2)
    np.testing.assert_array_equal(dealt.to, group)
    assert (dealt.bytes_before, dealt.bytes_after) == (10 * row_bytes, 0)
