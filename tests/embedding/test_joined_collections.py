"""``flexd.join_collections``: two collections, two learning rates, one engine and one ``flexd.prefetch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support import run_ahead_jobs
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]

BOTH_UNPOOLED = Scenario(1, 2, steps=9, joined=True, second_rate=0.25)
OWN_OPTIMIZERS = Scenario(
    2, 2, "adam", steps=9, joined=True, second_optimizer="adagrad", answered_by=("rows", "rows"), seed=1, two_dims=True
)
SUMS = Scenario(2, 1, steps=9, joined=True, answered_by=("rows", "sums"), second_rate=0.25, fast_memory_bytes=1_500)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("scenario", [BOTH_UNPOOLED, OWN_OPTIMIZERS, SUMS])
def test_joined_collections_equal_one_process(ranks: Ranks, scenario: Scenario, ahead: bool) -> None:
    loop = Loop(ahead=ahead, evaluate_every=2)
    results = ranks(scenario.layout.world_size).run(run_ahead_jobs.train, scenario, loop)
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=1e-9)
        assert result["unequal"] == 0
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)


def two(**arguments: Any) -> tuple[flexd.EmbeddingCollection, flexd.EmbeddingBagCollection]:
    arguments = {"layout": RankLayout(1, 1)} | arguments
    items = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("items", 20, 4, ("history",))], optimizer=flexd.SGD(0.5), seed=1, **arguments
    )
    ads = flexd.EmbeddingBagCollection(
        [flexd.EmbeddingBagTable("ads", 30, 4, ("history", "clicked"))], optimizer=flexd.SGD(0.125), **arguments
    )
    return items, ads


def ids(*values: int) -> flexd.Jagged:
    return flexd.Jagged(torch.tensor(values), torch.tensor([len(values)]))


def test_each_keeps_its_values_rate_and_features() -> None:
    items, ads = two()
    ads.load_rows("ads", 3, torch.full((2, 4), 7.0))
    before = {"items": items.gather_table("items"), "ads": ads.gather_table("ads")}
    tables = flexd.join_collections(items, ads)
    assert items.optimizer is ads.optimizer is tables.optimizer
    assert [(group["tables"], group["lr"]) for group in tables.optimizer.param_groups] == [
        (["items"], 0.5),
        (["ads"], 0.125),
    ]
    for name, values in before.items():
        assert torch.equal(tables.gather_table(name), values)
    # Both read a feature of this name, in tables of their own.
    items({"history": ids(1)})["history"].values.sum().backward()
    ads({"history": ids(3)})["history"].sum().backward()
    items.optimizer.step()
    ads.optimizer.step()  # nothing is left for it
    assert tables.steps == 1
    assert torch.allclose(tables.gather_table("items")[1], before["items"][1] - 0.5)
    assert torch.allclose(tables.gather_table("ads")[3], before["ads"][3] - 0.125)
    with pytest.raises(EmbeddingError, match="no table reads feature 'clicked'"):
        items({"clicked": ids(1)})


def test_prefetch_looks_up_all_of_them_at_once() -> None:
    items, ads = two()
    tables = flexd.join_collections(items, ads)
    tap = flexd.Tap(tables)
    loader = [(ids(step, 2), {"history": ids(3), "clicked": ids(step, 4)}) for step in range(4)]
    passes = []
    for history, of_ads in flexd.prefetch(loader, tables, features=lambda pair: ({"history": pair[0]}, pair[1])):
        rows, pooled = items({"history": history})["history"].values, ads(of_ads)
        passes.append(len(tables.engine.passes))
        (rows.sum() + sum(part.sum() for part in pooled.values())).backward()
        tables.optimizer.step()
    assert passes == [1, 1, 1, 1]
    assert tables.engine.hooks.unused_batches == 0
    assert tap.counters.accesses == 4 * (2 + 1 + 2)


def test_what_cannot_be_joined_is_named() -> None:
    items, ads = two()
    other = flexd.EmbeddingCollection([flexd.EmbeddingTable("ads", 3, 2)], layout=RankLayout(1, 1))
    with pytest.raises(EmbeddingError, match=r"collection 1 \(ads\): collection 0 has a table 'ads' too"):
        flexd.join_collections(ads, other)
    with pytest.raises(EmbeddingError, match="average_gradients=False, collection 0 has True"):
        flexd.join_collections(items, two(average_gradients=False)[1])
    decayed = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("new", 3, 2)], layout=RankLayout(1, 1), optimizer=flexd.SGD(0.1, weight_decay=0.5)
    )
    with pytest.raises(EmbeddingError, match=r"SGD\(weight_decay=0.5.* an earlier table has .*may differ in lr alone"):
        flexd.join_collections(items, decayed)
    with pytest.raises(EmbeddingError, match="join_collections of 2 collections - give"):
        flexd.join_collections(items, items)
    tables = flexd.join_collections(items, ads)
    with pytest.raises(EmbeddingError, match="was joined before"):
        flexd.join_collections(items)
    with pytest.raises(EmbeddingError, match=r"rank 0: a dict for 2 joined collections - pass a tuple"):
        tables({"history": ids(1)})
    trained = two()[0]
    trained({"history": ids(1)})["history"].values.sum().backward()
    trained.optimizer.step()
    with pytest.raises(EmbeddingError, match="has trained 1 steps"):
        flexd.join_collections(trained)
