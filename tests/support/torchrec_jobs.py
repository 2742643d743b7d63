"""``flexd.torchrec`` on ranks, and TorchRec's own modules in one process on the batches of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchrec
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import flexd
import flexd.core.errors
from flexd.core.placement import RankLayout
from flexd.torchrec import FlexEmbeddingBagCollection, FlexEmbeddingCollection

ROWS = {"item": 61, "shop": 17}
KEYS = ["shop", "ignored", "history", "target"]


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
