"""Jobs of ranks: clipping and scaling; and the same on one process with plain tables."""

from __future__ import annotations

import torch

from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD


def overflow_in_the_sum(rank: int, layout: RankLayout) -> tuple[list[float], int, bool]:
    """Train on gradients that are finite on each rank and overflow in the sum; then on finite ones."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", 9, 2, dtype="float16")], optimizer=SGD(1e-3), layout=layout, average_gradients=False
    )
    before = collection.gather_table("item")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for size in (10_000.0, 5.0):
        out = collection({"item": Jagged(torch.tensor([4]), torch.tensor([1]))})["item"].values
        scaler.scale(out.float().sum() * size).backward()
        scaler.step(collection.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    moved = (before - collection.gather_table("item")).float()
    right = bool((moved[4] - 1e-3 * 5.0 * layout.world_size).abs().max() < 1e-3) and not moved[[0, 1, 2, 3, 5]].any()
    return scales, collection.steps, right
