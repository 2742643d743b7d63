"""Checkpoints of ``DistributedModelParallel``: to flexd and back, with equal losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, EmbeddingConfig

import flexd
from flexd.core.placement import RankLayout
from flexd.torchrec import FusedOptimizerState, ModelState, replace
from tests.support.collection_jobs import as_numpy, whole_state_dict
from tests.support.rank_pool import RankPool, error_of
from tests.support.torchrec_models import ROWS, Ranker, batch, every_second_row, make


def sharded(optimizer: str, world_size: int, columns: bool = False, kind: type[Ranker] = Ranker) -> Any:
    """Return the model under ``DistributedModelParallel``: row-wise and table-wise, or one table by columns."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    model = make(optimizer, weighted=False, kind=kind)
    fused = {"compute_kernel": "fused"}
    by_rows, by_table = row_wise(**fused), table_wise(rank=world_size - 1, **fused)
    divided = column_wise(ranks=list(range(world_size)), **fused) if columns else by_table
    modules: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sparse.embedding_bag_collection": (
            model.sparse.embedding_bag_collection, EmbeddingBagCollectionSharder(), {"user": by_rows, "shop": divided},
        ),
        "tags": (model.tags, EmbeddingBagCollectionSharder(), {"tag": by_rows}),
        "items": (model.items, EmbeddingCollectionSharder(), {"item": by_rows}),
        "words": (model.words, EmbeddingCollectionSharder(), {"word": by_table}),
    }  # fmt: skip
    plan = {
        path: construct_module_sharding_plan(
            module, tables, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
        )
        for path, (module, sharder, tables) in modules.items()
    }
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan=plan),
        sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    )


def train(model: Any, rank: int, first: int, steps: int, tables: Any = None) -> list[float]:
    """Train under ``DistributedModelParallel``, whose fused optimizer updates the rows in ``backward``, or with
    replaced ``tables``."""
    fused = set() if tables else set(model.fused_optimizer.params)
    parallel = DistributedDataParallel(model) if tables else model
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if name not in fused], lr=0.1)
    losses = []
    for step in range(first, first + steps):
        loss = parallel(*batch(step, rank, weighted=False))
        dense.zero_grad()
        loss.backward()
        dense.step()
        if tables:
            tables.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def there_and_back(rank: int, layout: RankLayout, optimizer: str, steps: int, folder: str) -> dict[str, Any]:
    """Train under TorchRec, move to flexd and back, and train another job that never moves.

    Each part begins from other values than those it loads.
    """
    expected = train(sharded(optimizer, layout.world_size), rank, 0, 3 * steps)

    before = sharded(optimizer, layout.world_size)
    losses = train(before, rank, 0, steps)
    dcp.save({"model": before, "optimizer": before.fused_optimizer}, checkpoint_id=f"{folder}/before")

    model = make(optimizer, weighted=False)
    tables = replace(model, layout=layout, replica_slots=[80, 40])
    for name in ROWS:
        tables.load_rows(name, 0, torch.zeros_like(tables.gather_table(name)))
    tables.engine.inbox.offer(1, every_second_row())
    train(model, rank, 90, 2, tables)
    state = {"model": ModelState(model, tables), "optimizer": FusedOptimizerState(tables)}
    dcp.load(state, checkpoint_id=f"{folder}/before")
    losses += train(model, rank, steps, steps, tables)
    equal = tables.replicas_bit_equal()
    dcp.save(state, checkpoint_id=f"{folder}/moved")

    after = sharded(optimizer, layout.world_size, columns=optimizer != "rowwise_adagrad")
    train(after, rank, 95, 1)
    back = {"model": after.state_dict(), "optimizer": after.fused_optimizer.state_dict()}
    if optimizer == "sgd":  # torch.distributed.checkpoint does not load a dictionary without any tensor
        del back["optimizer"]
    dcp.load(back, checkpoint_id=f"{folder}/moved")
    after.load_state_dict(back["model"])
    if optimizer != "sgd":
        after.fused_optimizer.load_state_dict(back["optimizer"])
    losses += train(after, rank, 2 * steps, steps)
    return {"expected": expected, "losses": losses, "replicas_equal": equal}


