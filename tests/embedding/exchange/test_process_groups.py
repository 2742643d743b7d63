"""Process groups: their timeout, and layouts that do not fit them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.core.errors import TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.exchange.process_groups import layout_from_environment
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


def test_collectives_wait_as_long_as_the_default_group(ranks: Ranks) -> None:
    assert ranks(4).run("broken_jobs:timeouts", RankLayout(2, 2)) == [[60.0] * 3] * 4


def test_without_a_process_group_each_rank_would_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    table = flexd.EmbeddingTable("item", 10, 4)
    with pytest.raises(TopologyError, match=r"WORLD_SIZE=4, but there is no process group.*init_process_group first"):
        flexd.EmbeddingCollection([table])
    flexd.EmbeddingCollection([table], layout=RankLayout(1, 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert layout_from_environment() == RankLayout(1, 1)


def test_a_process_group_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
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
