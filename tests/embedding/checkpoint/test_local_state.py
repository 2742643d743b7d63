"""``state_dict`` of a collection: the home rows of one rank."""

from __future__ import annotations

import pytest
import torch

import flexd
from tests.support.plain_tables import pair


def test_unequal_state_dicts_are_refused() -> None:
    collection, _ = pair()
    saved = collection.state_dict()
    other = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 20, 4, dtype="float64"), flexd.EmbeddingTable("b", 3, 2)]
    )
    with pytest.raises(RuntimeError, match="with other tables"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="saved by rank 1 of 4, loaded by rank 0 of 1"):
        collection.load_state_dict({**saved, "rank0.shard": torch.tensor([1, 4, int(saved["rank0.shard"][2]), 0])})
    with pytest.raises(RuntimeError, match=r"rank0\.group0\.rows: shape \(3, 4\)"):
        collection.load_state_dict({**saved, "rank0.group0.rows": torch.zeros(3, 4)})
    of_another = {key.replace("rank0", "rank2"): value for key, value in saved.items()}
    of_another["rank2.shard"] = torch.tensor([2, 3, *saved["rank0.shard"][2:].tolist()])
    with pytest.raises(RuntimeError, match="saved by rank 2 of 3, loaded by rank 0 of 1"):
        collection.load_state_dict(of_another)
    for key in saved:
        with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
            collection.load_state_dict({name: value for name, value in saved.items() if name != key})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rank0\.group1\.rows"):
        collection.load_state_dict({**saved, "rank0.group1.rows": torch.zeros(1)})
    collection.load_state_dict({"rank0.group0.rows": saved["rank0.group0.rows"] + 1}, strict=False)
    assert torch.equal(collection.gather_table("item"), saved["rank0.group0.rows"] + 1)
