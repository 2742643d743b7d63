"""Jobs of ranks whose loader deals samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.jagged import Jagged


def samples_of_groups(samples: int) -> dict[str, Jagged]:
    """Make samples of one of 8 groups of rows."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 8, samples)
    lengths = rng.integers(1, 5, samples)
    ids = np.repeat(group, lengths) * 20 + rng.integers(0, 20, lengths.sum())
    return {"item": Jagged(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))}


def sampled(rank: int, layout: RankLayout, batch_size: int, epochs: int) -> dict[str, Any]:
    """Return the indices that this rank reads in each epoch, and the bytes a step sends dealt and undealt."""
    everything = samples_of_groups(200)
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 32)], layout=layout)
    sampler = flexd.affinity.NodeSampler(everything, collection, batch_size, seed=3)
    indices = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    ids = torch.split(everything["item"].values, everything["item"].lengths.tolist())
    size = batch_size * layout.world_size
    order = np.random.default_rng([3, 0]).permutation(200)
    undealt = [order[at * size : (at + 1) * size][rank :: layout.world_size].tolist() for at in range(len(sampler))]
    sent = []
    for batches in (undealt, indices[0]):
        before = collection.traffic.totals()["all_to_all_inter_bytes"]
        for chosen in batches:
            values = torch.cat([ids[at] for at in chosen])
            collection({"item": Jagged(values, torch.tensor([len(values)]))})["item"].values.sum().backward()
            collection.optimizer.step()
        sent.append(collection.traffic.totals()["all_to_all_inter_bytes"] - before)
    return {"indices": indices, "undealt": undealt, "length": len(sampler), "sent": sent}