STEPS = 4


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_a_job_that_moves_to_flexd_and_back_has_the_losses_of_one_that_never_moved(
    pair: RankPool, optimizer: str, tmp_path: Path
) -> None:
    for result in pair.run(there_and_back, RankLayout(2, 1), optimizer, STEPS, str(tmp_path)):
        assert result["losses"] == pytest.approx(result["expected"], abs=2e-6)
        assert result["replicas_equal"]


def test_state_of_one_rank_is_written_and_read(tmp_path: Path) -> None:
    jobs = []
    for seed in (1, 2):
        model = make("rowwise_adagrad", weighted=False)
        jobs.append((model, replace(model, one_lookup=False)))
        for step in range(seed):
            model(*batch(step, seed, weighted=False)).backward()
            jobs[-1][1].optimizer.step()
    (saved, first), (loaded, second) = jobs
    state = {"model": ModelState(saved, first), "optimizer": FusedOptimizerState(first)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {"model": ModelState(loaded, second), "optimizer": FusedOptimizerState(second)}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, value in whole_state_dict(first).items():
        if "step" not in name:
            assert torch.equal(value, whole_state_dict(second)[name]), name
    assert torch.equal(saved.over.weight, loaded.over.weight)


class Changing(torch.nn.Module):
    """A bag collection and a sequence collection of the given tables."""

    def __init__(self, bags: dict[str, int], rows: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(sum(bags.values()))
        self.bags = torchrec.EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=4, feature_names=[name])
                for name, size in bags.items()
            ]
        )
        self.items = torchrec.EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=size, embedding_dim=8, feature_names=[name])
                for name, size in rows.items()
            ]
        )
        for module in (self.bags, self.items):
            apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, module.parameters(), {"lr": 0.1})
        self.over = torch.nn.Linear(2, 1)

    def forward(self, rank: int) -> torch.Tensor:
        names = [config.name for config in (*self.bags.embedding_bag_configs(), *self.items.embedding_configs())]
        ids = torch.arange(rank, 15, 2)
        kjt = torchrec.KeyedJaggedTensor.from_lengths_sync(
            keys=names, values=ids.repeat(len(names)), lengths=torch.full((len(names),), len(ids))
        )
        return self.bags(kjt).values().sum() + sum(rows.values().square().sum() for rows in self.items(kjt).values())


def changed(rank: int, layout: RankLayout, path: str) -> dict[str, Any]:
    """Save, and load a model with a larger ``user``, with ``more`` and without ``tag`` and ``item``."""
    found = []
    for bags, rows in (({"user": 19, "tag": 17}, {"word": 16, "item": 15}), ({"user": 31, "more": 21}, {"word": 16})):
        model = Changing(bags, rows)
        tables = replace(model, layout=layout)
        state = {"model": ModelState(model, tables), "optimizer": FusedOptimizerState(tables)}
        if found:
            found.append(whole_state_dict(tables))
            dcp.load(state, checkpoint_id=path, planner=flexd.ChangedTables())
            found.append(whole_state_dict(tables))
            model(rank).backward()
            tables.optimizer.step()
            text = error_of(dcp.load, state, checkpoint_id=path, planner=flexd.ChangedTables())
        else:
            for _ in range(2):
                model(rank).backward()
                tables.optimizer.step()
            dcp.save(state, checkpoint_id=path)
            found.append(whole_state_dict(tables))
    return {"saved": as_numpy(found[0]), "before": as_numpy(found[1]), "loaded": as_numpy(found[2]), "text": text}


def test_a_model_with_other_tables_loads_what_it_has_in_common(pair: RankPool, tmp_path: Path) -> None:
    for result in pair.run(changed, RankLayout(2, 1), str(tmp_path)):
        saved, before, loaded = result["saved"], result["before"], result["loaded"]
        for name, kept in (("user", 19), ("more", 0), ("word", 16)):
            for key in (f"embeddings.{name}.weight", f"optimizer.rowwise_adagrad.{name}.sum"):
                if kept:
                    np.testing.assert_array_equal(loaded[key][:kept], saved[key][:kept], err_msg=key)
                np.testing.assert_array_equal(loaded[key][kept:], before[key][kept:], err_msg=key)
        assert "new rows would begin with values of step 1 - load the ModelState first" in result["text"]
