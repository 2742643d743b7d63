"""A ranking model of TorchRec's own modules with two pooled and two sequence collections, and jobs that train it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DenseArch, InteractionArch, SparseArch

import flexd
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.torchrec import FusedOptimizerState, ModelState, replace

ROWS = {"user": 41, "shop": 17, "tag": 23, "item": 61, "word": 29}
KEYS = ["user", "shops", "tags", "history", "clicked", "words"]
ROWS_OF_KEY = dict(zip(KEYS, (41, 17, 23, 61, 61, 29), strict=True))
DIM = 8
DENSE = 3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6}),
}


class Ranker(nn.Module):
    """DLRM with a second collection of bags, with weights, and two collections of sequences.

    ``DistributedModelParallel`` multiplies the rows of every bag by the weights of the input, also of collections
    that are not weighted; the plain modules do not. Jobs that compare with it have no weights.
    """

    def __init__(self, device: str = "cpu", weighted: bool = True) -> None:
        super().__init__()
        on: dict[str, Any] = {"device": torch.device(device)}
        self.sparse = SparseArch(
            torchrec.EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(name="user", num_embeddings=41, embedding_dim=DIM, feature_names=["user"]),
                    EmbeddingBagConfig(
                        name="shop", num_embeddings=17, embedding_dim=DIM, feature_names=["shops"],
                        pooling=torchrec.PoolingType.MEAN,
                    ),
                ],
                **on,
            )
        )  # fmt: skip
        self.tags = torchrec.EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="tag", num_embeddings=23, embedding_dim=4, feature_names=["tags"])],
            is_weighted=weighted,
            **on,
        )
        self.items = torchrec.EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="item", num_embeddings=61, embedding_dim=DIM, feature_names=["history", "clicked"])
            ],
            **on,
        )
        self.words = torchrec.EmbeddingCollection(
            tables=[EmbeddingConfig(name="word", num_embeddings=29, embedding_dim=4, feature_names=["words"])],
            need_indices=True,
            **on,
        )
        self.dense = DenseArch(DENSE, [DIM])
        self.interaction = InteractionArch(2)
        self.over = nn.Linear(DIM + 3 + 4, 1)

    def forward(self, dense: torch.Tensor, kjt: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, and beside it a term of the sequences."""
        joined = torch.cat([self.interaction(self.dense(dense), self.sparse(kjt)), self.tags(kjt).values()], dim=1)
        of_samples = nn.functional.binary_cross_entropy_with_logits(self.over(joined).squeeze(1), labels)
        rows, words = self.items(kjt), self.words(kjt)["words"]
        of_words = (words.values().sum(dim=1) * (1 + words.weights() % 3)).square().sum()
        sums = [
            torch.segment_reduce(rows[k].values(), "sum", lengths=rows[k].lengths()) for k in ("history", "clicked")
        ]
        return of_samples + (sums[0] * sums[1]).sum(dim=1).sigmoid().mean() + of_words / 8


def batch(step: int, rank: int, weighted: bool = True) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    rng = np.random.default_rng([11, step, rank])
    samples = 4
    lengths = {key: rng.integers(0, 5, samples) for key in KEYS}
    ids = [(rng.zipf(1.3, lengths[key].sum()) - 1) % ROWS_OF_KEY[key] for key in KEYS]
    values = torch.from_numpy(np.concatenate(ids))
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=KEYS,
        values=values,
        lengths=torch.from_numpy(np.concatenate([lengths[key] for key in KEYS])),
        weights=torch.from_numpy(rng.random(len(values), dtype=np.float32)) if weighted else None,
    )
    dense, labels = rng.random((samples, DENSE), dtype=np.float32), rng.integers(0, 2, samples)
    return torch.from_numpy(dense), kjt, torch.from_numpy(labels).float()


def every_second_row() -> Delta:
    """Return copies of rows of all modules' tables."""
    keys = np.arange(0, sum(ROWS.values()), 2)
    return Delta(keys, np.zeros(len(keys), np.uint8), (np.arange(len(keys)) % 2 + 1).astype(np.uint8))


def collections(model: Any) -> list[Any]:
    return [model.sparse.embedding_bag_collection, model.tags, model.items, model.words]


def plain_tables(model: Any) -> dict[str, torch.Tensor]:
    """Return the tables of an unchanged model."""
    return {
        name: table.weight.detach().clone()
        for module in collections(model)
        for name, table in getattr(module, "embedding_bags", getattr(module, "embeddings", None)).items()
    }


def make(optimizer: str | None = None, weighted: bool = True, kind: type[Ranker] = Ranker) -> Ranker:
    torch.manual_seed(3)
    model = kind(weighted=weighted)
    if optimizer is not None:
        rule, settings = OPTIMIZERS[optimizer]
        for module in collections(model):
            apply_optimizer_in_backward(rule, module.parameters(), dict(settings))  # DMP adds to it
    return model


