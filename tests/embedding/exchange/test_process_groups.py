"""Process groups: their timeout, and layouts that do not fit them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.core.errors import TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingTable
from flexd.embedding.exchange.process_groups import layout_from_environment
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


def test_collectives_have_the_timeout_of_the_default_group(ranks: Ranks) -> None:
    assert ranks(4).run("fault_jobs:timeouts", RankLayout(2, 2)) == [[60.0] * 3] * 4


def test_without_a_process_group_each_rank_would_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    table = flexd.EmbeddingTable("item", 10, 4)
    with pytest.raises(TopologyError, match=r"WORLD_SIZE=4, but there is no process group.*init_process_group first"):
        flexd.EmbeddingCollection([table])
    flexd.EmbeddingCollection([table], layout=RankLayout(1, 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert layout_from_environment() == RankLayout(1, 1)


def test_a_process_group_made_after_the_collection_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 10, 4)], layout=RankLayout(1, 1))
    ids = {"item": flexd.Jagged(torch.tensor([1]), torch.tensor([1]))}
    collection(ids)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(TopologyError, match="older than the process group of 2 ranks"):
        collection(ids)


def test_layout_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert layout_from_environment() == RankLayout(1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(TopologyError, match="LOCAL_WORLD_SIZE=3"):
        layout_from_environment()


OTHER = [EmbeddingTable("item", 65, 2)]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([{}, {}, {"tables": OTHER}, {}], "ranks [2] have other names or row counts of tables than rank 0"),
        ([{"tables": OTHER}, {}, {}, {}], "ranks [1, 2, 3] have other names or row counts of tables"),
        ([{}, {"exchange": "direct"}, {}, {}], "ranks [1] have other settings than rank 0"),
        ([{}, {"replica_sums": "home"}, {}, {}], "ranks [1] have other settings than rank 0"),
        ([{}, {}, {"max_migration_bytes_per_step": 1}, {}], "ranks [2] have other settings"),
        ([{}, {}, {}, {"optimizer": SGD(lr=0.5)}], "ranks [3] have other settings"),
        ([{"optimizer": RowWiseAdagrad(eps=eps)} for eps in (0.1, 0.1, 0.1, 0.2)], "ranks [3] have other settings"),
        ([{}, {}, {"layout": RankLayout(4, 1)}, {}], "rank 2 has a layout of 4 nodes x 1 local ranks, rank 0 of 2 x 2"),
        ([{}, {}, {"layout": RankLayout(2, 3)}, {}], "rank 2 has a layout of 2 nodes x 3 local ranks, rank 0 of 2 x 2"),
        ([{"layout": RankLayout(2, 3)}] * 4, "but the process group has 4 ranks"),
    ],
)
def test_different_arguments_are_refused_on_every_rank(
    ranks: Ranks, arguments: list[dict[str, Any]], cause: str
) -> None:
    for text in ranks(4).run("collection_jobs:construct", arguments, timeout=30):
        assert text.startswith("TopologyError")
        assert cause in text


def test_collections_of_a_job_share_their_process_groups(ranks: Ranks) -> None:
    """torch keeps every group and its threads: without sharing, a hundred collections would have a thousand threads."""
    assert ranks(4).run("collection_jobs:shared_groups", RankLayout(2, 2)) == [(True, True)] * 4


def test_groups_are_made_once_and_closed_with_the_last_collection(ranks: Ranks) -> None:
    """A rank makes its own node and rail, for the training threads and for each second thread, and no more for another
    deadline; the world of a second thread only for the exchange that uses it."""
    for rank, found in enumerate(ranks(4).run("collection_jobs:closed_groups", RankLayout(2, 2))):
        for name in ("first", "again"):
            assert found[f"{name}: collections"] == ["node", "rail"]
            assert found[f"{name}: loops"] == ["node", "rail"] * 2
            # The second collection with a loop has a thread of its own.
            assert found[f"{name}: another collection"] == ["node", "rail"] * 3 + ["world"] * (name == "again")
            assert found[f"{name}: left"] == 0
        assert found["timeout"] == 51.0
        assert f"rank {rank}: the collection is closed - read and save its tables before close()" in found["closed"]
        assert set(found["kept"]) == {"item", "odd", "tiny"}


def test_one_node_uses_the_default_group(ranks: Ranks) -> None:
    for layout in (RankLayout(1, 2), RankLayout(2, 1)):
        for found in ranks(2).run("collection_jobs:closed_groups", layout):
            assert found["first: collections"] == []
            assert found["again: another collection"] == ["world"] * 2


@pytest.mark.parametrize(
    ("where", "missing", "call"),
    [
        ("construct", [2], "flexd.EmbeddingCollection()"),
        ("connect", [0, 3], "flexd.connect()"),
        ("close", [1], "EmbeddingCollection.close()"),
    ],
)
def test_ranks_that_do_not_come_are_named_within_the_deadline(
    ranks: Ranks, where: str, missing: list[int], call: str
) -> None:
    for rank, text in enumerate(ranks(4).run("collection_jobs:late", RankLayout(2, 2), missing, where, 0.3)):
        if rank not in missing:
            found = re.match(rf"CollectiveError: rank {rank}: {re.escape(call)}: ranks \[(.*)\] did not call it", text)
            assert found, text
            # On a busy machine a rank that came late is named too.
            assert set(missing) <= {int(other) for other in found[1].split(", ")} < set(range(4))


def test_groups_made_without_new_group_are_groups_of_torch(ranks: Ranks) -> None:
    """Their ranks and their name are known to ``torch.distributed``, and all of its collectives run on them."""
    for rank, (members, total, name) in enumerate(ranks(4).run("collection_jobs:torch_sees", RankLayout(2, 2))):
        assert members == [[0, 1], [2, 3]][rank // 2]
        assert total == sum(members)
        assert name.startswith("flexd/")
