"""Gradients on a wire that is narrower than their sums: training does not depend on the placement."""

from typing import Any

import numpy as np
import pytest
import torch

from flexd.core.placement import Delta, RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange.arms import Arm
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD
from flexd.embedding.tuning import StepTuner
from tests.support.exchange_jobs import ROWS, make, step
from tests.support.prefetch_pipeline_jobs import in_windows
from tests.support.rank_pool import Ranks


def summed_gradients(
    rank: int,
    layout: RankLayout,
    tier: int | None,
    dtype: str,
    comm_dtype: str | None,
) -> tuple[np.ndarray, bool]:
    """Return the table after one step from zero, which is the sum of all gradients, and whether replicas are equal.

    Two ranks have large gradients of opposite sign for each number, and the others small ones: another order of
    additions loses another part of the small ones.

    Args:
        tier: tier of all rows; None: rows at all tiers.
    """
    collection = EmbeddingCollection(
        [EmbeddingTable("t0", ROWS, 16, dtype=dtype)], layout=layout, optimizer=SGD(1.0),
        comm_dtype=comm_dtype, average_gradients=False,
    )  # fmt: skip
    collection.load_rows("t0", 0, torch.zeros(ROWS, 16))
    keys = np.arange(ROWS)
    tiers = keys % 3 if tier is None else np.full(ROWS, tier)
    moved = tiers > 0
    delta = Delta(keys[moved], np.zeros(int(moved.sum()), np.uint8), tiers[moved].astype(np.uint8))
    collection.engine.inbox.offer(1, delta)
    with torch.no_grad():
        for _ in range(2):
            collection({})
    assert collection.placement_version == 1
    rng = np.random.default_rng(1)
    by_rank = rng.normal(size=(layout.world_size, ROWS, 16))
    large = rng.permuted(np.broadcast_to(np.arange(layout.world_size)[:, None, None], by_rank.shape), axis=0)
    by_rank[large == 0] = 2.0 ** (15 if "float16" in (dtype, comm_dtype) else 20)
    by_rank[large == 1] = -by_rank[large == 0].max()
    weights = torch.from_numpy(by_rank[rank])
    rows = collection({"t0": Jagged(torch.arange(ROWS), torch.tensor([ROWS]))})["t0"].values
    (rows * weights.to(rows.dtype)).sum().backward()
    collection.optimizer.step()
    return collection.gather_table("t0").float().numpy(), collection.replicas_bit_equal()


Wire = str | tuple[str | None, ...] | None


def train(rank: int, layout: RankLayout, moved: bool, comm_dtype: Wire) -> dict[str, Any]:
    """Of several dtypes on the wire each step uses the next one."""
    collection = make(layout, [8, 3], ["float32", "float64"], moved, comm_dtype=comm_dtype)
    engine = collection.engine
    engine.joined[:] = [each for each in engine.joined if not isinstance(each, StepTuner)]
    losses, equal = [], True
    for number in range(8):
        if isinstance(comm_dtype, tuple):
            engine.arm.propose(Arm("chain", wire=comm_dtype[number % len(comm_dtype)] or ""))
        losses.append(step(collection, [number, number + 100]))
        equal &= collection.replicas_bit_equal()
    totals = collection.traffic.totals()
    return {
        "losses": losses, "equal": equal, "bytes": sum(value for name, value in totals.items() if "bytes" in name),
        "tables": [collection.gather_table(table.name).double().numpy() for table in collection.tables],
    }  # fmt: skip


@pytest.mark.parametrize("comm_dtype", ["float16", "bfloat16", (None, "float16")], ids=str)
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(1, 2), RankLayout(2, 1)], ids=str)
def test_training_on_a_narrow_wire_does_not_depend_on_the_placement(
    ranks: Ranks, layout: RankLayout, comm_dtype: Wire
) -> None:
    pool = ranks(layout.world_size)
    still, moved, exact = (
        pool.run(train, layout, *arguments) for arguments in ((False, comm_dtype), (True, comm_dtype), (False, None))
    )
    for a, b, c in zip(still, moved, exact, strict=True):
        assert b["equal"], "a replica differed from its home copy"
        np.testing.assert_allclose(a["losses"], b["losses"], rtol=0, atol=1e-4)
        for ours, theirs, wide in zip(a["tables"], b["tables"], c["tables"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
            assert 1e-5 < np.abs(ours - wide).max() < 0.2, "rounded, and not lost"
        assert a["bytes"] < (0.7 if isinstance(comm_dtype, str) else 0.9) * c["bytes"]


@pytest.mark.parametrize(("dtype", "comm_dtype"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", None)])
@pytest.mark.parametrize(("nodes", "local_ranks"), [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])
def test_gradients_are_added_in_the_same_order_at_every_tier(
    ranks: Ranks, nodes: int, local_ranks: int, dtype: str, comm_dtype: str | None
) -> None:
    """Compare bits, on a wire that is narrower than the sums."""
    layout = RankLayout(nodes, local_ranks)
    pool = ranks(layout.world_size)
    home, *others = (pool.run(summed_gradients, layout, tier, dtype, comm_dtype) for tier in (0, 1, 2, None))
    sums = home[0][0]
    assert np.unique(sums).size > 100
    for results in (home, *others):
        for table, equal in results:
            assert equal, "a replica differed from its home copy"
            np.testing.assert_array_equal(table, sums)


def test_messages_of_an_accelerator_round_in_the_same_places_at_every_tier(ranks: Ranks) -> None:
    """Gradients that a rank sends to itself on their way are rounded nowhere, as those of host memory."""
    layout = RankLayout(2, 2)
    pool = ranks(4)
    home = pool.run(summed_gradients, layout, 0, "float32", "float16")
    for tier in (0, 1, 2, None):
        for table, equal in pool.run(in_windows, summed_gradients, layout, tier, "float32", "float16"):
            assert equal, "a replica differed from its home copy"
            np.testing.assert_array_equal(table, home[0][0])
