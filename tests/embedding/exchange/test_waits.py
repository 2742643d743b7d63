"""Ranks that wait for each other, for a slow rank, or for one that has left."""

import logging
import time
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch

from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange import waits
from flexd.embedding.exchange.waits import Waits
from flexd.embedding.features import Jagged
from tests.support.rank_pool import RankPool, error_of

IDS = {"item": Jagged(torch.arange(50), torch.tensor([50]))}


class _Store:
    """The published waits of a job."""

    def __init__(self) -> None:
        self.waits: dict[int, Any] = {}


class _Notices:
    def __init__(self, store: _Store) -> None:
        self.store = store
        self.issued: dict[str, int] = {}

    def exchange_waits(self, rank: int, wait: Any, others: Any = ()) -> dict[int, Any]:
        if wait is None:
            del self.store.waits[rank]
        else:
            self.store.waits[rank] = wait
        return {other: self.store.waits[other] for other in others if other in self.store.waits}


def job(ranks: int) -> tuple[_Store, list[Waits], list[float]]:
    store, now = _Store(), [0.0]
    made: Any = [Waits(_Notices(store), rank, "main", clock=lambda: now[0]) for rank in range(ranks)]  # type: ignore[arg-type]
    return store, made, now


def look(each: Waits, group: str, ranks: list[int], doing: str) -> str:
    return error_of(each.look, group, ranks, doing)


def test_a_silent_rank_is_named_by_all_that_wait_for_it_and_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 waits for rank 2, which waits for rank 3. When that has come the others are not named for it."""
    _, (first, _, third, fourth), now = job(4)
    first.begin("rail")
    third.begin("node")
    for _ in range(25):
        now[0] += 1
        assert look(first, "rail", [0, 2], "looks rows up") == look(third, "node", [2, 3], "looks rows up") == ""
    named = [record.getMessage() for record in caplog.records if record.name == waits.__name__]
    assert [text for text in named if text.startswith("rank 0 looks rows up")]
    assert all("for ranks 3, which make no call" in text for text in named)
    assert 4 <= len(named) <= 6, "at most every ten seconds"
    fourth.begin("node")
    third.end()
    third.begin("rail")
    first.end()


def test_ranks_that_wait_for_each_other_end_by_name_and_not_before_it_is_certain() -> None:
    _, (first, second, third), now = job(3)
    first.begin("rail")
    second.begin("world")
    found = []
    for at in range(20):
        now[0] += 1
        if at == 6:
            third.begin("rail")
        found.append(look(first, "rail", [0, 1], "looks rows up"))
        found.append(look(second, "world", [0, 1, 2], "reads tables"))
        if at >= 6:
            found.append(look(third, "rail", [1, 2], "looks rows up"))
    errors = [text for text in found if text]
    assert not any(found[:30]), "not before ten seconds and five looks without a change"
    assert any("rank 0 looks rows up; rank 1 reads tables" in text for text in errors)
    assert any("rank 1 reads tables; rank 0 looks rows up; rank 2 looks rows up" in text for text in errors)
    assert any("rank 2 looks rows up; rank 1 reads tables" in text for text in errors)


def test_a_rank_that_has_left_ends_the_waits_for_what_it_did_not_do() -> None:
    store, (first, second), _ = job(2)
    for each in (first, second):
        each.begin("world")
    store.waits[1] = {"doing": "has closed its collection", "issued": {"main world": 1}, "left": True}
    assert look(first, "world", [0, 1], "looks rows up") == "", "its part of the collective is on its way"
    first.end()
    first.begin("world")
    text = look(first, "world", [0, 1], "looks rows up for evaluation")
    assert "rank 0 looks rows up for evaluation, and rank 1 has closed its collection" in text


def other_calls(rank: int, layout: RankLayout, case: str) -> tuple[str, list[str]]:
    """Let the last rank do something else than the others; return the error of this rank, and its warnings."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    last = rank == layout.world_size - 1

    def step() -> None:
        collection(IDS)["item"].values.sum().backward()
        collection.optimizer.step()

    def run() -> None:
        step()
        if last and case == "slow":
            time.sleep(4)
        if case == "rank 0 evaluates":
            if rank == 0:
                with torch.no_grad():
                    collection(IDS)
            else:
                time.sleep(4)
                with torch.no_grad():
                    collection(IDS)
        elif last and case == "reads":
            collection.gather_table("item")
        elif last and case == "closes":
            collection.close()
        else:
            step()

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    waits.logger.addHandler(handler)
    try:
        with mock.patch.object(waits, "NAMED_SECONDS", 1.5):
            return error_of(run), records
    finally:
        waits.logger.removeHandler(handler)


@pytest.mark.parametrize("case", ["slow", "rank 0 evaluates", "reads", "closes"])
def test_other_calls_of_one_rank_are_named_on_the_others(case: str) -> None:
    """Long before the timeout of the process group."""
    with closing(RankPool(4)) as pool:
        results = pool.run(other_calls, RankLayout(2, 2), case, timeout=55)
    for rank, (text, warned) in enumerate(results):
        if case == "slow":
            assert text == ""
            assert rank == 3 or any("rank 3" in each or "ranks 3" in each for each in warned)
        elif case == "rank 0 evaluates":
            assert text == ""
            assert rank > 0 or any("rank 0 looks rows up for evaluation" in each for each in warned)
        elif case == "closes":
            assert "rank 3 has closed its collection" in text
        else:
            assert "rank 3 reads, loads or saves whole tables" in text
            assert "looks rows up for training" in text
