"""Bags of the pooled demo, and the bytes of its calculated peer."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.demo.models import CLASSES, bags_of, reduce_scatter_bytes
from flexd.stream.batches import Batch


def test_bags_have_all_events_but_the_newest_of_each_sample() -> None:
    # Two samples in order of time: (a 5, b 70, a 6) and (b 71, a 7).
    batch = Batch(
        ids=(np.array([5, 6, 7]), np.array([70, 71])),
        lengths=(np.array([2, 1]), np.array([1, 1])),
        order=np.array([0, 3, 1, 4, 2]),
        sequence_lengths=np.array([3, 2]),
        seconds=0.0,
    )
    features, labels = bags_of(batch, ("a", "b"))
    assert features["a"].values.tolist() == [5]
    assert features["a"].lengths.tolist() == [1, 0]
    assert features["b"].values.tolist() == [70, 71]
    assert features["b"].lengths.tolist() == [1, 1]
    assert labels.tolist() == [6 % CLASSES, 7 % CLASSES]


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(4, 2), RankLayout(1, 4)])
def test_reduce_scatter_counts_as_a_ring_does(layout: RankLayout) -> None:
    ids, batch_size, tables, row_bytes = 1200, 10, 3, 128
    world = layout.world_size
    whole = world * batch_size * tables * row_bytes  # what each rank gives to the reduce-scatter
    each_rank = whole * (world - 1) / world * layout.nodes / world * (layout.nodes > 1)
    far_ids = 8 * ids * (world - layout.local_ranks) / world
    found = reduce_scatter_bytes(ids, batch_size, tables, row_bytes, layout)
    assert found == pytest.approx(far_ids + 2 * world * each_rank)
