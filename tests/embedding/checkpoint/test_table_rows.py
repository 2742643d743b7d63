"""Rows that a caller gives: the same on every rank, or of one; a wrong one is refused on every rank."""

import pytest
import torch

from flexd.core.placement import RankLayout
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import tables
from tests.support.rank_pool import Ranks, error_of


def values_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load_from(rank: int, layout: RankLayout, source: int, given: str, window_bytes: int) -> bool:
    """Load rows that one rank has; return whether the table has them, and nothing else changed."""
    table_rows.MAX_WINDOW_BYTES = window_bytes
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[20, 0, 0])
    expected = collection.gather_table("item")
    expected[5:48] = values_of(43)
    values: torch.Tensor | None = values_of(43)
    if rank != source:
        values = None if given == "none" else values_of(7, seed=rank)
    collection.load_rows("item", 5, values, source=source)
    return torch.equal(collection.gather_table("item"), expected)


def mistaken(mistake: str) -> tuple[str, int, torch.Tensor | None, int | None]:
    values = values_of(20)
    one_bit = values.clone()
    one_bit.view(torch.int64)[7, 3] ^= 1
    return {
        "seed": ("item", 3, values_of(20, seed=1), None),
        "one bit": ("item", 3, one_bit, None),
        "order": ("item", 3, values[[0, 1, 2, 4, 3, *range(5, 20)]], None),
        "rows": ("item", 4, values, None),
        "count": ("item", 3, values[:19], None),
        "shape": ("item", 3, values[:, :5], None),
        "table": ("odd", 3, torch.ones(20, 3), None),
        "none": ("item", 3, None, None),
        "source": ("item", 3, values, 0),
        "empty source": ("item", 3, None, 2),
    }[mistake]


def load_differing(rank: int, layout: RankLayout, mistake: str) -> tuple[str, bool]:
    """Make a mistake on rank 2; return the error, and whether the tables are unchanged."""
    collection = EmbeddingCollection(tables(), layout=layout)
    before = {name: collection.gather_table(name) for name in ("item", "odd")}
    right = "item", 3, values_of(20), 2 if mistake == "empty source" else None
    name, first, values, source = mistaken(mistake) if rank == 2 else right
    text = error_of(collection.load_rows, name, first, values, source=source)
    return text, all(torch.equal(collection.gather_table(table), rows) for table, rows in before.items())


FOUR_RANKS = RankLayout(2, 2)


@pytest.mark.parametrize(("source", "given", "window_bytes"), [(0, "none", 300), (3, "others", 2**20)])
def test_rows_of_one_rank_reach_their_homes(ranks: Ranks, source: int, given: str, window_bytes: int) -> None:
    assert all(ranks(4).run(load_from, FOUR_RANKS, source, given, window_bytes))


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("seed", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("one bit", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("order", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("count", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("rows", "ranks [2] load another table, other rows or from another source than rank 0"),
        ("table", "ranks [2] load another table, other rows or from another source than rank 0"),
        ("source", "ranks [2] load another table, other rows or from another source than rank 0"),
        ("none", "table 'item': ranks [2] gave no values - give the same values on every rank"),
        ("shape", "table 'item': the values of rank 2 do not fit - see the error of rank 2"),
        ("empty source", "table 'item': ranks [2] gave no values - give the same values on every rank"),
    ],
)
def test_a_mistake_of_one_rank_is_refused_on_every_rank(ranks: Ranks, mistake: str, cause: str) -> None:
    results = ranks(4).run(load_differing, FOUR_RANKS, mistake, timeout=60)
    for rank, (text, unchanged) in enumerate(results):
        if mistake == "shape" and rank == 2:
            assert "rank 2: table 'item': values of shape (20, 5) from row 3 on, in 61 rows of 8" in text
        else:
            assert cause in text
        assert unchanged
    if mistake == "seed":
        assert results[0][0].endswith("load those of one rank with source=0")
