"""``state_dict`` of a collection: the home rows of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.row_optimizers import RowWiseAdagrad
from tests.support.collection_jobs import ROWS, everything, loss_of, offer, random_placement, some, tables, train_step
from tests.support.plain_tables import pair
from tests.support.rank_pool import RankPool


def look_everything_up(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {name: jagged.values.numpy() for name, jagged in collection(everything()).items()}


def save_and_load(rank: int, layout: RankLayout, first: Delta, second: Delta, pending: bool) -> dict[str, Any]:
    """Train, save, load into a collection with other values and another placement, and continue with both."""

    def make(seed: int, delta: Delta) -> EmbeddingCollection:
        made = EmbeddingCollection(
            tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=[40, 23, 3], seed=seed
        )
        offer(made, delta)
        for step in range(3):
            train_step(made, some(seed, step, rank))
        return made

    old, new = make(1, first), make(2, second)
    saved = old.state_dict()
    pending_loss = loss_of(new(some(5, 0, rank))) if pending else None
    new.load_state_dict(saved)
    looked_up, expected = look_everything_up(new), look_everything_up(old)
    equal = [new.replicas_bit_equal()]
    if pending_loss is not None:
        pending_loss.backward()
        new.optimizer.step()
        equal.append(new.replicas_bit_equal())
    for step in range(3):
        for collection in (old, new):
            train_step(collection, some(3, step, rank))
        equal.append(new.replicas_bit_equal())
    tier = new.engine.migrator.placement()[1]
    return {
        "lookups_right": all(np.array_equal(looked_up[name], expected[name]) for name in ROWS),
        "bit_equal": equal, "replicas": len(tier),
        "difference": max(
            float((old.gather_table(name) - new.gather_table(name)).abs().max()) for name in ROWS
        ),
    }  # fmt: skip


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
    results = ranks(layout.world_size).run(save_and_load, layout, first, second, pending)
    for result in results:
        assert result["replicas"] > 0
        assert result["lookups_right"]
        assert all(result["bit_equal"])
        assert pending or result["difference"] < 1e-12
