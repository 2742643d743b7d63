"""``state_dict`` of a collection: the home rows of one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexd
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from tests.support import local_state_jobs
from tests.support.collection_jobs import random_placement
from tests.support.plain_tables import pair
from tests.support.rank_pool import RankPool


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


Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("nodes", "local_ranks"), [(2, 2), (3, 2)])
def test_a_checkpoint_of_home_rows_restores_everything(
    ranks: Ranks, nodes: int, local_ranks: int, pending: bool
) -> None:
    layout = RankLayout(nodes, local_ranks)
    first, second = (Placement.empty().delta_to(random_placement(seed, 30)) for seed in (1, 2))
    results = ranks(layout.world_size).run(local_state_jobs.save_and_load, layout, first, second, pending)
    for result in results:
        assert result["replicas"] > 0
        assert result["lookups_right"]
        assert all(result["bit_equal"])
        assert pending or result["difference"] < 1e-12
