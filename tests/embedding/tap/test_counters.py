"""Ranks keep the same passes without agreement, in bounded memory, and send their distinct rows."""

from __future__ import annotations

import numpy as np
import torch

import flexd
from flexd.core import tap_counts
from flexd.embedding.tap.counters import PassSample
from tests.support.until import until


def test_a_tap_sends_the_distinct_rows_of_one_pass_in_so_many():
    collection = flexd.EmbeddingCollection([
        flexd.EmbeddingTable("item", 500, 4, features=("history", "target")), flexd.EmbeddingTable("shop", 50, 4)
    ])  # fmt: skip
    tap = flexd.Tap(collection, interval_seconds=1e9, interval_steps=64, touch_steps=4)
    tap.start()
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(64):
        history, target = random.integers(0, 500, 30), random.integers(0, 500, 5)
        ids = torch.from_numpy(history)
        features = {"history": flexd.Jagged(ids, torch.tensor([30])),
                    "target": flexd.Jagged(torch.from_numpy(target), torch.tensor([5])),
                    "shop": flexd.Jagged(torch.empty(0, dtype=torch.int64), torch.tensor([0]))}  # fmt: skip
        sum(part.values.sum() for part in collection(features).values()).backward()
        collection.optimizer.step()
        drawn.append(np.unique(np.concatenate([history, target])))
        ids.zero_()  # a loader may fill its buffers again
        with torch.no_grad():
            collection(features)  # evaluation has no number
    offered = until(tap.outbox.current, 20)
    sampled = tap_counts.decode(offered.payload).sampled
    assert sampled.tables == ("item", "shop")
    assert [each.number for each in sampled.passes] == [n for n in range(64) if PassSample(4, 1, 1).wants(n)]
    assert 8 <= len(sampled.passes) <= 24
    for each in sampled.passes:
        assert np.array_equal(each.rows[0], drawn[each.number])
        assert len(each.rows[1]) == 0
        assert each.accesses == (35, 0)
