"""A collection of one table beside ``nn.Embedding`` with equal rows."""

from __future__ import annotations

import torch
from torch import nn

import flexd


def ids(*rows: int) -> dict[str, flexd.Jagged]:
    return {"item": flexd.Jagged(torch.tensor(rows, dtype=torch.int64), torch.tensor([len(rows)]))}


def pair(lr: float = 0.3, **more: object) -> tuple[flexd.EmbeddingCollection, nn.Embedding]:
    """Return a collection and a plain table of equal rows."""
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 20, 4, dtype="float64")], optimizer=flexd.SGD(lr), **more
    )  # type: ignore[arg-type]
    return collection, nn.Embedding.from_pretrained(collection.initial_table("item"), freeze=False)


def close(collection: flexd.EmbeddingCollection, plain: nn.Embedding) -> bool:
    return torch.allclose(collection.gather_table("item"), plain.weight.detach(), rtol=0, atol=1e-12)
