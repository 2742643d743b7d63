"""Learning rates by table."""

from __future__ import annotations

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.embedding.table_rates import TableRates

ALONE = flexd.RankLayout(1, 1)


def two_tables(**settings: object) -> flexd.EmbeddingCollection:
    tables = [flexd.EmbeddingTable("a", 9, 4), flexd.EmbeddingTable("b", 7, 4, lr=0.5)]
    return flexd.EmbeddingCollection(tables, layout=ALONE, **settings)  # type: ignore[arg-type]


def test_groups_name_their_tables_and_schedulers_reach_them() -> None:
    collection = two_tables(optimizer=flexd.Adam(lr=0.1))
    groups = collection.optimizer.param_groups
    assert [(group["tables"], group["lr"]) for group in groups] == [(["a"], 0.1), (["b"], 0.5)]
    schedule = torch.optim.lr_scheduler.LambdaLR(collection.optimizer, [lambda step: 1.0, lambda step: 0.5**step])
    collection({"a": torch.tensor([1]), "b": torch.tensor([1])})["b"].values.sum().backward()
    collection.optimizer.step()
    schedule.step()
    assert [group["lr"] for group in groups] == [0.1, 0.25]
    saved = collection.optimizer.state_dict()
    other = two_tables(optimizer=flexd.Adam(lr=0.1))
    other.optimizer.load_state_dict(saved)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.25]
    assert other.steps == 1


def test_other_settings_by_table_are_refused() -> None:
    collection = two_tables(optimizer=flexd.Adam(lr=0.1))
    collection({"b": torch.tensor([1])})["b"].values.sum().backward()
    collection.optimizer.param_groups[1]["weight_decay"] = 0.1
    with pytest.raises(
        EmbeddingError, match=r"tables b: weight_decay=0.1, the first group has 0.0 - tables with one kind"
    ):
        collection.optimizer.step()
    with pytest.raises(EmbeddingError, match=r"learning rates by table: \[0.1, -1\] - at least 0"):
        TableRates.of(flexd.SGD(lr=0.1), [0.1, -1], [0, 9])
