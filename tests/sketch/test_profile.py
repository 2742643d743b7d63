"""Source nodes of accesses: shares by node and the affinity of a table."""

import numpy as np
import pytest

from flexd.core.placement import RankLayout
from flexd.sketch.profile import read_sources

LAYOUT = RankLayout(4, 2)


def _accesses(n: int, rows: int, local_share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw Zipf accesses; a share of each row's comes from the node ``row % nodes``, the rest from any rank."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, rows + 1) ** -1.05
    row = rng.choice(rows, n, p=weights / weights.sum())
    anywhere = rng.integers(0, LAYOUT.world_size, n)
    own = (row % LAYOUT.nodes) * LAYOUT.local_ranks + rng.integers(0, LAYOUT.local_ranks, n)
    return row.astype(np.int64), np.where(rng.random(n) < local_share, own, anywhere).astype(np.int32)


@pytest.mark.parametrize("local_share", [0.0, 0.5, 1.0])
def test_affinity_is_unbiased(local_share: float) -> None:
    """Two accesses of a row agree with probability (s + (1-s)/N)^2 + (N-1) ((1-s)/N)^2, which is s^2 above chance."""
    figures = []
    for seed in range(30):
        row, rank = _accesses(4_000, 3_000, local_share, seed)
        figures.append(read_sources(row, rank, np.arange(100), LAYOUT))
    affinity = np.array([figure.affinity for figure in figures])
    assert affinity.mean() == pytest.approx(local_share**2, abs=4 * affinity.std(ddof=1) / np.sqrt(30) + 2e-3)
    if local_share < 1:
        assert affinity.std() > 0
    else:
        assert affinity == pytest.approx(np.ones(30))


def test_shares_of_a_row_follow_its_accesses_and_fall_back_on_the_mix() -> None:
    row, rank = _accesses(60_000, 500, 0.7)
    sources = read_sources(row, rank, np.array([3, 0, 400, 9_999]), LAYOUT)
    share = sources.share(np.array([1, 0, 3, 1]))
    assert (share.dtype, share.sum(axis=1)) == (np.float32, pytest.approx(np.ones(4)))
    assert np.array_equal(share[0], share[3])
    expected = np.full(4, 0.3 / 4)
    assert share[0] == pytest.approx(expected + 0.7 * (np.arange(4) == 0), abs=0.02), "row 0 is of node 0"
    assert share[1] == pytest.approx(expected + 0.7 * (np.arange(4) == 3), abs=0.03), "row 3 is of node 3"
    assert share[2] == pytest.approx(sources.node_share), "a row never sampled has the table's mix"
    assert (np.diff(sources.hot_position) >= 0).all()
    assert sources.node_share == pytest.approx(np.bincount(rank // 2, minlength=4) / 60_000)


def test_sources_are_read_under_another_layout_than_they_were_sampled() -> None:
    row, rank = _accesses(30_000, 300, 1.0)
    four, two = read_sources(row, rank, np.arange(5), LAYOUT), read_sources(row, rank, np.arange(5), RankLayout(2, 4))
    assert (four.nodes, two.nodes) == (4, 2)
    assert two.share(np.arange(5))[:, 0] == pytest.approx(four.share(np.arange(5))[:, :2].sum(axis=1), abs=0.01)
    fewer = read_sources(row, rank, np.arange(5), RankLayout(2, 2))
    assert fewer.node_share == pytest.approx(np.bincount(rank[rank < 4] // 2, minlength=2) / (rank < 4).sum())
    one = read_sources(row, rank, np.arange(5), RankLayout(1, 8))
    assert one.affinity == 0.0
    assert np.array_equal(one.share(np.arange(5)), np.ones((5, 1), dtype=np.float32))


def test_sources_of_few_or_no_accesses() -> None:
    nothing = read_sources(np.empty(0, np.int64), np.empty(0, np.int32), np.arange(3), LAYOUT)
    assert np.isnan(nothing.affinity)
    assert nothing.share(np.arange(3)).shape == (3, 4)
    assert np.isfinite(nothing.share(np.arange(3))).all()
    once = read_sources(np.arange(50), np.zeros(50, np.int32), np.arange(3), LAYOUT)
    assert np.isnan(once.affinity), "no row was seen twice"
    one_node = read_sources(np.zeros(50, np.int64), np.zeros(50, np.int32), np.arange(3), LAYOUT)
    assert one_node.affinity == 0.0, "all rows come from the same node: nothing sets them apart"
