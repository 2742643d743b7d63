"""Touched rows compared with sets: all ranks of an exchange in one process."""

from __future__ import annotations

import numpy as np
import torch

from flexd.embedding.replicas import touched_rows as row_bits
from flexd.embedding.replicas.replica_sums import SumLists
from flexd.embedding.replicas.touched_rows import SyncList

CPU = torch.device("cpu")


def test_a_list_gathers_and_scatters_its_rows() -> None:
    """Two peers and two dim-groups, of blocks that lie anywhere; both peers have one of them."""
    blocks = [[np.array([0, 2]), np.array([3])], [np.array([2]), np.array([], dtype=np.int64)]]
    rows = SyncList(blocks, 5 * 64, CPU)
    entries = row_bits.none_set(5 * 64, CPU)
    chosen = [1, 63, 2 * 64 + 5, 3 * 64, 3 * 64 + 63, 4 * 64]
    row_bits.mark(entries, torch.tensor([*chosen, 1, 5 * 64]))
    bits = rows.gather(entries)
    assert rows.words == [3, 1]
    lists = SumLists.of([(rows, [True, True]), (rows, [False, True])])
    expected = [1, 63, 2 * 64 + 5, 2 * 64 + 5, 3 * 64, 3 * 64 + 63, 3 * 64, 3 * 64 + 63]
    counts = [3, 1, 2, 0, 0, 0, 2, 0]
    ordered, ones = lists.ordered_bits([bits, bits])
    found = lists.touched(ordered, sum(counts))
    assert (found.tolist(), ones.tolist()) == (expected, counts)
    assert [[peers for _, peers in part] for part in lists.by_part(found, counts)] == [
        [[3, 1], [2, 0]],
        [[0, 0], [2, 0]],
    ]
    assert [[some.tolist() for some, _ in part] for part in lists.by_part(found, counts)] == [
        [expected[:4], expected[4:6]], [[], expected[6:]],
    ]  # fmt: skip
    back = row_bits.none_set(5 * 64, CPU)
    row_bits.mark(back, torch.tensor([4 * 64 + 9]))
    rows.scatter(bits, back)
    assert row_bits.positions_of(back).tolist() == sorted({*expected, 4 * 64 + 9})
