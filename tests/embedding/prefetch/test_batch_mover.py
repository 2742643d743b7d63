"""Batches are moved to the device of the tables: what is in them, what stays, and by whom."""

from __future__ import annotations

import pytest
import torch

import flexd
from flexd.core.layout import RankLayout


class OnDisk:
    """A batch that becomes ids only when it is moved."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def to(self, device: torch.device, non_blocking: bool) -> dict[str, flexd.Jagged]:
        assert non_blocking
        if not self.ids:
            raise OSError("nothing to move")
        values = torch.tensor(self.ids, device=device)
        return {"item": flexd.Jagged(values, torch.tensor([len(self.ids)], device=device))}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_loop_moves_each_batch_and_looks_it_up_ahead(depth: int) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    plain = collection.gather_table("item").clone()
    given = [[1, 2], [3], [2, 2, 9]]
    read = 0
    for ids, batch in zip(
        given, flexd.prefetch([OnDisk(ids) for ids in given], collection, to_device=True, depth=depth), strict=True
    ):
        assert torch.equal(collection(batch)["item"].values, plain[torch.tensor(ids)])
        read += 1
    assert read == 3
