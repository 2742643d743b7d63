"""A fault of one rank is an error on all ranks that names it, within the process group's timeout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import CollectiveError, EmbeddingError
from flexd.core.layout import RankLayout
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("fault", ["dies", "hangs", "extra look-up"])
def test_a_broken_rank_is_an_error_on_every_other_rank(fault: str) -> None:
    pool = RankPool(4)
    try:
        results = pool.run("fault_jobs:lose_a_rank", RankLayout(2, 2), 3, fault, 3.0)
    finally:
        pool.close()
    for rank, result in enumerate(results):
        if rank == 3 and fault == "dies":
            assert result is None
            continue
        if result is None:
            assert fault == "extra look-up", "gloo ends a process that gets the rows of another collective"
            continue
        text, _ = result
        if fault == "extra look-up" and text.startswith("EmbeddingError"):
            assert "ranks make different calls" in text, "reported by the next look-up of the others"
            continue
        assert text.startswith(f"CollectiveError: rank {rank}: all_to_all with ranks "), text
        assert "(all_to_all)" in text
        assert "restart the job" in text


@pytest.mark.parametrize("fault", ["evaluates", "skips a step"])
@pytest.mark.parametrize(
    ("nodes", "local_ranks", "odd", "exchange"),
    [(2, 2, 3, "chain"), (2, 2, 0, "direct"), (2, 1, 1, "chain"), (1, 2, 0, "chain")],
)
def test_different_calls_are_refused_with_both_calls(
    ranks: Ranks, nodes: int, local_ranks: int, odd: int, exchange: str, fault: str
) -> None:
    """Every rank fails at once, also if the odd rank is on another node and rail, and training can continue."""
    layout = RankLayout(nodes, local_ranks)
    for text, continues in ranks(layout.world_size).run("fault_jobs:diverge", layout, odd, fault, exchange, timeout=50):
        assert text.startswith("EmbeddingError: ranks make different calls: rank ")
        assert f"rank {odd} {'only looks' if fault == 'evaluates' else 'looks'} rows up" in text
        assert ("(4 modulo 8)" in text) == (fault == "skips a step")
        assert continues


@pytest.mark.parametrize("ahead", [False, True])
def test_another_learning_rate_on_one_rank_is_an_error_on_every_rank(ranks: Ranks, ahead: bool) -> None:
    """Found by the first look-up after the update that differed; with run-ahead by the one after that."""
    results = ranks(4).run("fault_jobs:other_settings", RankLayout(2, 2), 3, ahead)
    for rank, (steps, text) in enumerate(results):
        assert steps == 3 + ahead
        assert text.startswith("EmbeddingError: ranks updated their rows with different optimizer settings")
        assert f"rank {rank}: SGD(" in text
        assert f"lr={0.005 if rank == 3 else 0.01}" in text
        assert "last checkpoint" in text


def test_two_collections_in_one_process_train(ranks: Ranks) -> None:
    together = ranks(2).run("fault_jobs:two_collections", RankLayout(2, 1), True)
    apart = ranks(2).run("fault_jobs:two_collections", RankLayout(2, 1), False)
    for one, other in zip(together, apart, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
    assert not np.array_equal(together[0][0], together[0][1])


def test_ids_of_another_device_are_named() -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 10, 4)], layout=RankLayout(1, 1))
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises(EmbeddingError, match=r"feature 'item': ids on meta, the tables are on cpu.*move the batch"):
        collection({"item": flexd.Jagged(ids, torch.tensor([2]))})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_applied_as_in_torch(bad: float) -> None:
    """They change their own rows and no others: the trainer decides about scaling and clipping."""
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 10, 4)], optimizer=flexd.SGD(0.1), layout=RankLayout(1, 1)
    )
    plain = torch.nn.Embedding.from_pretrained(collection.initial_table("item"), freeze=False)
    weights = torch.tensor([1.0, bad, 2.0]).unsqueeze(1)
    ids = torch.tensor([3, 5, 7])
    (collection({"item": flexd.Jagged(ids, torch.tensor([3]))})["item"].values * weights).sum().backward()
    collection.optimizer.step()
    (plain(ids) * weights).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(torch.nan_to_num(collection.gather_table("item")), torch.nan_to_num(plain.weight.detach()))
    assert not torch.isfinite(collection.gather_table("item")[5]).any()


def test_a_collective_error_is_a_runtime_error() -> None:
    assert issubclass(CollectiveError, RuntimeError)
