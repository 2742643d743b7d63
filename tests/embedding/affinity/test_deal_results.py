"""What the rank that deals sends to each rail and node."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.dealing import Dealt
from flexd.core.shared_rows import BatchRows
from flexd.embedding.affinity.deal_results import DealResults


@pytest.mark.parametrize("nodes", [2, 3, 300])
def test_each_rank_reads_its_rail_and_what_arrives_at_it(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    samples = rng.integers(0, 5, (3, nodes))
    samples[1] = 0
    node = np.repeat(np.tile(np.arange(nodes), 3), samples.reshape(-1))
    group, none = np.repeat(np.arange(3), samples.sum(axis=1)), np.empty(0, dtype=np.int64)
    ship, to = rng.integers(1, 1 << 31, len(node)), rng.integers(0, nodes, len(node))
    results = DealResults(nodes, samples)
    packed = results.pack(BatchRows(none, none, none, none, node, group, ship), Dealt(to, 7, 5, 1 << 40))
    at = 0
    for rail in range(3):
        for receiver in range(nodes):
            message = packed[at : at + results.message_bytes(rail)]
            at += len(message)
            read = results.unpack(message, rail)
            assert (read.bytes_before, read.bytes_after, read.shipped_bytes) == (7, 5, 1 << 40)
            assert read.shipped_samples == np.count_nonzero(to != node)
            np.testing.assert_array_equal(read.to, to[group == rail])
            come = (group == rail) & (to == receiver) & (node != receiver)
            np.testing.assert_array_equal(read.arriving_bytes, np.bincount(node[come], ship[come], nodes))
    assert at == len(packed)