def train_alone(world_size: int, optimizer: str, steps: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Train the unchanged model in one process on the batches of all ranks, with torch's own optimizers."""
    model = make()
    kind, settings = OPTIMIZERS[optimizer]
    sparse = [p for module in collections(model) for p in module.parameters()]
    known = {id(parameter) for parameter in sparse}
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if id(p) not in known], lr=0.1),
        kind(sparse, **{"eps": 1e-8, **settings} if optimizer != "sgd" else settings),
    ]
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(steps):
        for one in optimizers:
            one.zero_grad()
        for rank in range(world_size):
            loss = model(*batch(step, rank))
            (loss / world_size).backward()
            losses[rank].append(float(loss.detach()))
        for one in optimizers:
            one.step()
    return losses, plain_tables(model)


def train_replaced(
    rank: int,
    layout: RankLayout,
    optimizer: str,
    steps: int,
    prefetched: bool,
    one_lookup: bool,
    summed: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Replace the collections of the model, and train it on ranks; the tables ``summed`` answer by sums."""
    model = make(optimizer)
    tables = replace(
        model,
        layout=layout,
        one_lookup=one_lookup,
        replica_slots=[80, 40],
        answers=dict.fromkeys(summed, "sums"),
    )
    parallel: Any = DistributedDataParallel(model) if layout.world_size > 1 else model
    dense = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses, equal = [], True
    batches: Any = [batch(step, rank) for step in range(steps)]
    for given in flexd.prefetch(batches, tables, features=lambda one: one[1]) if prefetched else batches:
        if len(losses) == 1:
            tables.engine.inbox.offer(1, every_second_row())
        loss = parallel(*given)
        dense.zero_grad()
        tables.optimizer.zero_grad()
        loss.backward()
        dense.step()
        tables.optimizer.step()
        losses.append(float(loss.detach()))
        equal &= prefetched or tables.replicas_bit_equal()
    return {
        "losses": losses,
        "replicas_equal": equal and tables.replicas_bit_equal(),
        "version": tables.placement_version,
        "listed": len(tables.engine.migrator.placement()[0]),
        "tables": {name: tables.gather_table(name) for name in ROWS},
        "unused": tables.engine.hooks.unused_batches,
    }


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


def train_sharded(model: Any, rank: int, first: int, steps: int) -> list[float]:
    """Train under ``DistributedModelParallel``, whose fused optimizer updates the rows in ``backward``."""
    tables = set(model.fused_optimizer.params)
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if name not in tables], lr=0.1)
    losses = []
    for step in range(first, first + steps):
        loss = model(*batch(step, rank, weighted=False))
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(float(loss.detach()))
    return losses


def train_moved(model: Any, tables: Any, rank: int, first: int, steps: int) -> list[float]:
    parallel = DistributedDataParallel(model)
    dense = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        loss = parallel(*batch(step, rank, weighted=False))
        dense.zero_grad()
        loss.backward()
        dense.step()
        tables.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def there_and_back(rank: int, layout: RankLayout, optimizer: str, steps: int, folder: str) -> dict[str, Any]:
    """Train under TorchRec, move to flexd and back, and train another job that never moves.

    Each part begins from other values than those it loads.
    """
    stayed = sharded(optimizer, layout.world_size)
    expected = train_sharded(stayed, rank, 0, 3 * steps)

    before = sharded(optimizer, layout.world_size)
    losses = train_sharded(before, rank, 0, steps)
    dcp.save({"model": before, "optimizer": before.fused_optimizer}, checkpoint_id=f"{folder}/before")

    model = make(optimizer, weighted=False)
    tables = replace(model, layout=layout, replica_slots=[80, 40])
    for name in ROWS:
        tables.load_rows(name, 0, torch.zeros_like(tables.gather_table(name)))
    tables.engine.inbox.offer(1, every_second_row())
    train_moved(model, tables, rank, 90, 2)
    state = {"model": ModelState(model, tables), "optimizer": FusedOptimizerState(tables)}
    dcp.load(state, checkpoint_id=f"{folder}/before")
    losses += train_moved(model, tables, rank, steps, steps)
    equal = tables.replicas_bit_equal()
    dcp.save(state, checkpoint_id=f"{folder}/moved")

    after = sharded(optimizer, layout.world_size, columns=optimizer != "rowwise_adagrad")
    train_sharded(after, rank, 95, 1)
    back = {"model": after.state_dict(), "optimizer": after.fused_optimizer.state_dict()}
    if optimizer == "sgd":  # torch.distributed.checkpoint does not load a dictionary without any tensor
        del back["optimizer"]
    dcp.load(back, checkpoint_id=f"{folder}/moved")
    after.load_state_dict(back["model"])
    if optimizer != "sgd":
        after.fused_optimizer.load_state_dict(back["optimizer"])
    losses += train_sharded(after, rank, 2 * steps, steps)
    return {"expected": expected, "losses": losses, "replicas_equal": equal}
