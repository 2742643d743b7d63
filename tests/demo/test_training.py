"""The row-wise baseline, and the padding of the demo's model."""

import numpy as np
import pytest
import torch

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.demo.training import ID_BYTES, NextItem, right_aligned, row_wise_bytes
from flexd.stream.batches import Batch


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(3, 1), RankLayout(1, 4), RankLayout(2, 3)])
def test_row_wise_baseline_counts_as_a_loop_over_requests_does(layout: RankLayout) -> None:
    keyspace = KeySpace(
        [TableSpec("a", 40, 4, "float64"), TableSpec("b", 13, 6), TableSpec("c", 9, 4, "float64")], ["b"]
    )
    rng = np.random.default_rng(3)
    ids = tuple(rng.integers(0, table.rows, 30) for table in keyspace.tables)
    none = np.empty(0, dtype=np.int64)
    batch = Batch(ids, (none, none, none), none, none, 0.0)
    # Keys by hand: tables a and c share a group (dim and dtype), which stands before b's.
    offsets, row_bytes = (0, 40 + 9, 40), (32, 24, 32)
    for rank in range(layout.world_size):
        counted = {False: 0, True: 0}
        for table in range(3):
            for dedup in (False, True):
                for row in set(ids[table].tolist()) if dedup else ids[table].tolist():
                    home = (offsets[table] + row) % layout.world_size
                    if home // layout.local_ranks != rank // layout.local_ranks:
                        counted[dedup] += ID_BYTES + (1 if table == 1 else 2) * row_bytes[table]
        for dedup in (False, True):
            assert row_wise_bytes(keyspace, layout, batch, rank, dedup=dedup) == counted[dedup]


def test_padding_has_no_part_in_loss_or_gradient() -> None:
    torch.manual_seed(0)
    model = NextItem(4, 2, 3).double()
    rows = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    sequences, mask = right_aligned(rows, torch.arange(5), torch.tensor([2, 3]), width=4)
    loss = model(sequences, mask)
    assert torch.equal(model(sequences + torch.randn_like(sequences) * ~mask.unsqueeze(2), mask), loss)
    loss.backward()
    assert torch.isfinite(rows.grad).all()
    assert (rows.grad.abs().sum(dim=1) > 0).all()
