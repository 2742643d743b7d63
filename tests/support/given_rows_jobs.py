"""Jobs of ranks: rows given to a table, equal on all ranks or not, and ``state_dict`` of some ranks alone."""

from __future__ import annotations

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.checkpoint import blocks
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import tables


def values_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load_from(rank: int, layout: RankLayout, source: int, given: str, window_bytes: int) -> bool:
    """Load rows that one rank has; return whether the table has them, and nothing else changed."""
    blocks.MAX_WINDOW_BYTES = window_bytes
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[20, 0, 0])
    expected = collection.gather_table("item")
    expected[5:48] = values_of(43)
    values: torch.Tensor | None = values_of(43)
    if rank != source:
        values = None if given == "none" else values_of(7, seed=rank)
    collection.load_rows("item", 5, values, source=source)
    return torch.equal(collection.gather_table("item"), expected)


def load_differing(rank: int, layout: RankLayout, mistake: str) -> tuple[str, bool]:
    """Make a mistake on rank 2; return the error, and whether the tables are unchanged."""
    collection = EmbeddingCollection(tables(), layout=layout)
    before = {name: collection.gather_table(name) for name in ("item", "odd")}
    name, first, values, source = "item", 3, values_of(20), None
    if rank == 2:
        if mistake == "seed":
            values = values_of(20, seed=1)
        elif mistake == "one bit":
            values.view(torch.int64)[7, 3] ^= 1
        elif mistake == "order":
            values[[3, 4]] = values[[4, 3]]
        elif mistake == "rows":
            first = 4
        elif mistake == "count":
            values = values[:19]
        elif mistake == "shape":
            values = values[:, :5]
        elif mistake == "table":
            name, values = "odd", torch.ones(20, 3)
        elif mistake == "none":
            values = None
        elif mistake == "source":
            source = 0
    if mistake == "empty source":
        source, values = 2, values if rank != 2 else None
    try:
        collection.load_rows(name, first, values, source=source)
        text = "loaded"
    except EmbeddingError as error:
        text = str(error)
    same = all(torch.equal(collection.gather_table(table), rows) for table, rows in before.items())
    return text, same
