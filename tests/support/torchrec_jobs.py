"""``flexd.torchrec`` on ranks, and TorchRec's own modules in one process on the batches of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchrec
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import flexd
import flexd.core.errors
from flexd.core.layout import RankLayout
from flexd.torchrec import FlexEmbeddingBagCollection, FlexEmbeddingCollection

ROWS = {"item": 61, "shop": 17}
KEYS = ["shop", "ignored", "history", "target"]
STEPS = 5


def configs(pooled: bool) -> list[Any]:
    """Return configurations of two tables that both read ``target``."""
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    more: list[dict[str, Any]] = [{}, {"pooling": torchrec.PoolingType.MEAN}] if pooled else [{}, {}]
    dims = (8, 4) if pooled else (8, 8)
    return [
        kind(
            name="item", num_embeddings=61, embedding_dim=dims[0], feature_names=["history", "target"],
            weight_init_min=-0.5, weight_init_max=0.5, **more[0],
        ),
        kind(
            name="shop", num_embeddings=17, embedding_dim=dims[1], feature_names=["shop", "target"],
            init_fn=torch.nn.init.normal_, **more[1],
        ),
    ]  # fmt: skip


def batch(step: int, rank: int, samples: int | None = None) -> KeyedJaggedTensor:
    rng = np.random.default_rng([5, step, rank])
    samples = int(rng.integers(1, 5)) if samples is None else samples
    lengths = rng.integers(0, 6, size=(len(KEYS), samples))
    values = [(rng.zipf(1.3, count) - 1) % 17 for count in lengths.sum(axis=1)]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=KEYS, values=torch.from_numpy(np.concatenate(values)), lengths=torch.from_numpy(lengths.reshape(-1))
    )


def loss_of(out: Any) -> torch.Tensor:
    parts = [jagged.values() for jagged in out.values()] if isinstance(out, dict) else [out.values()]
    return torch.stack([part.sin().sum() + part.square().sum() for part in parts]).sum()


def make(pooled: bool, layout: RankLayout) -> Any:
    module = FlexEmbeddingBagCollection if pooled else FlexEmbeddingCollection
    return module(configs(pooled), optimizer=flexd.SGD(0.1), layout=layout, replica_slots=[20] * (1 + pooled))


def plain_of(collection: Any, pooled: bool) -> Any:
    """Return TorchRec's module with the present rows of the collection."""
    module = (torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection)(tables=configs(pooled))
    tables = module.embedding_bags if pooled else module.embeddings
    with torch.no_grad():
        for name, table in tables.items():
            table.weight.copy_(collection.gather_table(name))
    return module


def refused(rank: int, layout: RankLayout, faulty: int) -> list[str]:
    """Give one rank faulty input and return the error of every rank."""
    collection = make(False, layout)
    good = batch(1, rank, samples=3)
    some = torch.tensor([1, 2])
    faults = [
        torch.tensor([1, 2]),
        KeyedJaggedTensor.from_lengths_sync(["shop"], torch.tensor([1, 2]), torch.tensor([2])),
        KeyedJaggedTensor(["shop", "history", "target"], some, lengths=torch.tensor([1, 1, 1])),
        KeyedJaggedTensor.from_lengths_sync(
            ["shop", "history", "target"], torch.tensor([99, 1, 1]), torch.tensor([1, 1, 1])
        ),
    ]
    errors = []
    for fault in faults:
        try:
            collection(fault if rank == faulty else good)
            errors.append("no error")
        except flexd.core.errors.EmbeddingError as error:
            errors.append(str(error))
        loss_of(collection(good)).backward()
        collection.optimizer.step()
    return errors


def initial(rank: int, layout: RankLayout) -> dict[str, torch.Tensor]:
    collection = make(False, layout)
    return {name: collection.gather_table(name) for name in ROWS}


def train_changed(rank: int, layout: RankLayout, what: str, one_thread: bool | None) -> tuple[list[float], int]:
    """Train weighted bags, of which one table is pooled at its owner; the loop of rank 0 changes part of each input.
    Without run-ahead if ``one_thread`` is None. Return losses and the batches located twice."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    collection = FlexEmbeddingBagCollection(
        tables, is_weighted=True, optimizer=flexd.SGD(0.1), layout=layout, answers={"item": "sums"}
    )
    inputs: Any = [
        KeyedJaggedTensor.from_lengths_sync(
            keys=list(ROWS), values=torch.arange(8) + step, lengths=torch.tensor([1, 3, 2, 2]),
            weights=torch.linspace(0.5, 1.5, 8) * (1 + rank),
        )
        for step in range(STEPS)
    ]  # fmt: skip
    if one_thread is not None:
        inputs = flexd.prefetch(inputs, collection, one_thread=one_thread)
    losses = []
    for given in inputs:
        kjt = given
        if rank == 0 and what == "ids":
            kjt.values()[1] = 7
        elif rank == 0 and what == "lengths":
            kjt.lengths().copy_(torch.tensor([3, 1, 2, 2]))
        elif rank == 0 and what == "weights":
            kjt.weights()[2] = -4.0
        elif rank == 0 and what == "weights of rows":
            kjt.weights()[6] = -4.0
        elif rank == 0 and what == "object":
            kjt = KeyedJaggedTensor.from_lengths_sync(
                keys=list(ROWS), values=given.values() + 1, lengths=given.lengths(), weights=given.weights()
            )
        loss = loss_of(collection(kjt))
        loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
    return losses, collection.engine.hooks.unused_batches
