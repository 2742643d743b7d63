"""Process groups: their timeout, and layouts that do not fit them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import flexd
from flexd.core.errors import TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingTable
from flexd.embedding.exchange.process_groups import layout_from_environment
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad
from tests.support import collection_jobs, fault_jobs
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


def test_collectives_have_the_timeout_of_the_default_group(ranks: Ranks) -> None:
    assert ranks(4).run(fault_jobs.timeouts, RankLayout(2, 2)) == [[60.0] * 3] * 4


def test_without_a_process_group_each_rank_would_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    table = flexd.EmbeddingTable("item", 10, 4)
    with pytest.raises(TopologyError, match=r"WORLD_SIZE=4, but there is no process group.*init_process_group first"):
        flexd.EmbeddingCollection([table])
    flexd.EmbeddingCollection([table], layout=RankLayout(1, 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert layout_from_environment() == RankLayout(1, 1)


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
    for text in ranks(4).run(collection_jobs.construct, arguments, timeout=30):
        assert text.startswith("TopologyError")
        assert cause in text


def test_groups_are_made_once_and_closed_with_the_last_collection(ranks: Ranks) -> None:
    """A rank makes its own node and rail, for the training threads and for each second thread, and no more for another
    deadline; the world of a second thread only for the exchange that uses it."""
    for rank, found in enumerate(ranks(4).run(collection_jobs.closed_groups, RankLayout(2, 2))):
        for name in ("first", "again"):
            assert found[f"{name}: collections"] == ["node", "rail"]
            assert found[f"{name}: loops"] == ["node", "rail"] * 2
            # The second collection with a loop has a thread of its own.
            assert found[f"{name}: another collection"] == ["node", "rail"] * 3 + ["world"] * (name == "again")
            assert found[f"{name}: left"] == 0
        assert found["timeout"] == 51.0
        assert f"rank {rank}: the collection is closed - read and save its tables before close()" in found["closed"]
        assert set(found["kept"]) == {"item", "odd", "tiny"}


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
    for rank, text in enumerate(ranks(4).run(collection_jobs.late, RankLayout(2, 2), missing, where, 0.3)):
        if rank not in missing:
            found = re.match(rf"CollectiveError: rank {rank}: {re.escape(call)}: ranks \[(.*)\] did not call it", text)
            assert found, text
            # On a busy machine a rank that came late is named too.
            assert set(missing) <= {int(other) for other in found[1].split(", ")} < set(range(4))
