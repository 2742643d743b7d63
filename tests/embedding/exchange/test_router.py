"""Number of collectives of a step, bytes of several passes, and rows rounded to the wire."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexd.embedding.exchange.collectives as collectives_module
from flexd.core.placement import Delta, RankLayout
from flexd.embedding.collection import EmbeddingCollection
from tests.support.exchange_jobs import batch, make, step
from tests.support.rank_pool import Ranks


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the collectives inside, by name."""
    count: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def issue(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return call(*args, **kwargs)

        return issue

    owners = {"all_to_all_single": dist, "all_reduce": dist, "broadcast": dist, "all_gather_flat": collectives_module}
    with ExitStack() as stack:
        for name, owner in owners.items():
            stack.enter_context(mock.patch.object(owner, name, counted(name, getattr(owner, name))))
        yield count


def collectives(rank: int, layout: RankLayout, dims: list[int], dtypes: list[str], moved: bool) -> dict[str, Any]:
    """Count the collectives of a training step, and of an evaluation."""
    collection = make(layout, dims, dtypes, moved)
    with counted_collectives() as trained:
        step(collection, [1])
    with counted_collectives() as evaluated, torch.no_grad():
        collection(batch(collection, 1))
    return {"training": dict(trained), "evaluation": dict(evaluated)}


def collectives_of_a_chunk(rank: int, layout: RankLayout, dims: list[int], trains: bool) -> dict[str, Any]:
    """Count the collectives of a pass that applies a chunk, and of one after it; rows are listed before both.

    Returns:
        Of both the collectives by name, and after both whether all replicas are bit-equal; the bytes that the first
        sent for migrations; whether its rows are those of a pass without a chunk.
    """
    collection = make(layout, dims, ["float32"] * len(dims), True)
    step(collection, [1])
    collection.engine.inbox.offer(2, promotions(collection))
    with torch.no_grad():
        before = [jagged.values for jagged in collection(batch(collection, 1)).values()]  # agrees on the chunk
    found, bit_equal, versions = [], [], []
    sent = collection.traffic.totals()
    equal = False
    for _ in range(2):
        with counted_collectives() as count:
            if trains:
                step(collection, [1])
            else:
                with torch.no_grad():
                    rows = [jagged.values for jagged in collection(batch(collection, 1)).values()]
                equal = all(map(torch.equal, rows, before))
        found.append(dict(count))
        versions.append(collection.placement_version)
        bit_equal.append(collection.replicas_bit_equal())
    moved = {name: collection.traffic.totals()[name] - sent[name] for name in sent if name.startswith("migration")}
    return {
        "collectives": found, "bit_equal": bit_equal, "equal": equal, "migrated": sum(moved.values()),
        "versions": versions, "listed": len(collection.engine.migrator.placement()[0]),
    }  # fmt: skip


def promotions(collection: EmbeddingCollection) -> Delta:
    """Make a chunk that promotes all rows that ``make`` has moved, and those it has not, to DEVICE."""
    keys = np.arange(collection.engine.keyspace.total_rows)
    old = (keys % 3).astype(np.uint8)
    return Delta(keys[old < 2], old[old < 2], np.full(int((old < 2).sum()), 2, np.uint8))


@pytest.mark.parametrize(
    ("dims", "dtypes", "training"),
    [
        ([8], ["float32"], [11, 1]),
        ([8, 4, 2], ["float32"] * 3, [11, 1]),
        ([8, 3], ["float32", "float64"], [11, 2]),
        ([8, 3], ["float16", "bfloat16"], [12, 0]),
        ([8, 3], ["float16", "float64"], [12, 1]),
    ],
    ids=["one group", "three groups", "two dtypes", "two narrow dtypes", "narrow and wide"],
)
def test_collectives_of_a_step(ranks: Ranks, dims: list[int], dtypes: list[str], training: list[int]) -> None:
    """Each of two hops exchanges sizes, ids, rows, calls (on gloo) and gradients. With copies, the first hop returns
    sums, and the second has an all-reduce, or sums from the homes where an all-reduce would add rounded gradients."""
    with_copies = {name: n for name, n in zip(("all_to_all_single", "all_reduce"), training, strict=True) if n}
    for moved, trained in ((False, {"all_to_all_single": 10}), (True, with_copies)):
        for counts in ranks(4).run(collectives, RankLayout(2, 2), dims, dtypes, moved):
            assert counts == {"training": trained, "evaluation": {"all_to_all_single": 6}}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_chunk_adds_no_collective(ranks: Ranks, nodes: int, trains: bool) -> None:
    """The rows of a chunk travel with those of the pass that applies it, and all copies have them after it."""
    for counted in ranks(4).run(collectives_of_a_chunk, RankLayout(nodes, 4 // nodes), [8, 3], trains):
        applying, after = counted["collectives"]
        assert counted["versions"] == [2, 2], "the chunk was not applied in the first pass"
        assert applying == after
        assert "all_gather_flat" not in applying
        assert counted["bit_equal"] == [True, True]
        assert counted["migrated"] > 0
        assert counted["listed"] == 80
        assert trains or counted["equal"]
